"""Tensor-parallel layers on plain arrays: column-parallel and row-parallel dense layers, and norms.

A block starts with `column_dense`, where each device computes some of the features, and ends with `row_dense`, where
each device computes a partial sum. Between blocks, activations are split by rows of the sequence, or replicated if
`sequence_parallel=False`. Parameters are global arrays with these specs:

    column_dense   w [D, F] P(None, axis)   b [F] P(axis)      x split by rows -> by features
    row_dense      w [F, D] P(axis, None)   b [D] P()          x split by features -> by rows
    sequence_norm  scale [D] P()                               x split by rows -> the same
    split_norm     scale [F] P(axis)                           x split by features -> the same

Every function computes the same result in three views: in the local view, with explicit collectives; in a `jit` program
under a mesh, as an island or with the collectives that XLA inserts; and on one device. `axis=None` selects the last one
on any mesh, so models without a tensor axis can call the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.errors import PlacementError
from meshwright.mesh.axes import pcast_alike, pcast_varying, summing_dtype
from meshwright.parallel.fp8.products import fp8_products
from meshwright.parallel.fp8.weight import Fp8Weight
from meshwright.parallel.local_map import AxisView
from meshwright.parallel.overlap.collective_matmul import gather_matmul, matmul_scatter
from meshwright.parallel.overlap.forms import Form
from meshwright.parallel.overlap.ring_loops import dot


class ScatterOptions(TypedDict, total=False):
    """Overlap options of `matmul_scatter`."""

    form: Form | str | None
    grad_form: Form | str | None
    wire_dtype: Any
    kernels: bool | None


class GatherOptions(ScatterOptions, total=False):
    """Overlap options of `gather_matmul`."""

    save_gathered: bool


def column_dense(
    x: jax.Array,
    w: jax.Array | Fp8Weight,
    b: jax.Array | None = None,
    *,
    axis: str | None,
    sequence_parallel: bool = True,
    **overlap: Unpack[GatherOptions],
) -> jax.Array:
    """Returns `x @ w + b` with the output features split over a mesh axis.

    Args:
        x: `[..., rows, D]`, split by rows over `axis`, or replicated if `sequence_parallel=False`.
        w: `[D, F]`, split by columns; an `Fp8Weight` multiplies in fp8.
        b: `[F]`, split.
        sequence_parallel: all-gather the rows of `x` while multiplying.
        overlap: options of `gather_matmul`.

    Example:
        >>> import meshwright as mw
        >>> x, w, b = jnp.ones((2, 16, 4)), jnp.ones((4, 8)), jnp.arange(8.0)
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     y = jax.jit(lambda x, w, b: column_dense(x, w, b, axis="tp"))(x, w, b)
        >>> y[0, 0].tolist()
        [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    """
    bs = None if b is None else (b,)
    return _columns(AxisView.of(axis, who="column_dense"), x, (w,), bs, sequence_parallel, overlap)[0]


def fused_column_dense(
    x: jax.Array,
    ws: Sequence[jax.Array | Fp8Weight],
    bs: Sequence[jax.Array | None] | None = None,
    *,
    axis: str | None,
    sequence_parallel: bool = True,
    **overlap: Unpack[GatherOptions],
) -> tuple[jax.Array, ...]:
    """Applies `column_dense` with several weights that share one all-gather of `x`, e.g. q, k and v.

    The weights stay separate arrays, because an axis would split one wide matrix in the middle of q, k or v.

    Example:
        >>> import meshwright as mw
        >>> x, ws = jnp.ones((16, 4)), (jnp.ones((4, 8)), jnp.ones((4, 16)))
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     gate, up = jax.jit(lambda x, ws: fused_column_dense(x, ws, axis="tp"))(x, ws)
        >>> gate.shape, up.shape
        ((16, 8), (16, 16))
    """
    return _columns(AxisView.of(axis, who="fused_column_dense"), x, tuple(ws), bs, sequence_parallel, overlap)


def row_dense(
    x: jax.Array,
    w: jax.Array | Fp8Weight,
    b: jax.Array | None = None,
    *,
    axis: str | None,
    sequence_parallel: bool = True,
    **overlap: Unpack[ScatterOptions],
) -> jax.Array:
    """Returns `x @ w + b` with the contracted dim split over a mesh axis; the bias is added once.

    Args:
        x: `[..., rows, F]`, split by features, as returned by `column_dense`.
        w: `[F, D]`, split by rows; an `Fp8Weight` multiplies in fp8.
        b: `[D]`, replicated.
        sequence_parallel: reduce-scatter the rows while multiplying; if False, all-reduce.
        overlap: options of `matmul_scatter`.

    Example:
        >>> import meshwright as mw
        >>> x, w, b = jnp.ones((16, 8)), jnp.ones((8, 4)), jnp.ones(4)
        >>> with jax.set_mesh(mw.create_mesh("tp:8")):
        ...     float(jax.jit(lambda x, w, b: row_dense(x, w, b, axis="tp"))(x, w, b)[0, 0])
        9.0
    """
    view = AxisView.of(axis, who="row_dense")
    view.check_split(w=_value(w))
    view.check_matmul(x, (w,))
    if b is not None:
        _check_bias(view, b, w)
    if sequence_parallel:
        if view.kind == "global":
            view.check_divides(x.shape[-2], "rows")
            view.check_divides(w.shape[0], "input features")
        if isinstance(w, Fp8Weight):
            view.check_divides(x.shape[-2], "rows")
            (scattered,) = fp8_products(x, [_with_options(w, overlap)], kind="scatter", view=view)
        else:
            scattered = matmul_scatter(x, w, axis=axis, **overlap)
        return scattered if b is None else _add_bias(scattered, pcast_varying(b.astype(jnp.float32), axis))
    refuse_options(view, overlap)
    kind = jnp.result_type(x, _value(w))
    y: jax.Array
    if isinstance(w, Fp8Weight):
        (y,) = fp8_products(x, [w], kind="plain", view=view)
    else:
        y = dot(x, w, kind)
    # The bias is added after this sum; before it, every device would add it.
    y = lax.psum(y.astype(summing_dtype(kind)), axis).astype(kind) if view.kind == "local" else y
    return y if b is None else _add_bias(y, b)


@jax.named_scope("norm")
def sequence_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    axis: str | None,
    eps: float = 1e-6,
    center: bool = False,
) -> jax.Array:
    """Applies RMSNorm over features to the rows on this device, without communication.

    The gradients of `scale` and `bias` are summed over the axis once, in float32.

    Args:
        x: `[..., rows, D]`, split by rows over `axis`, or replicated.
        scale: `[D]`, replicated.
        bias: `[D]`, replicated.
        center: subtract the mean first; with `bias`, this is LayerNorm.

    Example:
        >>> sequence_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0]), axis="tp", eps=0.0).tolist()
        [[1.0, -2.0]]
    """
    view = AxisView.of(axis, who="sequence_norm")
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None and value.shape != x.shape[-1:]:
            raise view.error(
                f"x of shape {x.shape} and {name} of shape {value.shape} differ in features.",
                hint=f"{name} must be [{x.shape[-1]}], whole on every device.",
            )
    wide = [vector.astype(jnp.float32) for vector in (scale, bias) if vector is not None]
    normed: jax.Array = _norm(eps, center, *pcast_alike(x, *wide))
    return normed


@jax.named_scope("norm")
def split_norm(x: jax.Array, scale: jax.Array, *, axis: str | None, eps: float = 1e-6) -> jax.Array:
    """Applies RMSNorm over features that a mesh axis splits; devices exchange one number per row.

    Args:
        x: `[..., rows, F]`, split by features over `axis`, as returned by `column_dense`.
        scale: `[F]`, split.

    Example:
        >>> split_norm(jnp.array([[3.0, -3.0]]), jnp.array([1.0, 2.0]), axis="tp", eps=0.0).tolist()
        [[1.0, -2.0]]
    """
    view = AxisView.of(axis, who="split_norm")
    view.check_split(x=x, scale=scale)
    if scale.shape != x.shape[-1:]:
        raise view.error(
            f"x of shape {x.shape} and scale of shape {scale.shape} differ in features.",
            hint=f"scale must be [{x.shape[-1]}], split like the features of x.",
        )
    wide, num_features = x.astype(jnp.float32), x.shape[-1]
    total = jnp.sum(wide * wide, axis=-1, keepdims=True)
    if view.kind == "local":
        total, num_features = lax.psum(total, axis), num_features * view.ways
    return (wide * lax.rsqrt(total / num_features + eps) * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(eps: float, center: bool, x: Any, scale: Any, bias: Any = None) -> Any:
    return _norm_fwd(eps, center, x, scale, bias)[0]


def _norm_fwd(eps: float, center: bool, x: Any, scale: Any, bias: Any = None) -> tuple[Any, Any]:
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True) if center else None
    wide = wide if mean is None else wide - mean
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed = wide * inverse * scale + (0.0 if bias is None else bias)
    # Save x in its own dtype; a loop over layers would otherwise store float32 copies.
    return normed.astype(x.dtype), (x, scale, bias, mean, inverse)


def _norm_bwd(eps: float, center: bool, kept: Any, d_normed: Any) -> tuple[Any, ...]:
    x, scale, bias, mean, inverse = kept
    wide, d_normed = x.astype(jnp.float32), d_normed.astype(jnp.float32)
    wide = (wide if mean is None else wide - mean) * inverse
    d_wide = d_normed * scale
    d_x = d_wide - wide * jnp.mean(d_wide * wide, axis=-1, keepdims=True)
    if center:
        d_x = d_x - d_wide.mean(axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    d_bias = None if bias is None else d_normed.sum(rows)
    return (d_x * inverse).astype(x.dtype), (d_normed * wide).sum(rows), d_bias


_norm.defvjp(_norm_fwd, _norm_bwd)


def _columns(
    view: AxisView,
    x: jax.Array,
    ws: tuple[jax.Array | Fp8Weight, ...],
    bs: Sequence[jax.Array | None] | None,
    rows_split: bool,
    overlap: GatherOptions,
) -> tuple[jax.Array, ...]:
    biases = (None,) * len(ws) if bs is None else tuple(bs)
    if len(biases) != len(ws):
        raise view.error(f"got {len(biases)} biases for {len(ws)} weights.", hint="pass None for weights without one.")
    view.check_matmul(x, ws)
    for w, b in zip(ws, biases, strict=True):
        view.check_split(w=_value(w), **({} if b is None else {"b": b}))
        if b is not None:
            _check_bias(view, b, w)
    if rows_split:
        if view.kind == "global":
            view.check_divides(x.shape[-2], "rows")
            for w in ws:
                view.check_divides(w.shape[1], "output features")
        ys = _some_in_fp8(view, x, ws, lambda ws: gather_matmul(x, ws, axis=view.axis, **overlap), overlap)
    else:
        refuse_options(view, overlap)
        # Marking x once sums its gradient over devices once, for all weights.
        x = pcast_varying(x, view.axis)
        ys = _some_in_fp8(view, x, ws, lambda ws: tuple(dot(x, w, jnp.result_type(x, w)) for w in ws), None)
    return tuple(y if b is None else _add_bias(y, b) for y, b in zip(ys, biases, strict=True))


def _some_in_fp8(
    view: AxisView,
    x: jax.Array,
    ws: tuple[jax.Array | Fp8Weight, ...],
    multiply: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]],
    overlap: GatherOptions | None,
) -> tuple[jax.Array, ...]:
    """Returns the products of all weights, those of each kind with one gather."""
    narrow = [_with_options(w, overlap or {}) for w in ws if isinstance(w, Fp8Weight)]
    others = tuple(w for w in ws if not isinstance(w, Fp8Weight))
    in_fp8 = fp8_products(x, narrow, kind="plain" if overlap is None else "gather", view=view) if narrow else ()
    found = iter(in_fp8), iter(multiply(others) if others else ())
    return tuple(next(found[0] if isinstance(w, Fp8Weight) else found[1]) for w in ws)


def _with_options(w: Fp8Weight, overlap: GatherOptions | ScatterOptions) -> Fp8Weight:
    """Returns the weight with the caller's choice of kernels; forms of fp8 matmuls come from the chip's table."""
    asked = [name for name in ("form", "grad_form", "wire_dtype", "save_gathered") if overlap.get(name)]
    if asked:
        raise PlacementError(
            f"`{w.name}` is multiplied in fp8, which has no {', '.join(f'{name}=' for name in asked)}.",
            hint="leave these options out.",
        )
    return replace(w, kernels=overlap["kernels"]) if overlap.get("kernels") is not None else w


def _value(w: Any) -> Any:
    return w.value if isinstance(w, Fp8Weight) else w


def _add_bias(y: jax.Array, b: jax.Array) -> jax.Array:
    # In float32, because the gradient of the bias is a sum over all rows.
    return (y.astype(jnp.float32) + b.astype(jnp.float32)).astype(y.dtype)


def _check_bias(view: AxisView, b: jax.Array, w: jax.Array | Fp8Weight) -> None:
    if b.shape != w.shape[1:]:
        raise view.error(
            f"a weight of shape {w.shape} and a bias of shape {b.shape} differ in output features.",
            hint=f"the bias must be [{w.shape[1]}]"
            + (f", split over {view.axis!r} if the weight's columns are." if view.axis else "."),
        )


def refuse_options(view: AxisView, overlap: GatherOptions | ScatterOptions) -> None:
    """Raises if overlap options are given without sequence parallelism."""
    if overlap:
        raise view.error(
            f"{', '.join(f'{name}=' for name in overlap)} would have no effect with sequence_parallel=False.",
            hint="leave it out: without sequence parallelism there is no transfer to overlap.",
        )
