"""RMSNorm of each head times a sigmoid gate, as kernels that read memory once.

XLA reads the operands of the gradient three times: for the product of each head with its gradient, for the gradient of
the scale, and for the results. It reads the heads twice in the forward pass. A kernel that holds a head of some rows at
a time reads them once.

In a kernel, each warp holds one head of one row (or of several rows, if heads are small), so that sums over a head stay
within the warp.

Shapes: B rows, S tokens, H heads, V features per head; T = B * S.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.flops import register_cost
from meshwright.mesh.axes import pcast_alike
from meshwright.parallel.kernels.dispatch import block_index, call_kernel, is_interpreted, mosaic_gpu, uses_kernels
from meshwright.specs import ceil_div

_WARPS, _LANES = 4, 32
_MOST_FEATURES = 1024  # per head; more do not fit in a warp's registers
_ELEMENTS, _MOST_ROWS = 512, 8  # that a warp holds of each operand
# By measurement: blocks of the forward pass are short; those of the gradient, which each write sums for the gradient of
# the scale, all run at once. Registers allow three per multiprocessor, or two for heads of more than 512.
_STEPS, _MULTIPROCESSORS = 16, 132
_LOG2_E = math.log2(math.e)


class HeadNormGradients(NamedTuple):
    """Gradients of `h` `[B, S, H, V]`, the gate `[B, S, H * V]` and the scale `[H * V]`."""

    h: jax.Array
    gate: jax.Array
    scale: jax.Array
    dots: jax.Array
    """Dot product of each head of `h` with its gradient, `[B, S, H]`."""


def gated_head_norm(
    h: jax.Array, gate: jax.Array, scale: jax.Array, *, eps: float = 1e-6, kernels: bool | None = None
) -> jax.Array:
    """Returns the RMSNorm of each head times `sigmoid(gate)`, `[B, S, H * V]`, computed in float32.

    Args:
        h: `[B, S, H, V]`.
        gate: `[B, S, H * V]`; the result has its dtype.
        scale: `[H * V]`.
        kernels: use Pallas kernels if the result is differentiated (default: if possible and faster).

    Example:
        >>> h = jnp.array([[[[3.0, -3.0], [0.0, 0.0]]]])
        >>> gated_head_norm(h, jnp.zeros((1, 1, 4)), jnp.array([1.0, 2.0, 1.0, 1.0])).round(3).tolist()
        [[[0.5, -1.0, 0.0, 0.0]]]
    """
    normed: jax.Array
    if fits_heads(h, gate) and uses_kernels(kernels):
        normed = _gated(eps, *pcast_alike(h, gate, scale.astype(jnp.float32)))
    else:
        normed = _plain(eps, h, gate, scale)
    return normed


def fits_heads(h: Any, gate: Any) -> bool:
    """Returns whether the kernels support heads of this size and number of rows.

    Example:
        >>> [fits_heads(jnp.zeros((1, 40, 2, size)), jnp.zeros((1, 40, 2 * size))) for size in (96, 100, 2048)]
        [True, False, False]
    """
    features = h.shape[-1]
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize in (2, 4) for x in (h, gate))
    fits = 0 < features <= _MOST_FEATURES and features % _LANES == 0
    return floats and fits and h.shape[0] * h.shape[1] >= _rows_at_once(features)


def _plain(eps: float, h: Any, gate: Any, scale: Any) -> Any:
    wide = h.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + eps)
    normed = wide.reshape(gate.shape) * scale.astype(jnp.float32)
    return (normed * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


@functools.partial(jax.jit, static_argnums=0)  # so that a kernel is lowered once for all layers
def head_norm_forward(eps: float, h: Any, gate: Any, scale: Any, keep: Any = None) -> Any:
    """Returns `gated_head_norm(h, gate, scale)` as a kernel; check `uses_kernels` and `fits_heads` before.

    Args:
        keep: `[B, S]` in float32: rows with 0 count as 0, whatever is in them.
    """
    rows, heads, features = _sizes(h)
    flat = rows, heads * features
    at_once = _rows_at_once(features)
    (y,) = call_kernel(
        functools.partial(_forward_kernel, eps=eps, features=features, steps=_STEPS),
        h.reshape(flat),
        gate.reshape(flat),
        scale,
        *_rows_of(keep),
        grid=(ceil_div(rows, _STEPS * at_once), heads),
        outs=[(flat, gate.dtype)],
        name="gated_head_norm",
    )
    return y.reshape(gate.shape)


@functools.partial(jax.jit, static_argnums=0)
def head_norm_gradient(eps: float, h: Any, gate: Any, scale: Any, d_y: Any, keep: Any = None) -> HeadNormGradients:
    """Returns the gradients of `head_norm_forward` as a kernel."""
    rows, heads, features = _sizes(h)
    flat = rows, heads * features
    at_once, steps = _rows_at_once(features), _gradient_steps(rows, heads, features)
    blocks = ceil_div(rows, steps * at_once)
    d_h, d_gate, partial, dots = call_kernel(
        functools.partial(_gradient_kernel, eps=eps, features=features, steps=steps),
        h.reshape(flat),
        gate.reshape(flat),
        d_y.reshape(flat),
        scale,
        *_rows_of(keep),
        grid=(blocks, heads),
        outs=[
            (flat, h.dtype),
            (flat, gate.dtype),
            ((blocks * at_once, heads * features), jnp.float32),
            ((heads, rows), jnp.float32),
        ],
        name="gated_head_norm_gradient",
    )
    dots = jnp.moveaxis(dots.reshape(heads, *h.shape[:2]), 0, 2)
    return HeadNormGradients(d_h.reshape(h.shape), d_gate.reshape(gate.shape), partial.sum(axis=0), dots)


# Without a gradient, XLA's form can join the operations around it, as in generation.
_gated = jax.custom_vjp(_plain, nondiff_argnums=(0,))
_gated.defvjp(
    lambda eps, *given: (head_norm_forward(eps, *given), given),
    lambda eps, given, d_y: head_norm_gradient(eps, *given, d_y)[:3],
)
register_cost("gated_head_norm")
register_cost("gated_head_norm_gradient", linear_in=range(2, 3))


def _sizes(h: Any) -> tuple[int, int, int]:
    rows, length, heads, features = h.shape
    return rows * length, heads, features


def _rows_of(keep: Any) -> list[Any]:
    return [] if keep is None else [keep.reshape(-1)]


def _rows_at_once(features: int) -> int:
    return _WARPS * min(max(_ELEMENTS // features, 1), _MOST_ROWS)


def _gradient_steps(rows: int, heads: int, features: int) -> int:
    blocks = max((3 if features <= _ELEMENTS else 2) * _MULTIPROCESSORS // heads, 1)
    return max(ceil_div(ceil_div(rows, _rows_at_once(features)), blocks), _STEPS)


def _forward_kernel(*refs: Any, eps: float, features: int, steps: int) -> None:
    h_ref, gate_ref, scale_ref, *keep, y_ref = refs
    tiles = _Tiles.of(features, steps, h_ref, gate_ref)
    scale = tiles.along(scale_ref)

    def some_rows(here: _Rows, loaded: Any, carry: Any) -> Any:
        h, gate = loaded
        unit, _ = tiles.normalized(tiles.kept(h, keep, here), eps)
        tiles.store(y_ref, here, unit * scale * _sigmoid(gate))
        return carry

    tiles.for_all_rows((h_ref, gate_ref), some_rows, jnp.int32(0))


def _gradient_kernel(*refs: Any, eps: float, features: int, steps: int) -> None:
    h_ref, gate_ref, d_y_ref, scale_ref, *keep, d_h_ref, d_gate_ref, d_scale_ref, dots_ref = refs
    tiles = _Tiles.of(features, steps, h_ref, gate_ref, d_y_ref)
    scale = tiles.along(scale_ref)

    def some_rows(here: _Rows, loaded: Any, d_scale: Any) -> Any:
        h, gate, d_y = loaded
        unit, inverse = tiles.normalized(tiles.kept(h, keep, here), eps)
        opening = _sigmoid(gate)
        d_normed = tiles.kept(d_y * opening, keep, here)
        d_unit = d_normed * scale
        along = jnp.sum(d_unit * unit, axis=1) * (1.0 / features)
        d_gate = d_unit * unit * (1.0 - opening)
        d_h = (d_unit - unit * tiles.down(along)) * tiles.down(inverse)
        tiles.store(d_h_ref, here, d_h)
        tiles.store(d_gate_ref, here, d_gate)
        # sum(d_h * h): all of it cancels but the part of `eps`.
        _store(dots_ref.at[tiles.head, here.place], along * (inverse * inverse * (features * eps)))
        more = d_normed * unit
        return d_scale + (more if here.is_new is None else jnp.where(here.is_new, more, 0.0))

    total = tiles.for_all_rows((h_ref, gate_ref, d_y_ref), some_rows, tiles.zeros())
    _store(d_scale_ref.at[_slice(tiles.block * tiles.at_once, tiles.at_once), tiles.columns], total)


def _slice(start: Any, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(start, size)


def _store(ref: Any, value: Any) -> None:
    # Since jax 0.12, an assignment refuses narrow stores, which small heads and the dot products need.
    store = None if is_interpreted() else getattr(mosaic_gpu(), "store", None)
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)


def _sigmoid(x: Any) -> Any:
    # An inverse square root is one instruction, and a division is ten.
    root = lax.rsqrt(1.0 + jnp.exp2(x * -_LOG2_E))
    return root * root


class _Rows(NamedTuple):
    """Rows that a block holds at once, and those of them that it did not hold before (None: all)."""

    place: Any
    is_new: Any


class _Tiles(NamedTuple):
    """One head of `at_once` rows in the registers of four warps, `[at_once, V]`."""

    num_rows: int
    features: int
    most_steps: int  # of a block
    at_once: int
    per_load: int  # elements that a lane loads at once, at most 16 bytes
    block: Any
    head: Any

    @classmethod
    def of(cls, features: int, steps: int, *refs: Any) -> _Tiles:
        widest = max(jnp.dtype(ref.dtype).itemsize for ref in refs)
        counts = (count for count in (8, 4, 2, 1) if features % (_LANES * count) == 0 and count * widest <= 16)
        # Blocks are asked for their indices here, because the interpreter knows them only outside of loops.
        rows, at_once = refs[0].shape[0], _rows_at_once(features)
        return cls(rows, features, steps, at_once, next(counts), block_index(0), block_index(1))

    @property
    def shape(self) -> tuple[int, int]:
        return self.at_once, self.features

    @property
    def columns(self) -> Any:
        return _slice(self.head * self.features, self.features)

    @property
    def layout(self) -> Any:
        """Rows over warps, and features over lanes."""
        mosaic = mosaic_gpu()
        tiling = mosaic.Tiling(((_WARPS, _LANES * self.per_load), (self.per_load,)))
        return mosaic.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def load(self, ref: Any, *, without: int | None = None) -> Any:
        """Loads an array of the tiles' shape, or without one of their dims."""
        if is_interpreted():
            return ref[...]
        layout = self.layout if without is None else self.layout.reduce(without)
        return mosaic_gpu().load(ref, layout=layout, optimized=False)

    def store(self, ref: Any, here: _Rows, value: Any) -> None:
        _store(ref.at[here.place, self.columns], value.astype(ref.dtype))

    def along(self, ref: Any) -> Any:
        """Loads the head's part of a vector, the same for all rows."""
        return lax.broadcast_in_dim(self.load(ref.at[self.columns], without=0), self.shape, [1])

    def down(self, numbers: Any) -> Any:
        return lax.broadcast_in_dim(numbers, self.shape, [0])

    def kept(self, value: Any, keep: Any, here: _Rows) -> Any:
        """Returns 0 for rows that do not count."""
        if not keep:
            return value
        return jnp.where(self.down(self.load(keep[0].at[here.place], without=1)) != 0, value, 0.0)

    def normalized(self, value: Any, eps: float) -> tuple[Any, Any]:
        """Returns heads divided by their root mean squares, and the inverses of these, `[at_once]`."""
        inverse = lax.rsqrt(jnp.sum(value * value, axis=1) * (1.0 / self.features) + eps)
        return value * self.down(inverse), inverse

    def zeros(self) -> Any:
        zeros = jnp.zeros(self.shape, jnp.float32)
        return zeros if is_interpreted() else mosaic_gpu().layout_cast(zeros, self.layout)

    def for_all_rows(self, refs: Any, body: Callable[[_Rows, Any, Any], Any], carry: Any) -> Any:
        """Calls `body(rows, values, carry)` for all rows of the block, with the values of `refs` in float32.

        If `at_once` does not divide their number, the last rows overlap with those before.
        """
        first = self.block * self.most_steps * self.at_once
        steps = jnp.minimum(self.most_steps, lax.div(self.num_rows - first + self.at_once - 1, self.at_once))

        def start_of(index: Any) -> Any:
            return jnp.minimum(first + index * self.at_once, self.num_rows - self.at_once)

        def load(index: Any) -> Any:
            place = _slice(start_of(index), self.at_once)
            return tuple(self.load(ref.at[place, self.columns]) for ref in refs)

        def step(index: Any, carry: Any) -> Any:
            loaded, carry = carry
            following = load(jnp.minimum(index + 1, steps - 1))  # on its way while these are in use
            start, is_new = start_of(index), None
            if self.num_rows % self.at_once:
                if is_interpreted():
                    row = lax.broadcasted_iota(jnp.int32, self.shape, 0)
                else:
                    row = mosaic_gpu().broadcasted_iota(jnp.int32, self.shape, 0, layout=self.layout)
                is_new = row >= first + index * self.at_once - start
            here = _Rows(_slice(start, self.at_once), is_new)
            return following, body(here, tuple(value.astype(jnp.float32) for value in loaded), carry)

        return lax.fori_loop(0, steps, step, (load(jnp.int32(0)), carry))[1]
