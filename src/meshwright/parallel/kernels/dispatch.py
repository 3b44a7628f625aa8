"""Dispatch of Pallas kernels (compiled by Triton): when to use them and how to call them.

Each kernel exists because it saves a pass over memory that XLA makes; benchmarks/results/decoder_h200.md has the time
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType

from meshwright.errors import PlacementError
from meshwright.hardware.chips import chip_family, is_hopper, is_hopper_kind
from meshwright.mesh.build import current_mesh


def uses_kernels(wanted: bool | None) -> bool:
    """Returns whether to use Pallas kernels instead of XLA's operations.

    The default (None) uses them on Ampere or newer GPUs, in the local view or on one device; in the global view, XLA
    cannot split a kernel. True requires them, and on one CPU device runs them in interpret mode, which is slow.
    """
    if wanted is False:
        return False
    mesh = current_mesh()
    chip = chip_family(mesh)
    split = []
    if mesh is not None:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # Kernels reject array types with explicit axes, even of size 1.
        kept = [axis for axis, kind in kinds if mesh.shape[axis] > 1 or kind == AxisType.Explicit]
        split = [axis for axis in kept if axis not in mesh.manual_axes]
    if wanted is None:
        return chip == "gpu" and not split and not _is_too_old()
    if split:
        raise PlacementError(
            f"kernels=True, but XLA splits arrays over {', '.join(map(repr, split))} here and cannot split kernels.",
            hint="use view='local', or leave kernels out to use them wherever possible.",
        )
    if chip not in ("gpu", "cpu") or (chip == "cpu" and mesh is not None and mesh.manual_axes):
        why = "JAX cannot interpret them on several CPU devices" if chip == "cpu" else f"this is {chip}"
        raise PlacementError(
            f"kernels=True, but the kernels need GPUs; {why}.", hint="leave kernels out to use them wherever possible."
        )
    return True


def uses_hopper_kernels(wanted: bool | None) -> bool:
    """Returns whether to use Pallas kernels that need a Hopper GPU and jax 0.11; see `uses_kernels`.

    Without a mesh, the default depends on the default backend.
    """
    if jax.__version_info__ < (0, 11):
        return False
    mesh = current_mesh()
    if wanted is None and mesh is None:
        return jax.default_backend() == "gpu" and is_hopper_kind(jax.local_devices()[0].device_kind)
    return uses_kernels(wanted) and (is_hopper(mesh) or is_interpreted())


def _is_too_old() -> bool:
    """Returns whether Triton does not support this GPU; GPUs that are only compiled for always pass."""
    if jax.default_backend() != "gpu":
        return False
    return float(getattr(jax.local_devices()[0], "compute_capability", 8)) < 8


def is_interpreted() -> bool:
    """Returns whether kernels run in interpret mode, for lack of a GPU."""
    return chip_family(current_mesh()) != "gpu" and jax.default_backend() != "gpu"


def backed_by(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `kernel` with the vmap and jvp rules of `plain`, which computes the same."""
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
    """Runs a Triton kernel on whole-array references and returns arrays with the shapes and dtypes in `outs`.

    All arguments must vary along the same manual axes. `aliases` maps an argument's index to the result that reuses its
    memory.
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
