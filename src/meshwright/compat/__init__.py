"""Drop-in modules for code written for fjformer and xlstm_jax.

Change the import prefix from `fjformer.partition_utils` to `meshwright.compat.fjformer.partition_utils`. If you cannot
edit the code, call `alias("fjformer")` before importing it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

from meshwright.errors import MeshwrightError, did_you_mean

_PACKAGES = ("fjformer", "xlstm_jax")


def alias(package: str) -> None:
    """Makes the drop-in modules importable under the original package's name.

    Raises if the original package is installed, because the alias would hide it.

    Example:
        >>> alias("fjformer")
        >>> from fjformer.partition_utils import match_partition_rules
        >>> match_partition_rules.__module__
        'meshwright.layout.layout'
    """
    if package not in _PACKAGES:
        known = ", ".join(_PACKAGES)
        raise MeshwrightError(
            f"there are no drop-in modules for {package!r}.",
            hint=did_you_mean(package, _PACKAGES) or f"use one of: {known}",
        )
    ours = importlib.import_module(f"{__name__}.{package}")
    if sys.modules.get(package) is ours:
        return
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        raise MeshwrightError(
            f"the original {package!r} is installed, and an alias would hide it.",
            hint=f"uninstall it, or import from meshwright.compat.{package}.",
        )
    sys.modules[package] = ours
    for module in pkgutil.walk_packages(ours.__path__, f"{ours.__name__}."):
        old_name = module.name.removeprefix(f"{__name__}.")
        sys.modules[old_name] = importlib.import_module(module.name)
