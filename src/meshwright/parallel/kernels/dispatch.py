"""Dispatch of Pallas kernels (Mosaic GPU): when to use them, how to call them, and how they read rows.

Each kernel exists because it saves a pass over memory that XLA makes; benchmarks/results/decoder_h200.md has the time
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from meshwright.errors import PlacementError
from meshwright.hardware.chips import chip_family, is_hopper, is_hopper_kind
from meshwright.mesh.axes import pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh

_THREADS = 128  # of a warpgroup, which runs one block of a grid
_MOST_PER_LOAD = 8  # elements that a thread reads at once: 16 bytes of 16-bit floats


def uses_kernels(wanted: bool | None) -> bool:
    """Returns whether to use Pallas kernels instead of XLA's operations.

    The default (None) uses them on Hopper GPUs with jax 0.11 or newer, in the local view or on one device; in the
    global view, XLA cannot split a kernel. True requires them, and on one CPU device runs them in interpret mode, which
    is slow.
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
        return chip == "gpu" and not split and has_mosaic() and is_hopper(mesh)
    if split:
        raise PlacementError(
            f"kernels=True, but XLA splits arrays over {', '.join(map(repr, split))} here and cannot split kernels.",
            hint="use view='local', or leave kernels out to use them wherever possible.",
        )
    why = None
    if chip == "cpu":
        why = "JAX cannot interpret them on several CPU devices" if mesh is not None and mesh.manual_axes else None
    elif chip != "gpu" or not is_hopper(mesh):
        why = "this is another GPU" if chip == "gpu" else f"this is {chip}"
    elif not has_mosaic():
        why = f"this is jax {jax.__version__}"
    if why is not None:
        raise PlacementError(
            f"kernels=True, but the kernels need Hopper GPUs and jax 0.11; {why}.",
            hint="leave kernels out to use them wherever possible.",
        )
    return True


def uses_hopper_kernels(wanted: bool | None) -> bool:
    """Returns whether to use Pallas kernels that JAX 0.10 cannot interpret either; see `uses_kernels`.

    Without a mesh, the default depends on the default backend.
    """
    if not has_mosaic():
        return False
    mesh = current_mesh()
    if wanted is None and mesh is None:
        return jax.default_backend() == "gpu" and is_hopper_kind(jax.local_devices()[0].device_kind)
    return uses_kernels(wanted) and (is_hopper(mesh) or is_interpreted())


def has_mosaic() -> bool:
    """Returns whether this JAX has the parts of Mosaic GPU that the kernels need."""
    return bool(jax.__version_info__ >= (0, 11))


def mosaic_gpu() -> Any:
    """Imports Mosaic GPU on first use, because the import takes a second."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


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
    name: str,
    scratch: Sequence[Any] = (),
    num_in_place: int = 0,
) -> list[Any]:
    """Runs a kernel of one warpgroup per block on whole-array references, and returns arrays as described in `outs`.

    All arguments must vary along the same manual axes. In interpret mode, the kernel gets no `scratch` memory.

    Args:
        num_in_place: so many of the first results take the memory of the first arguments. A thread may read only those
            elements of them that it writes itself, later.
    """
    from jax.experimental import pallas as pl

    if is_interpreted():
        kinds = [jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(args[0]).mat) for shape, dtype in outs]
        found: list[Any] = pl.pallas_call(kernel, grid=grid, out_shape=kinds, interpret=True, name=name)(*args)
        return found
    mosaic = mosaic_gpu()

    def in_place(*refs: Any) -> None:
        kernel(*refs[: len(args)], *refs[:num_in_place], *refs[len(args) :])

    run = mosaic.kernel(
        in_place if num_in_place else kernel,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outs[num_in_place:]],
        scratch_types=scratch,
        grid=grid,
        grid_names=tuple(map(_grid_name, range(len(grid)))),
        kernel_name=name,
        compiler_params=mosaic.CompilerParams(approx_math=True),
    )
    if num_in_place:

        @pl.run_state
        def change(refs: Sequence[Any]) -> None:
            made = run(*refs[:num_in_place], *args[num_in_place:])
            for ref, result in zip(refs[num_in_place:], made, strict=True):
                ref[...] = result

        blank = [jnp.zeros(shape, dtype) for shape, dtype in outs[num_in_place:]]
        results = change([*args[:num_in_place], *blank])
    else:
        results = run(*args)
    return list(pcast_varying(tuple(results), sorted(varying_axes(args[0]))))


def _grid_name(dim: int) -> str:
    return f"block{dim}"


# --- Inside kernels ---


def block_index(dim: int) -> Any:
    """Returns the index of this block along a dim of the grid."""
    from jax.experimental import pallas as pl

    return pl.program_id(dim) if is_interpreted() else lax.axis_index(_grid_name(dim))


def swizzled() -> tuple[Any, ...]:
    """Returns the layout of 16-bit floats in shared memory for matmuls: tiles of 8 rows of 128 bytes, swizzled."""
    mosaic = mosaic_gpu()
    return mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128)


def fits_row(size: int) -> bool:
    """Returns whether `load_row` supports rows of this size."""
    return size > 0 and size % _THREADS == 0


def load_row(ref: Any) -> Any:
    """Loads a contiguous row from global memory, up to 16 bytes per thread at once."""
    if is_interpreted():
        return ref[...]
    return mosaic_gpu().load(ref, layout=_row_layout(ref.shape[0]), optimized=False)


def fill_row(size: int, value: Any, dtype: Any) -> Any:
    """Returns a row of equal numbers, in registers like a loaded one."""
    row = jnp.full(size, value, dtype)
    if is_interpreted():
        return row
    mosaic = mosaic_gpu()

    return mosaic.layout_cast(row, _row_layout(size))


def _row_layout(size: int) -> Any:
    mosaic = mosaic_gpu()

    together = next(count for count in (_MOST_PER_LOAD, 4, 2, 1) if size % (_THREADS * count) == 0)
    return mosaic.Layout.WG_STRIDED((size,), vec_size=together)
