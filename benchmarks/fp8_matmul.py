"""fp8 matmuls with gradients, written so that XLA gives them to cuBLASLt: the recipes that `fp8_h200.py` compares.

`make_fp8_dots(recipe)` returns `dots(x, ws, amaxes) -> ys`: the products of one `x` with several weights. Forward
operands are e4m3, gradients e5m2, each with one scale per tensor. Every tensor is quantized once; both of its uses, as
it is and transposed, come from that. Products are accumulated in float32 inside the matmul unit and returned in
bfloat16.

On Hopper, cuBLASLt multiplies fp8 operands only if the contracted dim is the last of both. XLA adds the transposes.
Without barriers, it fuses the cast and the transposed copy into one kernel, together with the operation before them.

Shapes: M rows, K input features, N output features.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.parallel import tensor
from meshwright.parallel.kernels.dispatch import call_kernel

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ROWS, LAST, INNER = ((0,), (0,)), ((1,), (1,)), ((1,), (0,))  # dims that a product contracts
AMAXES = "fp8_scales"  # the name of the leaf in which delayed scaling keeps amaxes; `Precision.keep` leaves it float32


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How tensors are quantized and multiplied.

    Args:
        scaling: where a scale comes from. "current": the tensor itself, by a pass over it. "delayed": the tensor of the
            previous step; its amax is computed beside the cast. "delayed8": the same, with the amax of the fp8 values,
            which are half the bytes; the scale leaves room for growth by half, and doubles where that was too little.
            "fixed": a constant, the lower bound of the cost of scaling.
        gradients: the scaling of gradients, if it differs.
        form: "pattern" multiplies dequantized operands, which XLA's gemm rewriter recognizes. "direct" multiplies fp8
            operands and scales the product, which XLA folds into the matmul.
        barrier: "input" writes a tensor in bfloat16 before it is quantized; "output" keeps XLA from fusing the
            transposed copy with the cast.
        wgrad: False computes weight gradients in bfloat16.
        stacked: quantizes all layers' weights at once, before the first layer.
        kernel: casts and transposes with a Pallas kernel; with delayed scaling, it returns the amax as well.
        precise: the products without fast accumulation: "dgrad", "wgrad" or both. Fast accumulation loses the most
            in weight gradients, which add up a product for every token.
        cast: the dtype in which a tensor is divided by its scale.
    """

    scaling: str = "current"
    gradients: str | None = None
    form: str = "pattern"
    barrier: str = "none"
    wgrad: bool = True
    stacked: bool = False
    kernel: bool = False
    precise: tuple[str, ...] = ()
    cast: Any = jnp.float32

    def scaling_of(self, dtype: Any) -> str:
        return self.gradients if self.gradients and dtype == E5M2 else self.scaling

    @property
    def keeps_amaxes(self) -> bool:
        """Whether scales come from the previous step."""
        return any(self.scaling_of(dtype).startswith("delayed") for dtype in (E4M3, E5M2))


RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "current": Recipe(),
    "current_bf16_cast": Recipe(cast=jnp.bfloat16),
    "direct": Recipe(form="direct"),
    "current_delayed8": Recipe(gradients="delayed8"),
    "fixed": Recipe(scaling="fixed"),
    "delayed": Recipe(scaling="delayed"),
    "delayed8": Recipe(scaling="delayed8"),
    "kernel": Recipe(kernel=True),
    "kernel_delayed": Recipe(scaling="delayed", kernel=True),
    "weights_once": Recipe(stacked=True),
    "written_first": Recipe(barrier="input"),
    "transposes_apart": Recipe(barrier="output"),
    "wgrad_bf16": Recipe(wgrad=False),
    "precise": Recipe(precise=("dgrad", "wgrad")),
    "delayed8_precise": Recipe(scaling="delayed8", precise=("dgrad", "wgrad")),
    "kernel_delayed_precise": Recipe(scaling="delayed", kernel=True, precise=("dgrad", "wgrad")),
    "kernel_delayed_precise_wgrad": Recipe(scaling="delayed", kernel=True, precise=("wgrad",)),
}


# --- Quantizing ---


def scale_of(amax: Any, dtype: Any) -> Any:
    """Returns the scale that makes `amax` the largest fp8 value: a bfloat16 number, rounded up, so nothing saturates.

    XLA may multiply by the scale in bfloat16 or in float32; with such a number, both give the same.
    """
    wanted = amax.astype(jnp.float32) * (1.0078125 / float(jnp.finfo(dtype).max))
    return lax.reduce_precision(jnp.where(wanted > 0, wanted, 1.0), 8, 7)


def amax_of(x: Any) -> Any:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def cast(x: Any, scale: Any, dtype: Any, *, saturates: bool, within: Any = jnp.float32) -> Any:
    """Returns `x / scale` in an fp8 dtype."""
    scaled = x.astype(within) * (1.0 / scale).astype(within)
    if saturates:  # a cast to e4m3 makes NaN of a value beyond its range
        top = float(jnp.finfo(dtype).max)
        scaled = jnp.clip(scaled, -top, top)
    return scaled.astype(dtype)


