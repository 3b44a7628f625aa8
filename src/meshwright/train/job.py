"""A job: what the commands work on. `module:attribute` on the command line leads to one."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, MethodType
from typing import Any

import jax

from meshwright.errors import JobError, MeshError, MeshwrightError, did_you_mean
from meshwright.mesh.string import parse_mesh
from meshwright.models.execution import DATA_AXES, Execution
from meshwright.models.language import LanguageModel
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.types import PyTree


@dataclass(frozen=True)
class Job:
    """A model and its rules, as plain functions.

    Args:
        init: from a random key to the parameters (or to a whole train state).
        rules: `(regex, PartitionSpec)` pairs, or `Rules`.
        loss: `loss(params, batch, rng) -> (loss, metrics)`.
        batch: an example batch, of arrays or `jax.ShapeDtypeStruct`.
        mesh: the mesh it is usually run on, as a string.
        make_batch: from a seed to a batch of the example's shapes, for comparing steps (`meshwright verify`).
        vocab_size: how many tokens the model knows. Text with others is refused: JAX would look them up as the last.
        model: the language model that the loss trains, if it is one of `meshwright.models`: plans then know its layers.
        execution: the options that this model runs with.

    Any object with these attributes is a job; only `init` and `rules` are always needed.
    """

    init: Callable[[Any], PyTree]
    rules: Any
    loss: Callable[..., Any] | None = None
    batch: PyTree = None
    mesh: str | None = None
    make_batch: Callable[[int], PyTree] | None = None
    vocab_size: int | None = None
    model: LanguageModel | None = None
    execution: Execution | None = None


def abstract_init(init: Callable[[Any], PyTree]) -> PyTree:
    """Returns the shapes and dtypes that `init` would give, without computing or allocating anything."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(init, key)


def model_of(job: Any) -> LanguageModel | None:
    """Returns the language model of a job; None if it has another one, whose layers we know nothing of."""
    model = getattr(job, "model", None)
    return model if isinstance(model, LanguageModel) else None


def execution_of(job: Any) -> Execution | None:
    """Returns the options that the language model of a job runs with."""
    execution = getattr(job, "execution", None)
    return execution if isinstance(execution, Execution) else None


def known_axes(job: Any) -> tuple[str, ...]:
    """Returns all mesh axes that a job can use: those of its batch, its rules and its model.

    A loss of a user's own can use axes by name; it is taken to use those of the job's `mesh`.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> known_axes(language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16))
        ('dp', 'fsdp', 'pp', 'tp')
    """
    found = [*DATA_AXES, *(axis for _, spec in as_rules(job.rules) for axis in spec_axes(spec))]
    execution, mesh = execution_of(job), getattr(job, "mesh", None)
    if execution is not None:
        found += [*execution.data_axes, *filter(None, (execution.pipeline_axis, execution.tensor_axis))]
    elif isinstance(mesh, str) and mesh:
        found += parse_mesh(mesh).names
    return tuple(dict.fromkeys(found))


def unused_axes(job: Any, mesh_sizes: Mapping[str, int]) -> list[str]:
    """Returns the axes of a mesh, of more than one device, that split nothing of a job.

    Their devices would all compute the same.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> unused_axes(job, {"dp": 2, "fdsp": 4, "spare": 1})
        ['fdsp']
    """
    known = known_axes(job)
    return [axis for axis, size in mesh_sizes.items() if size > 1 and axis not in known]


def check_axes(job: Any, mesh_sizes: Mapping[str, int]) -> None:
    """Raises where an axis of a mesh splits nothing of a job."""
    unused, known = unused_axes(job, mesh_sizes), known_axes(job)
    if not unused:
        return
    names = f"its axes are {', '.join(known)}"
    if execution_of(job) is None:
        names += "; if its loss uses another one, name that in the job's own mesh"
    close = did_you_mean(unused[0], known)
    which = f"axis {unused[0]!r} splits" if len(unused) == 1 else f"axes {', '.join(map(repr, unused))} split"
    raise MeshError(f"{which} nothing of this job.", hint=f"{close} {names}." if close else f"{names}.")


def load_job(reference: str) -> Any:
    """Imports the job that `package.module:attribute` or `path/to/file.py:attribute` names.

    The attribute may also be a function without arguments that returns the job. What goes wrong in the job's own code
    is a `JobError` that says in which line.
    """
    where, _, attribute = reference.rpartition(":")
    if not where or not attribute:
        raise JobError(
            f"{reference!r} does not name a job.",
            hint="write module:attribute, for example my_pkg.train:job.",
        )
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    try:
        job = getattr(module, attribute)
    except AttributeError:
        raise _no_attribute(where, module, attribute) from None
    if callable(job) and not hasattr(job, "init"):
        job = _call(reference, job)
    missing = [name for name in ("init", "rules") if not hasattr(job, name)]
    if missing:
        raise JobError(
            f"{reference!r} is a {type(job).__name__} without {' and '.join(missing)}.",
            hint="a job needs init(key) -> params and rules; meshwright.Job holds both.",
        )
    return job


