"""Jobs, the input of the commands, and loading them from `module:attribute` references."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, MethodType
from typing import Any, cast

import jax

from meshwright.errors import JobError, MeshError, MeshwrightError, did_you_mean
from meshwright.models.execution import DATA_AXES, Execution
from meshwright.models.language import LanguageModel
from meshwright.rules import as_rules
from meshwright.specs import spec_axes
from meshwright.types import PyTree


@dataclass(frozen=True)
class Job:
    """A task as plain functions: a model, its sharding rules, its loss, and optionally its data and optimizer.

    Any object with these attributes is a job; only `init` and `rules` are required.

    Args:
        init: `init(key) -> params` (or a whole train state).
        rules: `(regex, PartitionSpec)` pairs, or `Rules`.
        loss: `loss(params, batch, rng) -> (loss, metrics)`; with a model state, `loss(params, model_state, batch, rng)
            -> (loss, metrics, model_state)`. The loss is a mean, or a `(sum, count)` pair over valid targets. Metrics
            combine as they declare, see `meshwright.metrics`. `rng` is None in evaluation.
        batch: an example batch of arrays or `jax.ShapeDtypeStruct`.
        mesh: the job's usual mesh, as a string.
        make_batch: `make_batch(seed) -> batch` with the example's shapes, for `meshwright train --job` and
            `verify`.
        vocab_size: size of the model's vocabulary. Data with larger tokens is rejected, because JAX clamps them.
        model: the model that the loss trains, if it is a `meshwright.models.LanguageModel`, for plans by layer.
        execution: the execution options of that model.
        model_state: `model_state(key) -> arrays` that the loss updates without gradients, such as BatchNorm statistics;
            gets the key of `init`.
        model_state_reduce: how devices combine their model states in the local view; see `accumulate`.
        frozen: regexes; parameters with a match in their path get no gradient and no optimizer state.
        data: training data for `meshwright train --job`: arrays, a Grain dataset, a path, or a function from a seed to
            an iterator.
        eval_data: evaluation data, in the same forms.
        eval_loss: a loss for evaluation, if it differs from `loss` with `rng=None`.
        optimizer: an optax optimizer, or a function from the number of steps to one.
        schedule: `schedule(step) -> learning rate`, for the built-in optimizers.
        predict: `predict(params, batch)`, or `predict(params, model_state, batch)`, for the report page.
        local_axes: mesh axes, other than the data axes and `fsdp`, over which the loss communicates in the local view,
            for example `("tp",)`. On meshes with any other axis, the step runs in the global view.
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
    model_state: Callable[[Any], PyTree] | None = None
    model_state_reduce: Any = "mean"
    frozen: str | Sequence[str] = ()
    data: Any = None
    eval_data: Any = None
    eval_loss: Callable[..., Any] | None = None
    optimizer: Any = None
    schedule: Callable[[Any], Any] | None = None
    predict: Callable[..., Any] | None = None
    local_axes: tuple[str, ...] = ()


def abstract_init(init: Callable[[Any], PyTree]) -> PyTree:
    """Returns the shapes and dtypes of `init(key)` without computing or allocating anything.

    Example:
        >>> abstract_init(lambda key: {"w": jax.random.normal(key, (2, 3))})
        {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(init, key)


def traceable_loss(job: Any) -> Callable[..., Any]:
    """Returns `loss(params, batch, rng, **options) -> (loss, metrics)` of any job, with zeros as its model state.

    Use it to count operations and bytes, not to compute a loss.
    """
    make_state = getattr(job, "model_state", None)
    if make_state is None:
        return cast("Callable[..., Any]", job.loss)
    shapes = abstract_init(make_state)

    @functools.wraps(job.loss)
    def loss(params: PyTree, batch: PyTree, rng: Any, **options: Any) -> Any:
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), shapes)
        return job.loss(params, zeros, batch, rng, **options)[:2]

    return loss


def model_of(job: Any) -> LanguageModel | None:
    """Returns the job's `LanguageModel`, or None."""
    model = getattr(job, "model", None)
    return model if isinstance(model, LanguageModel) else None


def execution_of(job: Any) -> Execution | None:
    """Returns the execution options of the job's language model, or None."""
    execution = getattr(job, "execution", None)
    return execution if isinstance(execution, Execution) else None


def loss_axes(job: Any) -> tuple[str, ...]:
    """Returns the mesh axes that the loss handles itself: those of its `Execution`, and the job's `local_axes`."""
    execution, declared = execution_of(job), getattr(job, "local_axes", ())
    found = [declared] if isinstance(declared, str) else [*declared]
    if execution is not None:
        found += [*execution.data_axes, *filter(None, (execution.pipeline_axis, execution.tensor_axis))]
    return tuple(dict.fromkeys(found))


def unused_axes(
    job: Any,
    mesh_sizes: Mapping[str, int],
    *,
    data_axes: str | Sequence[str] | None = None,
    split_axes: Iterable[str] | None = None,
) -> list[str]:
    """Returns the mesh axes of size 2 or more that split nothing, so that their devices repeat the same work.

    Args:
        data_axes: the axes that split the rows of a batch (default: `dp` and `fsdp`).
        split_axes: the axes that split parameters or optimizer state (default: the axes of the job's rules).
    """
    known = _known_axes(job, data_axes, split_axes)
    return [axis for axis, size in mesh_sizes.items() if size > 1 and axis not in known]


def check_axes(
    job: Any,
    mesh_sizes: Mapping[str, int],
    *,
    data_axes: str | Sequence[str] | None = None,
    split_axes: Iterable[str] | None = None,
) -> None:
    """Raises if an axis of the mesh splits nothing; the arguments are those of `unused_axes`."""
    unused = unused_axes(job, mesh_sizes, data_axes=data_axes, split_axes=split_axes)
    if not unused:
        return
    known = _known_axes(job, data_axes, None)
    names = f"use {', '.join(known)}"
    if execution_of(job) is None:
        names += "; if the loss communicates over another axis, declare it: Job(..., local_axes=...)"
    close = did_you_mean(unused[0], known)
    axes = f"{'axis' if len(unused) == 1 else 'axes'} {', '.join(map(repr, unused))}"
    raise MeshError(f"this job does not use mesh {axes}.", hint=f"{close} {names}." if close else f"{names}.")


def _known_axes(job: Any, data_axes: str | Sequence[str] | None, split_axes: Iterable[str] | None) -> tuple[str, ...]:
    if split_axes is None:
        split_axes = (axis for _, spec in as_rules(job.rules) for axis in spec_axes(spec))
    rows = DATA_AXES if data_axes is None else (data_axes,) if isinstance(data_axes, str) else data_axes
    return tuple(dict.fromkeys([*rows, *split_axes, *loss_axes(job)]))


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
    never = [str(Path(__file__).parents[1])]
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
