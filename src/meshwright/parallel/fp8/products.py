"""fp8 matmuls with gradients, alone or overlapped with the collectives of tensor parallelism.

Forward and backward are written out here, on slices, instead of leaving the gradient to JAX: gradients have another
fp8 dtype and scale, and amaxes of several devices are combined by maximum, where a transpose would add them up.
Rows travel along the tensor axis in fp8, which is half the bytes of bfloat16; partial sums in the dtype of the input.

Shapes: M rows, K input features, N output features; n devices along the tensor axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import pcast_alike, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.parallel.fp8.casting import (
    E4M3,
    E5M2,
    GRADIENT,
    INPUT,
    WEIGHT,
    Cast,
    Scaling,
    as_cast,
    check_scaling,
    from_wire,
    keep_max,
    multiply,
    multiply_rows,
    multiply_turned,
    quantize,
    scale_of,
    to_wire,
)
from meshwright.parallel.fp8.weight import CastWeight, Fp8Weight
from meshwright.parallel.kernels.cast_kernel import can_cast
from meshwright.parallel.kernels.dispatch import uses_kernels
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.forms import FORMS, Form, Operation, choose_form
from meshwright.parallel.overlap.ring_loops import (
    empty_rows,
    gather_pieces,
    put_rows,
    scatter_sums,
    sum_scattered,
    tie,
)

Kind = Literal["plain", "gather", "scatter"]


@dataclass(frozen=True)
class _Plan:
    kind: Kind
    view: AxisView
    scaling: Scaling
    names: tuple[str, ...]
    dtype: Any
    kernels: bool
    casts_again: bool
    stages: str | None = None
    forward: Form | None = None
    backward: Form | None = None

    @property
    def axis(self) -> str:
        assert self.view.axis is not None
        return self.view.axis


def fp8_products(x: Any, weights: Sequence[Fp8Weight], *, kind: Kind, view: AxisView) -> tuple[Any, ...]:
    """Returns `x @ w` for several weights that share an input.

    Args:
        kind: "plain" multiplies the arrays of this view. "gather" first gathers the rows of `x` along the view's axis,
            "scatter" sums the product over it and leaves each device its rows; both overlap as `gather_matmul` and
            `matmul_scatter` do.
    """
    first, dtype = weights[0], jnp.result_type(x, *(w.value for w in weights))
    check_scaling(first.scaling)
    if view.kind == "plain":
        kind = "plain"
    forward: Form | None = None
    backward: Form | None = None
    if kind != "plain":
        width = sum(w.shape[-1] for w in weights) if kind == "gather" else x.shape[-1]
        forward = _form("gather_matmul" if kind == "gather" else "matmul_scatter", view.ways, width)
        backward = _form("gather_matmul_grad" if kind == "gather" else "matmul_scatter_grad", view.ways, width)
    plan = _Plan(
        kind,
        view,
        first.scaling,
        tuple(w.name for w in weights),
        dtype,
        kernels=uses_kernels(first.kernels) if kind == "plain" else False,
        casts_again=any(w.is_gathered for w in weights),
        stages=first.stages,
        forward=forward,
        backward=backward,
    )
    values, amaxes = tuple(w.value.astype(dtype) for w in weights), tuple(w.amaxes for w in weights)
    # Transposes are used where the matmul is local; an overlapped one takes slices of the weight as it is.
    casts = tuple(w.cast if kind == "plain" or w.cast is None else CastWeight(w.cast.value) for w in weights)
    x, values, casts = pcast_alike(x.astype(dtype), values, casts, axes=sorted(_axes(plan, *amaxes)))
    axes = tuple(sorted(varying_axes(x)))
    ys: tuple[Any, ...] = _products(plan, x, values, tuple(keep_max(one, axes) for one in amaxes), casts)
    return ys


def _axes(plan: _Plan, *amaxes: Any) -> frozenset[str]:
    known = frozenset().union(*map(varying_axes, amaxes))
    return known | {plan.axis} if plan.kind != "plain" and plan.view.kind == "local" else known


def _form(operation: Operation, size: int, width: int) -> Form:
    form = choose_form(operation, None, axis_size=size, width=width)
    # Parts are written for operands of one dtype; a ring sends the same bytes.
    return FORMS[chip_family(current_mesh())][operation] if form.parts else form


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(
    plan: _Plan, x: Any, ws: tuple[Any, ...], amaxes: tuple[Any, ...], casts: tuple[Any, ...]
) -> tuple[Any, ...]:
    ys: tuple[Any, ...] = _forward(plan, x, ws, amaxes, casts)[0]
    return ys


def _forward(
    plan: _Plan, x: Any, ws: tuple[Any, ...], amaxes: tuple[Any, ...], casts: tuple[Any, ...]
) -> tuple[Any, Any]:
    ws = tuple(w if cast is None else cast for w, cast in zip(ws, casts, strict=True))
    here = {"plain": _multiply_here, "gather": _gather_here, "scatter": _scatter_here}[plan.kind]
    rows, columns, weight = _specs(plan, x.ndim)
    source, out = (columns, rows) if plan.kind == "scatter" else (rows, columns)
    ys, kept_x, scale, amax, kept_ws = _run(
        plan,
        functools.partial(here, plan),
        (x, ws, amaxes),
        in_specs=(source, weight, P()),
        out_specs=(out, source, P(), P(), weight),
    )
    again = [plan.casts_again or cast is not None for cast in casts]
    kept_ws = tuple((_array(w) if keep else kept) for w, kept, keep in zip(ws, kept_ws, again, strict=True))
    return ys, (kept_x, scale, amax, kept_ws, amaxes)


def _backward(plan: _Plan, saved: Any, gs: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...], None]:
    kept_x, scale, amax, kept_ws, amaxes = saved
    here = {"plain": _multiply_back, "gather": _gather_back, "scatter": _scatter_back}[plan.kind]
    rows, columns, weight = _specs(plan, gs[0].ndim)
    source, out = (columns, rows) if plan.kind == "scatter" else (rows, columns)
    dx, dws, found = _run(
        plan,
        functools.partial(here, plan),
        (kept_x, scale, kept_ws, amaxes, gs),
        in_specs=(source, P(), weight, P(), out),
        out_specs=(source, weight, P()),
    )
    zero = jnp.zeros_like(amax)
    return dx, dws, tuple(jnp.stack([amax, zero, one]) for one in found), None


_products.defvjp(_forward, _backward)


def _run(plan: _Plan, local: Any, args: Any, *, in_specs: Any, out_specs: Any) -> Any:
    if plan.kind == "plain":
        return local(*args)
    return plan.view.run(local, *args, in_specs=in_specs, out_specs=out_specs)


def _specs(plan: _Plan, num_dims: int) -> tuple[P, P, P]:
    """Returns the specs of arrays split by rows, of arrays split by columns, and of weights."""
    lead, axis = [None] * (num_dims - 2), plan.view.axis
    return P(*lead, axis, None), P(*lead, None, axis), P(None, axis) if plan.kind == "gather" else P(axis, None)


def _amax(plan: _Plan, amax: Any) -> Any:
    """Returns the amax of all slices in an island; in the local view, the step combines those of all devices once."""
    return lax.pmax(amax, plan.axis) if plan.kind != "plain" and plan.view.kind == "global" else amax


def _weights(plan: _Plan, ws: Sequence[Any], amaxes: Sequence[Any]) -> list[Cast]:
    """Casts the weights that are not cast yet; their amaxes are their own, so nothing saturates."""

    def cast(w: Any, amax: Any) -> Cast:
        if isinstance(w, CastWeight):
            return as_cast(w.value, scale_of(amax, E4M3), turned=w.turned)
        return quantize(w, amax, E4M3, kernels=plan.kernels)

    return [cast(w, one[WEIGHT]) for w, one in zip(ws, amaxes, strict=True)]


def _array(w: Any) -> Any:
    return w.value if isinstance(w, CastWeight) else w


def _kept_weights(plan: _Plan, kept: Sequence[Any], amaxes: Sequence[Any]) -> list[Cast]:
    if plan.casts_again:
        # Otherwise XLA would reuse the cast of the forward pass and keep it in memory.
        kept = tie(tuple(kept))
    return [
        as_cast(w, scale_of(one[WEIGHT], E4M3)) if w.dtype == E4M3 else quantize(w, one[WEIGHT], E4M3)
        for w, one in zip(kept, amaxes, strict=True)
    ]


def _taken(plan: _Plan, kept: Any, gradient: Any) -> Any:
    """Returns a value in fp8 that a loop or a pipeline kept for the backward pass, which has this gradient.

    A stage of a pipeline would widen the value in its forward pass, which has all that needs no gradient, and keep it.
    In a loop with several layers per step, the value is a slice, and XLA:GPU would widen the whole array to bfloat16
    before it takes the slice. Without kernels, the barrier would keep XLA from slicing and transposing in one pass.
    """
    is_slice = plan.casts_again and plan.kernels
    return tie((kept, gradient))[0] if plan.stages is not None or is_slice else kept


def _scoped(name: str, role: str) -> Any:
    """Names a matmul in the compiled program; `meshwright.plan.compiled.fp8_matmuls` reads it."""
    return jax.named_scope(f"fp8[{name}][{role}]")


def _forward_product(plan: _Plan, x: Cast, ws: Sequence[Cast], dtype: Any) -> list[Any]:
    ys: list[Any] = []
    for name, w in zip(plan.names, ws, strict=True):
        if ys and plan.forward is not None and plan.forward.tie == "next":
            # On GPUs, XLA would concatenate the weights, multiply once and split the product.
            value, ys[-1] = tie((x.value, ys[-1]))
            x = x._replace(value=value)
        with _scoped(name, "forward"):
            ys.append(multiply(x, w, dtype))
    return ys


def _input_gradient(plan: _Plan, gs: Sequence[Cast], ws: Sequence[Cast], dtype: Any) -> Any:
    total = None
    for name, g, w in reversed(list(zip(plan.names, gs, ws, strict=True))):
        with _scoped(name, "input gradient"):
            part = multiply_turned(g, w, dtype)
        total = part if total is None else part + total  # in this order, cuBLAS adds the sum so far
    return total


def _weight_gradient(plan: _Plan, x: Cast, gs: Sequence[Cast]) -> list[Any]:
    found = []
    for name, g in zip(plan.names, gs, strict=True):
        with _scoped(name, "weight gradient"):
            found.append(multiply_rows(x, g, plan.dtype))
    return found


# --- Without a tensor axis ---


def _multiply_here(plan: _Plan, x: Any, ws: tuple[Any, ...], amaxes: tuple[Any, ...]) -> Any:
    flat = x.reshape(-1, x.shape[-1])
    x8 = quantize(flat, amaxes[0][INPUT], E4M3, scaling=plan.scaling, stages=plan.stages, kernels=plan.kernels)
    w8s = _weights(plan, ws, amaxes)
    ys = tuple(y.reshape(*x.shape[:-1], -1) for y in _forward_product(plan, x8, w8s, x.dtype))
    # The weight's gradient reads the transpose, so keep only that if there is one.
    kept = x8.value if x8.turned is None else x8.turned
    return ys, kept, x8.scale, x8.amax, tuple(w.value for w in w8s)


def _multiply_back(plan: _Plan, kept_x: Any, scale: Any, kept_ws: Any, amaxes: Any, gs: tuple[Any, ...]) -> Any:
    g8s = [
        quantize(
            g.reshape(-1, g.shape[-1]),
            one[GRADIENT],
            E5M2,
            scaling=plan.scaling,
            stages=plan.stages,
            kernels=plan.kernels,
        )
        for g, one in zip(gs, amaxes, strict=True)
    ]
    first = g8s[0]  # in the form that weight gradients read, so that a schedule need not keep the other one for them
    kept_x = _taken(plan, kept_x, first.value if first.turned is None else first.turned)
    is_turned = plan.kernels and can_cast((g8s[0].value.shape[0], kept_ws[0].shape[0]))
    x8 = as_cast(kept_x.T if is_turned else kept_x, scale, turned=kept_x if is_turned else None)
    dws = _weight_gradient(plan, x8, g8s)
    dx = _input_gradient(plan, g8s, _kept_weights(plan, kept_ws, amaxes), plan.dtype)
    return dx.reshape(*gs[0].shape[:-1], -1), tuple(dws), tuple(g.amax for g in g8s)


# --- Gathered rows ---


def _gather_here(plan: _Plan, x: Any, ws: tuple[Any, ...], amaxes: tuple[Any, ...]) -> Any:
    x8 = quantize(x, amaxes[0][INPUT], E4M3, scaling=plan.scaling, stages=plan.stages)
    w8s = _weights(plan, ws, amaxes)
    form, size = plan.forward, plan.view.ways
    assert form is not None

    def products(sent: Any) -> list[Any]:
        return _forward_product(plan, as_cast(from_wire(sent, E4M3), x8.scale), w8s, x.dtype)

    if form.ring:
        outs = [empty_rows(x, x.shape[-2] * size, w.value.shape[-1], x.dtype) for w in w8s]

        def visit(outs: Any, piece: Any, start: Any) -> Any:
            return [put_rows(out, product, start) for out, product in zip(outs, products(piece), strict=True)]

        ys = gather_pieces(to_wire(x8.value), plan.axis, size, form, visit, outs)
    else:
        ys = products(_gathered(plan, x8.value))
    return tuple(ys), x8.value, x8.scale, _amax(plan, x8.amax), tuple(w.value for w in w8s)


def _gather_back(plan: _Plan, kept_x: Any, scale: Any, kept_ws: Any, amaxes: Any, gs: tuple[Any, ...]) -> Any:
    g8s = [
        quantize(g, one[GRADIENT], E5M2, scaling=plan.scaling, stages=plan.stages)
        for g, one in zip(gs, amaxes, strict=True)
    ]
    w8s = _kept_weights(plan, kept_ws, amaxes)
    form, size = plan.backward, plan.view.ways
    assert form is not None

    def products(values: list[Any], wire: Any) -> Any:
        parts = [as_cast(value, g.scale) for value, g in zip(values, g8s, strict=True)]
        return _input_gradient(plan, parts, w8s, wire)

    kept_x, values = tie((kept_x, [g.value for g in g8s]))
    num_rows = gs[0].shape[-2] // size
    if form.ring:
        dx = scatter_sums(products, values, num_rows, plan.axis, size, form, plan.dtype)
    else:
        dx = sum_scattered(products(values, plan.dtype), plan.axis)
    gathered = as_cast(from_wire(_gathered(plan, kept_x), E4M3), scale)
    dws = _weight_gradient(plan, gathered, g8s)
    return dx.astype(plan.dtype), tuple(dws), tuple(_amax(plan, g.amax) for g in g8s)


# --- Scattered rows ---


def _scatter_here(plan: _Plan, x: Any, ws: tuple[Any, ...], amaxes: tuple[Any, ...]) -> Any:
    x8 = quantize(x, amaxes[0][INPUT], E4M3, scaling=plan.scaling, stages=plan.stages)
    w8s = _weights(plan, ws, amaxes)
    form, size = plan.forward, plan.view.ways
    assert form is not None

    def products(values: list[Any], wire: Any) -> Any:
        return _forward_product(plan, as_cast(values[0], x8.scale), w8s, wire)[0]

    if form.ring:
        y = scatter_sums(products, [x8.value], x.shape[-2] // size, plan.axis, size, form, x.dtype)
    else:
        y = sum_scattered(products([x8.value], x.dtype), plan.axis)
    return (y.astype(x.dtype),), x8.value, x8.scale, _amax(plan, x8.amax), tuple(w.value for w in w8s)


def _scatter_back(plan: _Plan, kept_x: Any, scale: Any, kept_ws: Any, amaxes: Any, gs: tuple[Any, ...]) -> Any:
    g8 = quantize(gs[0], amaxes[0][GRADIENT], E5M2, scaling=plan.scaling, stages=plan.stages)
    w8s = _kept_weights(plan, kept_ws, amaxes)
    form, size = plan.backward, plan.view.ways
    assert form is not None

    def product(sent: Any) -> Any:
        return _input_gradient(plan, [as_cast(from_wire(sent, E5M2), g8.scale)], w8s, plan.dtype)

    if form.ring:
        num_rows = gs[0].shape[-2] * size
        sent = to_wire(g8.value)
        buffers = (
            empty_rows(gs[0], num_rows, kept_x.shape[-1], plan.dtype),
            empty_rows(gs[0], num_rows, gs[0].shape[-1], sent.dtype),
        )

        def visit(carry: Any, piece: Any, start: Any) -> Any:
            dx, gathered = carry
            return put_rows(dx, product(piece), start), put_rows(gathered, piece, start)

        dx, gathered = tie(gather_pieces(sent, plan.axis, size, form, visit, buffers))
    else:
        gathered = _gathered(plan, g8.value)
        dx = product(gathered)
    whole = as_cast(from_wire(gathered, E5M2), g8.scale)
    dws = _weight_gradient(plan, as_cast(_taken(plan, kept_x, gathered), scale), [whole])
    return dx, tuple(dws), (_amax(plan, g8.amax),)


def _gathered(plan: _Plan, value: Any) -> Any:
    return lax.all_gather(to_wire(value), plan.axis, axis=value.ndim - 2, tiled=True)
