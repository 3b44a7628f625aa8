"""Matmuls that overlap their collective: all-gather then multiply, or multiply then reduce-scatter.

Sequence parallelism keeps activations split by rows between blocks. A tensor-parallel block starts with an all-gather
of rows and ends with a reduce-scatter of partial products. As one collective, either one stalls the matmul units.
Here the transfer is cut into hops around a ring (or into parts), and each hop overlaps with the matmul of the piece
before it, forward and backward. The same call works in every view: in `shard_map` it runs the ring, in a `jit` program
under a mesh it runs the ring as an island, and without a mesh or axis it is an ordinary matmul.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.dtypes import as_dtype, is_float
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import backed_by, uses_kernels
from meshwright.parallel.kernels.matmul_kernel import can_write
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.collective_parts import gather_in_parts, multiply_all, scatter_in_parts
from meshwright.parallel.overlap.forms import Form, choose_form
from meshwright.parallel.overlap.ring_loops import (
    dot,
    dot_rows,
    empty_rows,
    gather_pieces,
    put_rows,
    scatter_beside_gather,
    scatter_sums,
    sum_scattered,
    tie,
)

GATHERED_ROWS = "gathered_rows"
"""The `checkpoint_name` of the rows that `save_gathered` keeps, for `jax.checkpoint` policies."""


@dataclass(frozen=True)
class _Choices:
    axis: str
    size: int
    forward: Form
    backward: Form
    save_gathered: bool
    wire: Any
    out: Any = None
    writes: bool = False
    kernels: bool | None = None


def gather_matmul(
    x: jax.Array,
    w: Any,
    *,
    axis: str | None,
    form: Form | str | None = None,
    grad_form: Form | str | None = None,
    save_gathered: bool = False,
    wire_dtype: Any = None,
    out_dtype: Any = None,
    kernels: bool | None = None,
) -> Any:
    """Returns `all_gather(x) @ w`, gathering the rows of `x` along a mesh axis while multiplying.

    Args:
        x: `[..., rows, K]`, split by rows over `axis`.
        w: `[K, F]`, split by columns over `axis`, or a tuple of such weights that share one gather.
        form: `"ring"`, `"both_ways"`, `"parts"`, `"whole"` or a `Form` (default: the best one measured on this chip).
        grad_form: the same, for the backward pass.
        save_gathered: keep the gathered rows for the weight's gradient instead of gathering them again.
        wire_dtype: dtype in which the backward pass sends partial sums (default: that of `x`).
        out_dtype: dtype of the products, which accumulate in float32 (default: that of `x` and `w`).
        kernels: use a Pallas kernel that writes products in place, if rows are gathered in parts and shapes allow
            (default: on Hopper GPUs).

    Returns:
        `[..., rows * n, F]`, split by columns; a tuple of them for a tuple of weights.

    Example:
        >>> import meshwright as mw
        >>> x, w = jnp.ones((2, 16, 4)), jnp.ones((4, 8))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     bool((jax.jit(lambda x, w: gather_matmul(x, w, axis="tp"))(x, w) == x @ w).all())
        True
    """
    weights = tuple(w) if isinstance(w, (tuple, list)) else (w,)
    view = AxisView.of(axis, who="gather_matmul")
    view.check_matmul(x, weights)
    if view.kind == "global":
        view.check_divides(x.shape[-2], "rows")
        for weight in weights:
            view.check_divides(weight.shape[-1], "columns")
    out_dtype = None if out_dtype is None else as_dtype(out_dtype)

    def multiply(x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        uses = (x,) if len(weights) == 1 else _forked(len(weights), x)
        return tuple(_product(use, weight, out_dtype) for use, weight in zip(uses, weights, strict=True))

    def ring(x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
        assert axis is not None
        size, width = view.ways, sum(weight.shape[-1] for weight in weights)
        forward = choose_form("gather_matmul", form, axis_size=size, width=width)
        plan = _Choices(
            axis,
            size,
            forward,
            choose_form("gather_matmul_grad", grad_form, axis_size=size, width=width),
            save_gathered,
            _wire_dtype(wire_dtype, x, *weights),
            out_dtype,
            bool(forward.parts) and can_write(x, weights, out_dtype, size) and uses_kernels(kernels),
        )
        outs: tuple[Any, ...] = _gather_matmul(plan, *pcast_alike(x, weights, axes=(axis,)))
        return outs

    rows, columns = _specs(x.ndim, axis)
    outs = view.run(ring, x, weights, plain=multiply, in_specs=(rows, P(None, axis)), out_specs=columns)
    return outs if isinstance(w, (tuple, list)) else outs[0]


def matmul_scatter(
    x: jax.Array,
    w: jax.Array,
    *,
    axis: str | None,
    form: Form | str | None = None,
    grad_form: Form | str | None = None,
    wire_dtype: Any = None,
    kernels: bool | None = None,
) -> jax.Array:
    """Returns `reduce_scatter(x @ w)`, summing rows over a mesh axis while multiplying.

    Args:
        x: `[..., rows, K]`, split by columns over `axis`. The axis size must divide the rows.
        w: `[K, F]`, split by rows over `axis`.
        form: `"ring"`, `"both_ways"`, `"parts"`, `"whole"` or a `Form` (default: the best one measured on this chip).
        grad_form: the same, for the backward pass.
        wire_dtype: dtype in which partial sums are sent (default: that of `x`). float32 sends twice the bytes of
            bfloat16.
        kernels: use a Pallas kernel to cut the weight, if columns are summed in parts (default: on GPUs).

    Returns:
        `[..., rows / n, F]`, split by rows.

    Example:
        >>> import meshwright as mw
        >>> x, w = jnp.ones((16, 8)), jnp.ones((8, 4))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     bool((jax.jit(lambda x, w: matmul_scatter(x, w, axis="tp"))(x, w) == x @ w).all())
        True
    """
    view = AxisView.of(axis, who="matmul_scatter")
    view.check_matmul(x, (w,))
    if view.kind == "global":
        view.check_divides(x.shape[-1], "columns")
    view.check_divides(x.shape[-2], "rows")

    def ring(x: Any, w: Any) -> Any:
        assert axis is not None
        plan = _Choices(
            axis,
            view.ways,
            choose_form("matmul_scatter", form, axis_size=view.ways, width=x.shape[-1]),
            choose_form("matmul_scatter_grad", grad_form, axis_size=view.ways, width=x.shape[-1]),
            False,
            _wire_dtype(wire_dtype, x, w),
            kernels=kernels,
        )
        return _matmul_scatter(plan, *pcast_alike(x, w, axes=(axis,)))

    rows, columns = _specs(x.ndim, axis)
    result: jax.Array = view.run(
        ring, x, w, plain=functools.partial(_product, out_dtype=None), in_specs=(columns, P(axis, None)), out_specs=rows
    )
    return result


def _specs(num_dims: int, axis: str | None) -> tuple[P, P]:
    """Returns the specs that split an array by rows and by columns."""
    lead = [None] * (num_dims - 2)
    return P(*lead, axis, None), P(*lead, None, axis)


# --- gather_matmul and its gradient ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forked(count: int, x: Any) -> list[Any]:
    return [x] * count


def _forked_bwd(count: int, _: None, grads: list[Any]) -> tuple[Any]:
    # XLA fuses an addition into the first operand that is a matmul, so put the newest product first; in JAX's order the
    # first one already has an addition fused into it.
    return (functools.reduce(lambda total, grad: grad + total, reversed(grads)),)


_forked.defvjp(lambda count, x: ([x] * count, None), _forked_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_matmul(plan: _Choices, x: Any, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    return _gather_forward(plan, x, weights, keep=False)[0]


def _gather_forward(plan: _Choices, x: Any, weights: tuple[Any, ...], *, keep: bool) -> tuple[tuple[Any, ...], Any]:
    if not plan.writes:
        return _gather_and_multiply(plan, keep, x, weights)
    plain = functools.partial(_gather_and_multiply, replace(plan, writes=False), keep)
    run = backed_by(plain, functools.partial(_gather_and_multiply, plan, keep))
    found: tuple[tuple[Any, ...], Any] = run(x, weights)
    return found


def _gather_and_multiply(plan: _Choices, keep: bool, x: Any, weights: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    num_rows = x.shape[-2] * plan.size
    if plan.forward.parts:
        written = weights if plan.writes else ()

        def multiply(rows: Any) -> tuple[Any, ...]:
            products = () if written else _products(plan, rows, weights)
            return (*products, *([rows] if keep else []))

        columns = max(w.shape[-1] for w in weights)
        results = gather_in_parts(x, plan.axis, plan.size, plan.forward.parts, columns, multiply, written=written)
        return results[: len(weights)], results[-1] if keep else None
    if not plan.forward.ring:
        gathered = lax.all_gather(x, plan.axis, axis=x.ndim - 2, tiled=True)
        return tuple(_product(gathered, weight, plan.out) for weight in weights), gathered if keep else None
    outs = [empty_rows(x, num_rows, w.shape[-1], plan.out or _out_dtype(x, w)) for w in weights]
    gathered = [empty_rows(x, num_rows, x.shape[-1], x.dtype)] if keep else []

    def visit(carry: Any, piece: Any, start: Any) -> Any:
        outs, gathered = carry
        products = _products(plan, piece, weights)
        outs = [put_rows(out, product, start) for out, product in zip(outs, products, strict=True)]
        return outs, [put_rows(buffer, piece, start) for buffer in gathered]

    outs, gathered = gather_pieces(x, plan.axis, plan.size, plan.forward, visit, (outs, gathered))
    return tuple(outs), gathered[0] if keep else None


def _gather_fwd(plan: _Choices, x: Any, weights: tuple[Any, ...]) -> tuple[Any, Any]:
    outs, gathered = _gather_forward(plan, x, weights, keep=plan.save_gathered)
    return outs, (x if gathered is None else checkpoint_name(gathered, GATHERED_ROWS), weights)


def _gather_bwd(plan: _Choices, saved: Any, d_outs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    kept, weights = saved
    num_rows = d_outs[0].shape[-2] // plan.size
    grads = [d_out.astype(_out_dtype(kept, w)) for d_out, w in zip(d_outs, weights, strict=True)]
    # Otherwise XLA reuses the rows of the forward pass and keeps them in memory.
    kept, grads = tie((kept, grads))
    turned = [w.T for w in weights]

    def products(blocks: list[Any], dtype: Any) -> Any:
        return multiply_all(blocks, turned, dtype)

    gathered = kept if plan.save_gathered else None
    if not plan.backward.ring:
        if plan.backward.parts:
            dx = scatter_in_parts(grads, turned, plan.axis, plan.size, plan.backward.parts, plan.wire)
        else:
            dx = sum_scattered(products(grads, plan.wire), plan.axis)
        if gathered is None:
            gathered = lax.all_gather(kept, plan.axis, axis=kept.ndim - 2, tiled=True)
    elif gathered is not None:
        dx = scatter_sums(products, grads, num_rows, plan.axis, plan.size, plan.backward, plan.wire)
    else:
        dx, gathered = scatter_beside_gather(products, grads, kept, plan.axis, plan.size, plan.backward, plan.wire)
    d_weights = tuple(dot_rows(gathered, d, w.dtype) for d, w in zip(grads, weights, strict=True))
    return _finish_both(dx.astype(kept.dtype), d_weights)


_gather_matmul.defvjp(_gather_fwd, _gather_bwd)


# --- matmul_scatter and its gradient ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_scatter(plan: _Choices, x: Any, w: Any) -> Any:
    if plan.forward.parts:
        summed = scatter_in_parts([x], [w], plan.axis, plan.size, plan.forward.parts, plan.wire, kernels=plan.kernels)
    elif plan.forward.ring:
        num_rows = x.shape[-2] // plan.size
        summed = scatter_sums(
            lambda s, dtype: dot(s[0], w, dtype), [x], num_rows, plan.axis, plan.size, plan.forward, plan.wire
        )
    else:
        summed = sum_scattered(dot(x, w, plan.wire), plan.axis)
    return summed.astype(_out_dtype(x, w))


def _scatter_bwd(plan: _Choices, saved: Any, d_out: Any) -> tuple[Any, Any]:
    x, w = saved
    d_out = d_out.astype(plan.wire)
    if plan.backward.parts:

        def multiply(rows: Any) -> tuple[Any, ...]:
            return dot(rows, w.T, x.dtype), rows

        dx, gathered = tie(gather_in_parts(d_out, plan.axis, plan.size, plan.backward.parts, w.shape[0], multiply))
        return dx, dot_rows(x, gathered, w.dtype)
    if not plan.backward.ring:
        gathered = lax.all_gather(d_out, plan.axis, axis=d_out.ndim - 2, tiled=True)
        return dot(gathered, w.T, x.dtype), dot_rows(x, gathered, w.dtype)

    def visit(carry: Any, piece: Any, start: Any) -> Any:
        dx, gathered = carry
        return put_rows(dx, dot(piece, w.T, x.dtype), start), put_rows(gathered, piece, start)

    buffers = empty_rows(x, x.shape[-2], x.shape[-1], x.dtype), empty_rows(x, x.shape[-2], w.shape[-1], d_out.dtype)
    dx, gathered = tie(gather_pieces(d_out, plan.axis, plan.size, plan.backward, visit, buffers))
    return _finish_both(dx, dot_rows(x, gathered, w.dtype))


_matmul_scatter.defvjp(lambda plan, x, w: (_matmul_scatter(plan, x, w), (x, w)), _scatter_bwd)


# --- Shared by both ---


def _finish_both(dx: Any, d_weights: Any) -> tuple[Any, Any]:
    """Ties both gradients, so that XLA does not delay the weight's and hold its gathered rows through other layers."""
    both: tuple[Any, Any] = tie((dx, d_weights))
    return both


def _products(plan: _Choices, piece: Any, weights: tuple[Any, ...]) -> list[Any]:
    products: list[Any] = []
    for w in weights:
        if products and (plan.forward.parts or plan.forward.tie == "next"):
            # On GPUs, XLA would concatenate the weights, multiply once and split the product, which copies all of them.
            piece, products[-1] = tie((piece, products[-1]))
        products.append(_product(piece, w, plan.out))
    return products


def _product(piece: Any, w: Any, out_dtype: Any) -> Any:
    return dot(piece, w, out_dtype or _out_dtype(piece, w))


def _wire_dtype(asked: Any, x: Any, *weights: Any) -> Any:
    """Returns the dtype in which partial sums are sent: that of `x` if it is a float, otherwise the promoted dtype."""
    if asked is not None:
        return as_dtype(asked)
    return x.dtype if is_float(x.dtype) else jnp.result_type(x.dtype, *(w.dtype for w in weights))


def _out_dtype(x: Any, w: Any) -> Any:
    return jnp.result_type(x.dtype, w.dtype)
