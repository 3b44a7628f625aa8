"""Names that are imported on first use, and packages that can be called like the function they are named after."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

TYPE_CHECKING = False  # importing `typing` would take longer than importing this package
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's `__getattr__` that imports each name from its module when it is first used.

    Example:
        >>> load = lazy_names("meshwright", {"Job": "meshwright.train.job"})
        >>> load("Job").__name__
        'Job'
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


class CallablePackage(ModuleType):
    """A package that forwards calls to one function, so that `mw.verify(job)` works and so does `mw.verify.Case`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, _, name = self.__dict__["__entry__"].partition(":")
        return getattr(import_module(module), name)(*args, **kwargs)


def make_callable(package: str, entry: str) -> None:
    """Makes an imported package callable; `entry` is `module:function`, imported at the first call."""
    module = sys.modules[package]
    module.__dict__["__entry__"] = entry
    module.__class__ = CallablePackage
