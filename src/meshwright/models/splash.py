"""Causal attention on TPUs, by JAX's splash attention kernels.

XLA writes the logits of attention to memory on TPUs; these kernels keep them on the chip, skip blocks that the mask
excludes and recompute logits in the backward pass.

Shapes as in `meshwright.models.attention`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from meshwright.hardware.chips import chip_family
from meshwright.hardware.flops import Tally, matmul_flops, register_cost
from meshwright.mesh.current import current_mesh

_ROOM = "jax.experimental.pallas.ops.tpu.splash_attention"
_EXACT = ("highest", "float32")
_BLOCKS = 512, 256, 128
"""Positions per block, the largest that divides the positions of a row; MaxText uses 512 by default."""


def suits_splash(q: Any) -> bool:
    """Returns whether the kernels can compute attention of these queries `[B, S, H, K]` here.

    They need TPUs, S a multiple of 128, and the local view or one device; XLA cannot split a kernel in the global view.
    """
    mesh = current_mesh()
    if mesh is None:
        on_tpu = jax.default_backend() == "tpu" and jax.device_count() == 1  # arrays may be split over several
    else:
        # If any axis is manual, the compiler of TPUs wants all of them to be, also those of size 1.
        kinds, manual = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)), set(mesh.manual_axes)
        split = {axis for axis, size in mesh.shape.items() if size > 1 or kinds[axis] == AxisType.Explicit}
        whole = not manual or manual == set(mesh.axis_names)
        on_tpu = chip_family(mesh) not in ("gpu", "cpu") and split <= manual and whole
    return on_tpu and q.shape[1] % _BLOCKS[-1] == 0 and _takes(q.dtype)


def _takes(dtype: Any) -> bool:
    """Returns whether the kernels compile for this dtype; their matmuls have JAX's default precision."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    plain = precision in (None, "default", "fastest", "bfloat16")
    return (plain and dtype in (jnp.bfloat16, jnp.float32)) or (dtype == jnp.float32 and precision in _EXACT)


def splash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    pieces: Any = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    interpret: bool = False,
) -> Any:
    """Returns causal attention `[B, S, H, K]`; positions attend only to their own piece.

    Args:
        pieces: integers `[B, S]` that differ between documents.
        interpret: whether to run the kernels on a CPU, slowly.
    """
    heads, length = q.shape[2], q.shape[1]
    q = q * jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, q.dtype)
    kernel = _kernel(heads, length, window, soft_cap, interpret)
    ids = None if pieces is None else _modules()[0].SegmentIds(pieces, pieces)
    by_head = [x.swapaxes(1, 2) for x in (q, k, v)]
    return jax.vmap(kernel)(*by_head, ids).swapaxes(1, 2)


def _kernel(heads: int, length: int, window: int | None, soft_cap: float | None, interpret: bool) -> Any:
    splash, masks = _modules()
    size = next(size for size in _BLOCKS if length % size == 0)
    if window is None:
        mask = masks.CausalMask((length, length))
    else:
        mask = masks.LocalMask((length, length), (window - 1, 0), 0)
    sides = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(sides, size)),
        attn_logits_soft_cap=soft_cap,
        interpret=interpret,
    )


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    """Returns a copy of JAX's module of kernels, whose results have types inside `shard_map`, and that of masks.

    JAX's kernels do not say along which axes their results vary, which `shard_map(check_vma=True)` requires. The copy
    calls `pallas_call` with the axes of the arguments; the module that others import stays as it is.
    """
    spec = importlib.util.find_spec(f"{_ROOM}.splash_attention_kernel")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.pl = _TypedPallas(module.pl)  # type: ignore[attr-defined]
    return module, importlib.import_module(f"{_ROOM}.splash_attention_mask")


class _TypedPallas:
    """The module `jax.experimental.pallas`, with results of kernels that vary like their arguments."""

    def __init__(self, pallas: Any) -> None:
        self._pallas = pallas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pallas, name)

    def pallas_call(self, kernel: Any, *, out_shape: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            # q, k and v were cast alike, so results vary as they do; the mask's numbers are the same everywhere.
            axes = max((jax.typeof(x).mat for x in jax.tree.leaves(args)), key=lambda mat: len(mat.varying))
            typed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes), out_shape)
            return self._pallas.pallas_call(kernel, out_shape=typed, **options)(*args)

        return run


def _cost(products: int, again: int, equation: Any) -> Tally:
    """Counts a kernel's products of blocks that a causal mask leaves; `again` of them repeat others."""
    q, k = [value.aval for value in equation.invars if jnp.issubdtype(value.aval.dtype, jnp.floating)][:2]
    one = matmul_flops((*q.shape[:-1], k.shape[-2]), q.shape[-1:]) // 2
    moved = sum(value.aval.size * value.aval.dtype.itemsize for value in (*equation.invars, *equation.outvars))
    return Tally(
        attention=products * one,
        recomputed=again * one,
        moved=moved,
        by_dtype=Counter({q.dtype.name: products * one}),
    )


# The backward pass needs four products; both of its kernels repeat the logits, and one the gradient of the weights.
for _name, _count, _again in (("fwd", 2, 0), ("dq", 3, 2), ("dkv", 4, 1)):
    for _kind in ("", "_segmented"):
        for _end in ("_residuals", "_no_residuals"):
            # Both backward kernels are linear in the output's gradient and its product with the output.
            _linear = () if _name == "fwd" else (-3, -2)
            register_cost(
                f"splash_mha_{_name}{_kind}{_end}", functools.partial(_cost, _count, _again), linear_in=_linear
            )