def quantize(recipe: Recipe, x: Any, last_amax: Any, dtype: Any) -> tuple[Any, Any, Any, Any]:
    """Returns `x` in fp8, its transpose (None leaves it to XLA), the scale, and the amax for the next step."""
    if recipe.barrier == "input":
        x = lax.optimization_barrier(x)
    scaling, top = recipe.scaling_of(dtype), float(jnp.finfo(dtype).max)
    delayed, amax, turned = scaling.startswith("delayed"), None, None
    if scaling == "fixed":
        scale = scale_of(jnp.float32(32.0 if dtype == E4M3 else 4096.0), dtype)
    elif delayed:
        scale = scale_of(last_amax * (1.5 if scaling == "delayed8" else 1.0), dtype)
    else:
        amax = amax_of(x)
        scale = scale_of(amax, dtype)
    if recipe.kernel:
        x8, turned, parts = cast_both_ways(x, 1.0 / scale, dtype)
        amax = jnp.max(parts) if delayed else amax
    else:
        x8 = cast(x, scale, dtype, saturates=scaling != "current", within=recipe.cast)
    if recipe.barrier == "output":
        x8 = lax.optimization_barrier(x8)
    if scaling == "delayed" and amax is None:
        amax = amax_of(x)
    elif scaling == "delayed8":
        # Behind the barrier, XLA reads the fp8 values; it would compute them again from more bytes.
        largest = amax_of(lax.optimization_barrier(x8).astype(jnp.bfloat16))
        amax = largest * scale * jnp.where(largest >= top, 2.0, 1.0)
    return x8, turned, scale, jnp.float32(0) if amax is None else amax


BLOCK = 128


