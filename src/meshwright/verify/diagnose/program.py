"""Sums and random draws in a loss, read from the jaxpr of its local view, with their source lines.

JAX's types say along which axes a value *may* vary: a value that was marked as varying (`pcast`) keeps that mark. Here
marks do not count. So a sum of values that are equal on all devices of an axis, which multiplies by the axis size and
which no type check finds, can be told from a sum of partial results.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from meshwright.hardware.linearity import inner_jaxprs, open_jaxpr
from meshwright.specs import spec_axes

Labels = frozenset[str]
"""The axes along which a value varies, and the inputs that it depends on."""

RNG, BATCH = "<rng>", "<batch>"

_SUMS = ("psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter")
_EQUALIZE = ("psum", "psum2", "psum_invariant", "pmin", "pmax", "all_gather", "all_gather_invariant")
_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator")
_HERE = str(Path(__file__).parents[2]) + os.sep
_JAX = str(Path(jax.__file__).parent) + os.sep
_PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib"))


@dataclass(frozen=True)
class MeshSum:
    """A sum over mesh axes in a job's code.

    Args:
        axes: the axes that it sums over.
        varies: the axes along which its operand differs between devices.
        shape: the shape of its operand on one device.
        line: file and line.
    """

    axes: tuple[str, ...]
    varies: tuple[str, ...]
    shape: tuple[int, ...]
    line: str

    @property
    def of_equals(self) -> tuple[str, ...]:
        """The axes along which it adds equal values."""
        return tuple(axis for axis in self.axes if axis not in self.varies)


@dataclass(frozen=True)
class Draw:
    """A draw of random numbers in a job's code.

    Args:
        varies: the axes along which its key differs between devices.
        has_key: whether its key depends on the loss's key or on the batch.
    """

    varies: tuple[str, ...]
    has_key: bool
    line: str


@dataclass
class TracedProgram:
    """The sums and draws of a program, in program order."""

    sums: list[MeshSum] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


def read_program(jaxpr: Any, labels: Sequence[Labels]) -> TracedProgram:
    """Returns the sums and draws of a closed jaxpr; `labels` are those of its inputs.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> def twice(x):
        ...     return jax.lax.psum(jax.lax.psum(x, "tp"), "tp")
        >>> mapped = mw.parallel.local_map(twice, mesh=mw.create_mesh("tp:8"), in_specs=mw.P("tp"), out_specs=mw.P())
        >>> program = read_program(jax.make_jaxpr(mapped)(jnp.ones(8)), [frozenset()])
        >>> [one.of_equals for one in program.sums]
        [(), ('tp',)]
    """
    reader = _Reader(TracedProgram())
    reader.walk(open_jaxpr(jaxpr), list(labels))
    return reader.found


class _Reader:
    """Propagates labels from inputs to results."""

    def __init__(self, found: TracedProgram) -> None:
        self.found = found
        self.silent = 0  # above 0 while a loop's labels are not final
        self.call: Any = None  # the outermost call of a function of JAX around the current equation

    def walk(self, jaxpr: Any, labels: Sequence[Labels]) -> list[Labels]:
        known: dict[int, Labels] = {id(var): own for var, own in zip(jaxpr.invars, labels, strict=True)}

        def of(value: Any) -> Labels:
            return known.get(id(value), frozenset())

        for equation in jaxpr.eqns:
            results = self._results(equation, [of(value) for value in equation.invars])
            known.update((id(var), own) for var, own in zip(equation.outvars, results, strict=True))
        return [of(value) for value in jaxpr.outvars]

    def _results(self, equation: Any, here: list[Labels]) -> list[Labels]:
        name, params = equation.primitive.name, equation.params
        together = frozenset().union(*here)
        same = [together] * len(equation.outvars)
        if name == "axis_index":
            return [frozenset((str(params["axis_name"]),))]
        axes = _axes(params)
        if name in _SUMS and axes:
            for value, own in zip(equation.invars, here, strict=True):
                self._record_sum(equation, axes, own, tuple(value.aval.shape))
        if name in _EQUALIZE and axes:
            if len(here) == len(equation.outvars):
                return [own.difference(axes) for own in here]
            return [together.difference(axes)] * len(equation.outvars)
        if axes and name in ("reduce_scatter", "psum_scatter", "all_to_all"):
            return [own | set(axes) for own in same]
        if name in _DRAWS:
            self._record_draw(equation, together)
        if name == "shard_map":
            specs = [frozenset(spec_axes(spec)) for spec in params["in_specs"]]
            body = open_jaxpr(params["jaxpr"])
            return self.walk(body, [own | spec for own, spec in zip(here, specs, strict=True)])
        if name == "scan":
            return self._scan(equation, here)
        if name == "while":
            return self._while(equation, here)
        if name == "cond":
            branches = [self.walk(open_jaxpr(branch), here[1:]) for branch in params["branches"]]
            return [here[0].union(*results) for results in zip(*branches, strict=True)]
        inner = [jaxpr for jaxpr in inner_jaxprs(params) if len(jaxpr.invars) == len(here)]
        if len(inner) == 1 and len(inner[0].outvars) == len(equation.outvars):
            # JAX traces a function such as `jax.random.normal` once, so inside it lines may be those of another call.
            of_jax = name in ("jit", "pjit") and str(params.get("name", "")).startswith("_")
            self.call, before = self.call or (equation if of_jax else None), self.call
            results = self.walk(inner[0], here)
            self.call = before
            return results
        return same

    def _scan(self, equation: Any, here: list[Labels]) -> list[Labels]:
        body = open_jaxpr(equation.params["jaxpr"])
        # Inputs are constants, carry, slices; only slices have one more dim outside.
        outs = zip(equation.outvars, body.outvars, strict=True)
        ins = zip(equation.invars, body.invars, strict=True)
        num_carry = sum(out.aval.ndim == inner.aval.ndim for out, inner in outs)
        end = sum(out.aval.ndim == inner.aval.ndim for out, inner in ins)
        return self._loop(body, here, slice(end - num_carry, end))

    def _while(self, equation: Any, here: list[Labels]) -> list[Labels]:
        skipped = equation.params["cond_nconsts"]
        body = open_jaxpr(equation.params["body_jaxpr"])
        begin = equation.params["body_nconsts"]
        return self._loop(body, here[skipped:], slice(begin, len(body.invars)))

    def _loop(self, body: Any, here: list[Labels], carry: slice) -> list[Labels]:
        """Repeats a loop's body until the labels of its carry stay the same."""
        labels = list(here)
        self.silent += 1
        while True:
            results = self.walk(body, labels)
            carried = [old | new for old, new in zip(labels[carry], results, strict=False)]
            if carried == labels[carry]:
                break
            labels[carry] = carried
        self.silent -= 1
        return self.walk(body, labels)

    def _record_sum(self, equation: Any, axes: tuple[str, ...], own: Labels, shape: tuple[int, ...]) -> None:
        line = job_line(self.call or equation)
        if line and not self.silent:
            self.found.sums.append(MeshSum(axes, tuple(sorted(_only_axes(own))), shape, line))

    def _record_draw(self, equation: Any, own: Labels) -> None:
        line = job_line(self.call or equation)
        if line and not self.silent:
            self.found.draws.append(Draw(tuple(sorted(_only_axes(own))), bool(own & {RNG, BATCH}), line))


def job_line(equation: Any) -> str:
    """Returns the file and line of an operation in a job's code, or "" if Meshwright itself calls it."""
    trace = getattr(equation.source_info, "traceback", None)
    frames = [frame for frame in getattr(trace, "frames", ()) if not frame.file_name.startswith(_JAX)]
    if not frames or frames[0].file_name.startswith(_HERE):
        return ""
    # A layer of Flax or Equinox: show the line of the job that calls it.
    own = [frame for frame in frames if not frame.file_name.startswith((_HERE, *_PACKAGES))]
    frame = (own or frames)[0]
    here = os.path.relpath(frame.file_name) if os.path.isabs(frame.file_name) else frame.file_name
    return f"{frame.file_name if here.startswith(os.pardir) else here}:{frame.line_num}"


def _axes(params: Any) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name", ()))
    axes = (axes,) if isinstance(axes, str) else tuple(axes) if isinstance(axes, (tuple, list)) else ()
    return tuple(axis for axis in axes if isinstance(axis, str))


def _only_axes(labels: Labels) -> Labels:
    return labels - {RNG, BATCH}
