"""A job: what the commands work on. `module:attribute` on the command line leads to one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meshwright.errors import JobError, did_you_mean
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

    Any object with these attributes is a job; only `init` and `rules` are always needed.
    """

    init: Callable[[Any], PyTree]
    rules: Any
    loss: Callable[..., Any] | None = None
    batch: PyTree = None
    mesh: str | None = None
    make_batch: Callable[[int], PyTree] | None = None
    vocab_size: int | None = None


def abstract_init(init: Callable[[Any], PyTree]) -> PyTree:
    """Returns the shapes and dtypes that `init` would give, without computing or allocating anything."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(init, key)


def load_job(reference: str) -> Any:
    """Imports the job that `package.module:attribute` or `path/to/file.py:attribute` names.

    The attribute may also be a function without arguments that returns the job.
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
        names = [name for name in vars(module) if not name.startswith("_")]
        hint = did_you_mean(attribute, names) or f"it has: {', '.join(names[:8])}"
        raise JobError(f"module {where!r} has no attribute {attribute!r}.", hint=hint) from None
    if callable(job) and not hasattr(job, "init"):
        job = job()
    missing = [name for name in ("init", "rules") if not hasattr(job, name)]
    if missing:
        raise JobError(
            f"{reference!r} is a {type(job).__name__} without {' and '.join(missing)}.",
            hint="a job needs init(key) -> params and rules; meshwright.Job holds both.",
        )
    return job


def _import_module(name: str) -> Any:
    # Like `python -m`: what lies in the current folder can be named.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise JobError(
                f"there is no module {name!r} to import.",
                hint="run from the folder that holds it, or install it.",
            ) from None
        raise


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise JobError(f"there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
