"""The forward and backward pass of one pipeline stage, in parts that a schedule runs at different ticks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal

from meshwright.parallel.pipeline.split_backward import Env, Op, read, run_ops, split_jaxpr, values_made, values_read


@dataclass(frozen=True)
class StageBackward:
    """The parts of `(free, x, dy) -> (y, dx, dparams)`.

    `free` are the inputs that are known at every tick: parameters, other arguments and keys. What depends on them alone
    is computed again instead of kept.

    Args:
        forward: the operations without `dy` that the others need.
        inputs: the operations for `dx`.
        weights: the remaining operations for `dparams`; none if the backward pass is not split.
        saved: the values that the forward pass saves for the others.
        kept: the values that the input gradients keep for the weight gradients.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    sizes: tuple[int, int, int]
    free: tuple[Op, ...]
    forward: tuple[Op, ...]
    inputs: tuple[Op, ...]
    weights: tuple[Op, ...]
    saved: tuple[Any, ...]
    kept: tuple[Any, ...]

    @property
    def early(self) -> tuple[bool, ...]:
        """Whether each parameter's gradient is known with the input gradients."""
        late = values_made(self.weights)
        return tuple(var not in late for var in self._results()[2])

    def start(self, free: Sequence[Any], x: Sequence[Any] = ()) -> Env:
        """Returns an environment for one cell."""
        env: Env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        num_free, num_x, _ = self.sizes
        env.update(zip(self.jaxpr.invars[:num_free], free, strict=True))
        if x:
            env.update(zip(self.jaxpr.invars[num_free : num_free + num_x], x, strict=True))
        run_ops(self.free, env)
        return env

    def run_forward(self, env: Env) -> list[Any]:
        """Returns `y`."""
        run_ops(self.forward, env)
        return [read(env, var) for var in self._results()[0]]

    def run_inputs(self, env: Env, dy: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns `dx` and the gradients of the parameters that are known early, or None for each other."""
        env.update(zip(self.jaxpr.invars[sum(self.sizes[:2]) :], dy, strict=True))
        run_ops(self.inputs, env)
        _, dx, grads = self._results()
        pairs = zip(grads, self.early, strict=True)
        return [read(env, var) for var in dx], [read(env, var) if early else None for var, early in pairs]

    def run_weights(self, env: Env) -> list[Any]:
        """Returns the gradients of the parameters that are not known early, and None for each other."""
        run_ops(self.weights, env)
        pairs = zip(self._results()[2], self.early, strict=True)
        return [None if early else read(env, var) for var, early in pairs]

    def _results(self) -> tuple[list[Any], list[Any], list[Any]]:
        num_x, outs = self.sizes[1], list(self.jaxpr.outvars)
        return outs[:num_x], outs[num_x : 2 * num_x], outs[2 * num_x :]


def split_stage(
    function: Callable[..., Any], free: Sequence[Any], x: Sequence[Any], dy: Sequence[Any], *, splits: bool, saves: bool
) -> StageBackward:
    """Traces `function(free, x, dy) -> (y, dx, dparams)`, all lists of arrays, and splits it.

    Args:
        splits: whether weight gradients are computed apart from input gradients.
        saves: whether the forward pass saves its values; otherwise the backward pass computes them again.
    """
    closed = jax.make_jaxpr(function)(list(free), list(x), list(dy))
    jaxpr, sizes = closed.jaxpr, (len(free), len(x), len(dy))
    num_x = len(x)
    wanted = [place < 2 * num_x or not splits for place in range(len(jaxpr.outvars))]
    parts = split_jaxpr(jaxpr, wanted)
    x_vars, dy_vars = jaxpr.invars[len(free) : len(free) + num_x], jaxpr.invars[len(free) + num_x :]
    known: set[Any] = {*jaxpr.constvars, *jaxpr.invars[: len(free)]}
    with_gradient: set[Any] = set(dy_vars)
    free_ops: list[Op] = []
    forward: list[Op] = []
    inputs: list[Op] = []
    for op in parts.first:
        ins = {var for var in op.ins if not isinstance(var, Literal)}
        if ins <= known:
            free_ops.append(op)
            known.update(op.outs)
        elif ins & with_gradient:
            inputs.append(op)
            with_gradient.update(op.outs)
        else:
            forward.append(op)
    outs = [var for var in jaxpr.outvars[num_x:] if not isinstance(var, Literal)]
    from_forward = {*values_made(forward), *x_vars}
    uses = dict.fromkeys([*values_read([*inputs, *parts.second]), *outs])
    saved = [var for var in uses if var in from_forward] if saves else []
    from_inputs = with_gradient if saves else with_gradient | from_forward
    kept = [var for var in values_read(parts.second) if var in from_inputs]
    return StageBackward(
        jaxpr,
        tuple(closed.consts),
        sizes,
        tuple(free_ops),
        tuple(forward),
        tuple(inputs),
        parts.second,
        tuple(saved),
        tuple(kept),
    )
