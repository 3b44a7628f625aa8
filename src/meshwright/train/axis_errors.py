"""Errors of collectives over an axis that is not there, with the axis and the line of the job that names it.

JAX reports such an axis as an unbound name or, in `shard_map`, as an assertion without a message.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from meshwright.errors import JobError, did_you_mean
from meshwright.mesh.current import current_mesh

_COLLECTIVES = os.path.join("lax", "parallel.py")
_UNBOUND = re.compile(r"unbound axis name: ([\w.\-]+?)\.?(?:\s|$)")
_JAX = os.path.dirname(jax.__file__) + os.sep


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a collective in a traceback: the function, its axes, and the line that calls it."""

    function: str
    axes: tuple[str, ...]
    line: str


@contextlib.contextmanager
def axis_errors() -> Iterator[None]:
    """Turns JAX's errors about a collective's axis into a `JobError` with the axis and the line.

    Example:
        >>> from jax import lax
        >>> with axis_errors():
        ...     lax.psum(1.0, "model")
        Traceback (most recent call last):
        ...
        meshwright.errors.JobError: `psum` at <doctest ...>:2 uses axis `model` outside of shard_map.
        hint: call it only if meshwright.parallel.is_manual('model') is true, as it is in the local view.
    """
    try:
        yield
    except (NameError, AssertionError, KeyError, ValueError) as error:
        call = _collective(error)
        if call is None:
            raise
        mesh = current_mesh()
        manual: Any = () if mesh is None else mesh.manual_axes
        missing = next((axis for axis in call.axes if axis not in manual), None)
        if missing is None:
            raise
        raise _error(call, missing, mesh) from error


def _error(call: CollectiveCall, axis: str, mesh: Any) -> JobError:
    sizes = {} if mesh is None else dict(mesh.shape)
    what = f"`{call.function}` at {call.line} uses axis `{axis}`"
    guard = f"call it only if meshwright.parallel.is_manual({axis!r}) is true, as it is in the local view"
    if axis in sizes:
        why = "has size 1" if sizes[axis] == 1 else "is automatic here: XLA communicates along it"
        declare = "" if sizes[axis] == 1 else f', or declare it, to run in that view: Job(..., local_axes=("{axis}",))'
        return JobError(f"{what}, which {why}.", hint=f"{guard}{declare}.")
    close = did_you_mean(axis, sizes)
    if mesh is None or not mesh.manual_axes:
        if close:
            return JobError(f"{what}, which this mesh does not have.", hint=f"{close} {guard}.")
        return JobError(f"{what} outside of shard_map.", hint=f"{guard}.")
    shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
    hint = close or f"use one of its axes: {', '.join(sizes)}."
    return JobError(f"{what}, which the mesh {shown} does not have.", hint=hint)


def _collective(error: BaseException) -> CollectiveCall | None:
    """Returns the outermost call of a collective that an error passed through."""
    caller = ""
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        code, known = frame.tb_frame.f_code, frame.tb_frame.f_locals
        if not code.co_filename.startswith(_JAX):
            here = os.path.relpath(code.co_filename) if os.path.isabs(code.co_filename) else code.co_filename
            caller = f"{code.co_filename if here.startswith(os.pardir) else here}:{frame.tb_lineno}"
        elif code.co_filename.endswith(_COLLECTIVES) and "axis_name" in known and not code.co_name.startswith("_"):
            return CollectiveCall(code.co_name, _names(known["axis_name"]), caller)
        frame = frame.tb_next
    unbound = _UNBOUND.search(str(error))  # JAX may have removed its own frames
    return CollectiveCall("a collective", (unbound[1],), caller) if unbound else None


def _names(axes: Any) -> tuple[str, ...]:
    return tuple(map(str, axes)) if isinstance(axes, (tuple, list)) else (str(axes),)
