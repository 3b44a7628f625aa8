"""Versions of what a run was made with."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "grain")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide what a run computes.

    Example:
        >>> "jax" in versions()
        True
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
