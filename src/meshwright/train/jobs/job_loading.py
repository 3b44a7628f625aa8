"""Jobs loaded from `module:attribute` references, and errors in their code with file and line."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

from meshwright.errors import JobError, MeshwrightError, did_you_mean


def load_job(reference: str) -> Any:
    """Imports the job named by `package.module:attribute` or `path/to/file.py:attribute`.

    A file can import the modules beside it. The attribute may also be a function without arguments that returns the
    job. An error in the job's code raises a `JobError` with its file and line.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "linear_job.py"
        >>> _ = path.write_text("import meshwright as mw\\njob = mw.Job(init=lambda key: {}, rules=[], mesh='dp:8')")
        >>> load_job(f"{path}:job").mesh
        'dp:8'
    """
    job = load_attribute(reference, what="job")
    if callable(job) and not hasattr(job, "init"):
        job = _call(reference, job)
    missing = [name for name in ("init", "rules") if not hasattr(job, name)]
    if missing:
        raise JobError(
            f"{reference!r} is a {type(job).__name__} without {' and '.join(missing)}.",
            hint="define init(key) -> params and rules, for example with meshwright.Job.",
        )
    return job


def load_attribute(reference: str, *, what: str = "object") -> Any:
    """Imports the object named by `package.module:attribute` or `path/to/file.py:attribute`.

    Args:
        what: a word for the object in errors.

    Example:
        >>> load_attribute("math:pi")
        3.141592653589793
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        article = "an" if what[0] in "aeiou" else "a"
        raise JobError(
            f"{reference!r} does not name {article} {what}.",
            hint=f"write module:attribute, for example my_pkg.train:{what}.",
        )
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise _no_attribute(where, module, attribute) from None


@contextlib.contextmanager
def job_errors(job: Any, reference: str) -> Iterator[None]:
    """Turns errors raised by a job's functions into a `JobError` with the function, file and line.

    Errors of Meshwright and errors without a line of the job in their traceback pass through unchanged.

    Args:
        reference: the name of the job in the error.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        frames = _own_frames(error, skip=2)  # skip this frame and that of the `with` statement
        which = _function_of(job, error)
        if which is None and not frames:
            raise
        trace = "".join(
            f"\n  {_place(frame.filename, frame.lineno)}, in {frame.name}: {frame.line}" for frame in frames
        )
        raise JobError(
            f"{f'`{which}` of ' if which else ''}the job {reference!r} failed.\n{_located(error, frames)}"
            + (f"\ntraceback in the job's code (most recent call last):{trace}" if frames else ""),
            hint="fix the job; `init` is called as init(key), `loss` as loss(params, batch, rng).",
        ) from error


def _import_module(name: str) -> Any:
    # Like `python -m`, search the current directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        own = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        if own or name.startswith("."):
            raise JobError(
                f"no module named {name!r}.", hint="run from the directory that contains it, or install it."
            ) from None
        raise _import_failed(name, error) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise JobError(f"file {str(path)!r} does not exist.", hint="check the path.")
    _search_folder(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        # Remove the partly initialized module.
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise _import_failed(str(path), error) from error
    return module


_job_folders: list[str] = []
"""Folders of job files, which are on `sys.path`."""


def _search_folder(folder: Path) -> None:
    """Puts a job file's folder first on `sys.path`, as `python file.py` does, so that it can import its siblings."""
    here = str(folder)
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        # A job in another folder may have imported a module of the same name.
        others = [other for other in _job_folders if other != here]
        if source is not None and os.path.dirname(source) in others and (folder / f"{name}.py").is_file():
            del sys.modules[name]
    if here not in _job_folders:
        _job_folders.append(here)
    if here in sys.path:
        sys.path.remove(here)
    sys.path.insert(0, here)


