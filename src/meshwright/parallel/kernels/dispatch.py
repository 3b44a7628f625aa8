"""Kernels of our own for GPUs (Pallas, compiled by Triton): where they run, and how they are called.

XLA writes one kernel for each pass that it makes over memory, and cannot be told to make fewer. A kernel of our own is
worth its lines only where it saves a pass; each says which, and benchmarks/RESULTS.md has what it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType

from meshwright.errors import PlacementError
from meshwright.hardware.chips import chip_family
from meshwright.mesh.build import current_mesh


def uses_kernels(wanted: bool | None) -> bool:
    """Returns whether kernels of ours are used here, instead of XLA's operations.

    By default (None) on GPUs since Ampere, wherever a program sees arrays as one device has them: in the local view, or
    on one device. In the global view XLA splits arrays, and cannot split a kernel that it knows nothing of. True asks
    for them, also on one CPU device, where they are interpreted: slow, and for tests.
    """
    if wanted is False:
        return False
    mesh = current_mesh()
    chip = chip_family(mesh)
    split = []
    if mesh is not None:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # An axis of one device splits nothing, but where types say what is split, kernels accept no such type.
        kept = [axis for axis, kind in kinds if mesh.shape[axis] > 1 or kind == AxisType.Explicit]
        split = [axis for axis in kept if axis not in mesh.manual_axes]
    if wanted is None:
        return chip == "gpu" and not split and not _is_too_old()
    if split:
        raise PlacementError(
            f"kernels=True, but XLA splits arrays over {', '.join(map(repr, split))} here, and cannot split kernels.",
            hint="use view='local', or leave kernels out: they are then used where they can be.",
        )
    if chip not in ("gpu", "cpu") or (chip == "cpu" and mesh is not None and mesh.manual_axes):
        where = "on several CPU devices JAX cannot interpret them" if chip == "cpu" else f"not for {chip}"
        raise PlacementError(
            f"kernels=True, but the kernels are for GPUs: {where}.",
            hint="leave kernels out: they are then used where they can be.",
        )
    return True


def _is_too_old() -> bool:
    """Returns whether Triton does without this GPU; where programs are compiled for others, those are not."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.local_devices()[0], "compute_capability", 8)) < 8


def is_interpreted() -> bool:
    """Returns whether kernels are interpreted here, for want of a GPU."""
    return chip_family(current_mesh()) != "gpu" and jax.default_backend() != "gpu"


def backed_by(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel` with the batches and derivatives of `plain`, which computes the same and has them."""
    batched = jax.custom_batching.custom_vmap(kernel)

    @batched.def_vmap
    def _(size: int, are_batched: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(are_batched))
        outs = jax.vmap(plain, in_axes=axes, axis_size=size)(*args)
        return outs, jax.tree.map(lambda _: True, outs)

    run = jax.custom_jvp(lambda *args: batched(*args))
    run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return run


def call_kernel(
    kernel: Callable[..., None],
    *args: Any,
    grid: tuple[int, ...],
    outs: Sequence[tuple[tuple[int, ...], Any]],
    num_warps: int,
    name: str,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> list[Any]:
    """Runs a kernel whose references are whole arrays; returns arrays of the shapes and dtypes `outs`.

    All arguments must vary along the same manual axes, and so do the results. `aliases` says which argument's memory
    becomes which result's.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    kinds = [jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(args[0]).mat) for shape, dtype in outs]
    interpret = is_interpreted()
    found: list[Any] = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=kinds,
        input_output_aliases=dict(aliases),
        interpret=interpret,
        compiler_params=None if interpret else triton.CompilerParams(num_warps=num_warps, num_stages=1),
        name=name,
    )(*args)
    return found