def cast_both_ways(x: Any, inverse: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Returns `x * inverse` in fp8, its transpose, and the amax of each block, in one pass over `x`."""
    rows, columns = x.shape
    down, across = (next(size for size in (BLOCK, 64, 32, 16) if dim % size == 0) for dim in x.shape)
    grid = (rows // down, columns // across)
    outs = [((rows, columns), dtype), ((columns, rows), dtype), (grid, jnp.float32)]
    kernel = functools.partial(_cast_kernel, down=down, across=across, dtype=dtype)
    x8, turned, parts = call_kernel(
        kernel, x, inverse.reshape(1), grid=grid, outs=outs, num_warps=4, name="cast_both_ways"
    )
    return x8, turned, parts


def _cast_kernel(
    x: Any, inverse: Any, out: Any, turned: Any, parts: Any, *, down: int, across: int, dtype: Any
) -> None:
    from jax.experimental import pallas as pl

    row, column = pl.program_id(0), pl.program_id(1)
    here, there = pl.ds(row * down, down), pl.ds(column * across, across)
    wide = x[here, there].astype(jnp.float32)
    parts[row, column] = jnp.max(jnp.abs(wide))
    top = float(jnp.finfo(dtype).max)
    block = jnp.clip(wide * inverse[0], -top, top).astype(dtype)
    out[here, there] = block
    turned[there, here] = block.T


# --- Multiplying ---


def dot8(recipe: Recipe, a: Any, a_scale: Any, b: Any, b_scale: Any, dims: Any, product: str = "fwd") -> Any:
    """Returns the product of two fp8 matrices, times their scales, in bfloat16."""
    precision = lax.Precision.HIGHEST if product in recipe.precise else None
    options: Any = {"preferred_element_type": jnp.bfloat16, "precision": precision}
    if recipe.form == "direct":
        unscaled = lax.dot_general(a, b, (dims, ((), ())), **options)
        return unscaled * (a_scale * b_scale).astype(jnp.bfloat16)
    return lax.dot_general(wide(a, a_scale), wide(b, b_scale), (dims, ((), ())), **options)


def wide(x8: Any, scale: Any) -> Any:
    return x8.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value", "quantized", "turned", "scale"], meta_fields=[]
)
@dataclasses.dataclass
class Weight:
    """A weight and its fp8 form, made for all layers at once; layers are split as those of any leaf."""

    value: Any
    quantized: Any
    turned: Any
    scale: Any

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    dtype = property(lambda self: self.value.dtype)


def stacked_weight(value: Any) -> Weight:
    """Quantizes stacked weights `[layers, K, N]`, with a scale for each layer."""
    held = lax.stop_gradient(value)
    scale = scale_of(jnp.max(jnp.abs(held), axis=(1, 2)), E4M3)
    quantized = cast(held, scale[:, None, None], E4M3, saturates=False)
    return Weight(value, quantized, quantized.swapaxes(1, 2), scale)


def make_fp8_dots(recipe: Recipe) -> Any:
    """Returns `dots(x, ws, amaxes)`: `x [..., K]` times each of `ws`, `[K, N]` or `Weight`.

    `amaxes` holds those of x, of each weight and of each gradient, from the previous step. Its gradient is those of
    this step.
    """

    @jax.custom_vjp
    def dots(x: Any, ws: tuple[Any, ...], amaxes: Any) -> tuple[Any, ...]:
        return forward(x, ws, amaxes)[0]

    def forward(x: Any, ws: tuple[Any, ...], amaxes: Any) -> tuple[tuple[Any, ...], Any]:
        flat = x.reshape(-1, x.shape[-1])
        x8, x_turned, x_scale, x_amax = quantize(recipe, flat, amaxes[0], E4M3)
        ys, kept, seen = [], [], [x_amax]
        for number, w in enumerate(ws):
            if isinstance(w, Weight):
                w8, turned, scale, amax = w.quantized, w.turned, w.scale, jnp.float32(0)
            else:
                w8, turned, scale, amax = quantize(recipe, w, amaxes[1 + number], E4M3)
            if turned is None:
                y = dot8(recipe, x8, x_scale, w8, scale, INNER)
            else:
                y = dot8(recipe, x8, x_scale, turned, scale, LAST)
            ys.append(y.astype(x.dtype).reshape(*x.shape[:-1], -1))
            kept.append((w8, scale))
            seen.append(amax)
        x_kept = flat if not recipe.wgrad else x8 if x_turned is None else x_turned
        like = tuple(jax.tree.map(jnp.zeros_like, w) if isinstance(w, Weight) else None for w in ws)
        return tuple(ys), (x_kept, x_scale, kept, seen, amaxes, like)

    def backward(saved: Any, gradients: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], Any]:
        x_kept, x_scale, kept, seen, amaxes, like = saved
        count, lead = len(kept), gradients[0].shape[:-1]
        dx, d_weights, found = None, [], []
        for number in reversed(range(count)):
            g = gradients[number].reshape(-1, gradients[number].shape[-1])
            w8, scale = kept[number]
            g8, turned, g_scale, g_amax = quantize(recipe, g, amaxes[1 + count + number], E5M2)
            part = dot8(recipe, g8, g_scale, w8, scale, LAST, "dgrad")
            dx = part if dx is None else part + dx  # in this order, cuBLAS adds the sum so far
            if not recipe.wgrad:
                dw = lax.dot_general(x_kept, g, (ROWS, ((), ())), preferred_element_type=jnp.bfloat16)
            elif turned is None:
                dw = dot8(recipe, x_kept, x_scale, g8, g_scale, ROWS, "wgrad")
            else:
                dw = dot8(recipe, x_kept, x_scale, turned, g_scale, LAST, "wgrad")
            dw = dw.astype(gradients[0].dtype)
            if like[number] is not None:
                dw = dataclasses.replace(like[number], value=dw)
            d_weights.append(dw)
            found.append(g_amax)
        news = jnp.stack([*seen, *reversed(found)]).reshape(amaxes.shape)
        return dx.astype(gradients[0].dtype).reshape(*lead, -1), tuple(reversed(d_weights)), news

    dots.defvjp(forward, backward)
    return dots


# --- The decoder's projections ---


class Amaxes:
    """Hands each group of projections its part of the amaxes of the previous step, in the order of the trace."""

    def __init__(self) -> None:
        self.parts: list[Any] | None = None

    def start(self, amaxes: Any) -> None:
        self.parts = list(lax.split(amaxes, [1 + 2 * count for count in self.groups(len(amaxes))]))

    @staticmethod
    def groups(num_amaxes: int) -> list[int]:
        """Returns how many weights share an input: q, k, v; o; gate, up; down; for each layer."""
        return [3, 1, 2, 1] * (num_amaxes // AMAXES_PER_LAYER)

    def take(self, count: int) -> Any:
        if self.parts is None:
            return jnp.zeros(1 + 2 * count, jnp.float32)
        return self.parts.pop(0)


AMAXES_PER_LAYER = sum(1 + 2 * count for count in (3, 1, 2, 1))


@contextlib.contextmanager
def fp8_projections(recipe: Recipe | None) -> Iterator[Amaxes]:
    """While it is open, programs that are traced multiply the decoder's projections by a recipe; the head's is bf16.

    On one device all of them go through two functions that `parallel/tensor.py` calls.
    """
    amaxes = Amaxes()
    if recipe is None:
        yield amaxes
        return
    dots = make_fp8_dots(recipe)

    def gather_matmul(x: Any, w: Any, **_: Any) -> Any:
        several = isinstance(w, Sequence)
        ys = dots(x, tuple(w) if several else (w,), amaxes.take(len(w) if several else 1))
        return ys if several else ys[0]

    def matmul_scatter(x: Any, w: Any, **_: Any) -> Any:
        return dots(x, (w,), amaxes.take(1))[0]

    before = tensor.gather_matmul, tensor.matmul_scatter
    tensor.gather_matmul, tensor.matmul_scatter = gather_matmul, matmul_scatter
    try:
        yield amaxes
    finally:
        tensor.gather_matmul, tensor.matmul_scatter = before