def _import_failed(what: str, error: BaseException) -> JobError:
    if isinstance(error, ModuleNotFoundError):
        hint: str | None = "install it, or run from the directory that contains it."
    elif isinstance(error, SystemExit):
        hint = "move the code that exits under `if __name__ == '__main__':`."
    else:
        command = f"python {what}" if what.endswith(".py") else f"python -m {what}"
        hint = getattr(error, "hint", None) or f"run `{command}` to reproduce it."
    return JobError(f"cannot import the job's module {what!r}.\n{_located(error, _own_frames(error))}", hint=hint)


def _no_attribute(where: str, module: Any, attribute: str) -> JobError:
    names = [name for name in vars(module) if not name.startswith("_")]
    text = f"module {where!r} has no attribute {attribute!r}."
    if names:
        return JobError(text, hint=did_you_mean(attribute, names) or f"use one of: {', '.join(names[:8])}.")
    if getattr(module, "__file__", None) is not None:
        return JobError(text, hint="define it; the module has no public names.")
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    inside = sorted({path.stem for folder in folders for path in folder.glob("*.py") if path.stem.isidentifier()})
    choices = ", ".join(f"{where}.{name}:{attribute}" for name in inside[:8])
    return JobError(
        f"{where!r} is a folder, not a module.",
        hint=f"name a module in it: {choices}." if inside else "name a Python file; this folder has none.",
    )


def _call(reference: str, make: Callable[[], Any]) -> Any:
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some C functions have no signature
        parameters = []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in variable]
    if needed:
        raise JobError(
            f"{reference!r} is a function with required arguments: {', '.join(needed)}.",
            hint="name a meshwright.Job, or a function without arguments that returns one.",
        )
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise JobError(
            f"the function {reference!r} failed to make the job.\n{_located(error, _own_frames(error))}",
            hint=getattr(error, "hint", None) or "return a meshwright.Job when called without arguments.",
        ) from error


# --- Locating errors ---


def _located(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Returns an error with its file and line: `job.py:12: NameError: ...`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_place(error.filename, error.lineno)}: {type(error).__name__}: {error.msg}"
    text = str(error).split("\nhint:")[0] if isinstance(error, MeshwrightError) else str(error)
    where = f"{_place(frames[-1].filename, frames[-1].lineno)}: " if frames else ""
    return f"{where}{type(error).__name__}: {text}" if text else f"{where}{type(error).__name__}"


def _place(filename: str, line: int | None) -> str:
    here = os.path.relpath(filename)
    return f"{filename if here.startswith(os.pardir) else here}:{line}"


def _own_frames(error: BaseException, *, skip: int = 0) -> list[traceback.FrameSummary]:
    """Returns the frames of an error outside of Meshwright and installed packages, innermost last.

    If there are none, the job may be installed: returns the frames in packages other than JAX and Meshwright.
    """
    trace = traceback.extract_tb(error.__traceback__)[skip:]
    known = {name: sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    packages = [known["purelib"], known["platlib"]]
    never = [str(Path(__file__).parents[2])]
    never += [os.path.join(place, name) for place in packages for name in ("jax", "jaxlib", "meshwright")]
    outside = [frame for frame in trace if os.path.isabs(frame.filename) and not _is_below(frame.filename, never)]
    own = [frame for frame in outside if not _is_below(frame.filename, list(known.values()))]
    return own or [frame for frame in outside if _is_below(frame.filename, packages)]


def _is_below(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


def _function_of(job: Any, error: BaseException) -> str | None:
    """Returns the name of the job's function that an error passed through."""
    codes = {_code(getattr(job, name, None)): name for name in ("make_batch", "example_batch", "init", "loss")}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return codes[frame.f_code]
    # A call with wrong arguments raises before the function has a frame.
    called = str(error).partition("()")[0] if isinstance(error, TypeError) else ""
    return next((name for code, name in codes.items() if code is not None and code.co_qualname == called), None)


def _code(function: Any) -> CodeType | None:
    """Returns the code object of a function, method, partial, wrapper or callable object."""
    while isinstance(function, (functools.partial, MethodType)):  # in Python 3.14, also a bound partial
        function = function.func if isinstance(function, functools.partial) else function.__func__
    function = inspect.unwrap(function) if callable(function) else None
    if function is not None and not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