@contextlib.contextmanager
def job_errors(job: Any, reference: str) -> Iterator[None]:
    """Makes what a job's own functions raise a `JobError` that says which and where, for commands.

    Errors of ours, and those in which no line of the job has a part, stay as they are.

    Args:
        reference: what the job is called in the error.
    """
    try:
        yield
    except MeshwrightError:
        raise
    except Exception as error:
        frames = _own_frames(error, skip=2)  # this one, and that of the `with`
        which = _function_of(job, error)
        if which is None and not frames:
            raise
        trace = "".join(
            f"\n  {_place(frame.filename, frame.lineno)}, in {frame.name}: {frame.line}" for frame in frames
        )
        raise JobError(
            f"{f'`{which}` of ' if which else ''}the job {reference!r} failed.\n{_located(error, frames)}"
            + (f"\nwhere, in its own code, the last call last:{trace}" if frames else ""),
            hint="correct the job; `init` is called as init(key), `loss` as loss(params, batch, rng).",
        ) from error


def _import_module(name: str) -> Any:
    # Like `python -m`: what lies in the current folder can be named.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        own = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        if own or name.startswith("."):
            raise JobError(
                f"there is no module {name!r} to import.",
                hint="run from the folder that holds it, or install it.",
            ) from None
        raise _import_failed(name, error) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise JobError(f"there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        # What is half done must not be found by others.
        if before is None:
            del sys.modules[path.stem]
        else:
            sys.modules[path.stem] = before
        raise _import_failed(str(path), error) from error
    return module


def _import_failed(what: str, error: BaseException) -> JobError:
    if isinstance(error, ModuleNotFoundError):
        hint: str | None = "install it, or run from the folder that holds it."
    elif isinstance(error, SystemExit):
        hint = "a job's module must not end the program; put that under `if __name__ == '__main__':`."
    else:
        hint = (
            getattr(error, "hint", None) or f"`python {what if what.endswith('.py') else f'-m {what}'}` shows the same."
        )
    return JobError(f"the job's module {what!r} cannot be imported.\n{_located(error, _own_frames(error))}", hint=hint)


def _no_attribute(where: str, module: Any, attribute: str) -> JobError:
    names = [name for name in vars(module) if not name.startswith("_")]
    text = f"module {where!r} has no attribute {attribute!r}."
    if names:
        return JobError(text, hint=did_you_mean(attribute, names) or f"it has: {', '.join(names[:8])}")
    if getattr(module, "__file__", None) is not None:
        return JobError(text, hint="it has no public names at all.")
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    inside = sorted({path.stem for folder in folders for path in folder.glob("*.py") if path.stem.isidentifier()})
    choices = ", ".join(f"{where}.{name}:{attribute}" for name in inside[:8])
    return JobError(
        f"{where!r} is a folder, and no module.",
        hint=f"name a module in it: {choices}." if inside else "there is no Python file in it.",
    )


def _call(reference: str, make: Callable[[], Any]) -> Any:
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):  # some that are written in C have no signature
        parameters = []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in variable]
    if needed:
        raise JobError(
            f"{reference!r} is no job, and a function that needs arguments: {', '.join(needed)}.",
            hint="name a meshwright.Job, or a function without arguments that returns one.",
        )
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{reference!r} is a function, which failed when it was called for the job.\n"
            f"{_located(error, _own_frames(error))}",
            hint=getattr(error, "hint", None) or "it must return a meshwright.Job when called without arguments.",
        ) from error


# --- Where an error comes from ---


def _located(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """Returns an error in words after the file and line that it comes from: `job.py:12: NameError: ...`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_place(error.filename, error.lineno)}: {type(error).__name__}: {error.msg}"
    text = str(error).split("\nhint:")[0] if isinstance(error, MeshwrightError) else str(error)
    where = f"{_place(frames[-1].filename, frames[-1].lineno)}: " if frames else ""
    return f"{where}{type(error).__name__}: {text}" if text else f"{where}{type(error).__name__}"


def _place(filename: str, line: int | None) -> str:
    here = os.path.relpath(filename)
    return f"{filename if here.startswith(os.pardir) else here}:{line}"


def _own_frames(error: BaseException, *, skip: int = 0) -> list[traceback.FrameSummary]:
    """Returns the frames of an error that are neither ours nor of installed packages, the innermost last.

    A job may be installed itself: where there are none, those of packages other than JAX and this one are returned.
    """
    trace = traceback.extract_tb(error.__traceback__)[skip:]
    known = {name: sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = str(Path(__file__).parents[1])
    packages = [known["purelib"], known["platlib"]]
    never = [ours, *(os.path.join(place, name) for place in packages for name in ("jax", "jaxlib", "meshwright"))]
    outside = [frame for frame in trace if os.path.isabs(frame.filename) and not _is_below(frame.filename, never)]
    own = [frame for frame in outside if not _is_below(frame.filename, list(known.values()))]
    in_packages = [frame for frame in outside if _is_below(frame.filename, packages)]
    return own or in_packages


def _is_below(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder + os.sep) for folder in folders)


def _function_of(job: Any, error: BaseException) -> str | None:
    """Returns the name of the job's function that an error passed through."""
    codes = {_code(getattr(job, name, None)): name for name in ("make_batch", "example_batch", "init", "loss")}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in codes:
            return codes[frame.f_code]
    # A call with arguments that it does not take never gets to its first line.
    called = str(error).partition("()")[0] if isinstance(error, TypeError) else ""
    return next((name for code, name in codes.items() if code is not None and code.co_qualname == called), None)


def _code(function: Any) -> CodeType | None:
    """Returns the code of a function, also of one that is bound, wrapped, partly given its arguments, or an object."""
    while isinstance(function, (functools.partial, MethodType)):  # also a partial that is bound, as in Python 3.14
        function = function.func if isinstance(function, functools.partial) else function.__func__
    function = inspect.unwrap(function) if callable(function) else None
    if function is not None and not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
