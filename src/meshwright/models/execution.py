"""How a model runs, apart from what it computes: which mesh axes it uses, how it loops over layers, what it recomputes.

Nothing here changes the function. One `Execution` serves every mesh: axes that a mesh lacks are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import is_manual
from meshwright.mesh.build import current_mesh
from meshwright.parallel.overlap.collective_matmul import GATHERED_ROWS

Layers = Literal["auto", "scan", "unroll"] | int
Remat = Literal["none", "dots", "full", "offload"] | Callable[..., Any]

DATA_AXES = ("dp", "fsdp")
"""The axes that split the rows of a batch, unless others are named."""

PROJECTION = "projection"
"""The name (`jax.ad_checkpoint.checkpoint_name`) of what `remat="dots"` keeps in our models: results of matmuls."""


@dataclass(frozen=True)
class Execution:
    """How a model of ours runs on a mesh.

    Args:
        tensor_axis: splits heads, features and vocabulary, with matmuls that hide their transfer. None leaves them to
            XLA, in the global view.
        data_axes: split the rows of a batch.
        pipeline_axis: splits layers into stages, in the local view. In the global view it splits their storage only.
        sequence_parallel: between blocks, splits the sequence over `tensor_axis` as well.
        save_gathered: keeps the rows gathered for a matmul for its weight's gradient, instead of gathering them again:
            a fifth less communication along `tensor_axis`, for more memory; with `remat="full"`, for that of one layer.
        prefetch: where layers are scanned and gathered one by one, gathers each while the one before it computes.
        layers: "scan" compiles one layer, "unroll" all of them, a number that many at a time. "auto" is what measured
            best on the backend (benchmarks/RESULTS.md).
        num_microbatches: how many parts a batch passes the pipeline in; by default twice the stages.
        attention: the implementation of attention, "xla" or "cudnn"; by default what suits the backend.
        max_segments: how many documents a row holds at most; lets packed rows take the fast path on GPUs.
        kernels: whether kernels of ours do what XLA needs more passes over memory for: gradients of norms, of stacked
            layers and of the loss's softmax, cuts of weights whose products are scattered in parts, and matmuls of
            gathered rows on Hopper GPUs. By default they do on GPUs, where a program sees arrays as one device has
            them; False leaves all of it to XLA; True asks for them, on one CPU device too, where they are interpreted
            and slow, and is an error where they cannot run.
    """

    tensor_axis: str | None = "tp"
    data_axes: tuple[str, ...] = DATA_AXES
    pipeline_axis: str | None = "pp"
    sequence_parallel: bool = True
    save_gathered: bool = False
    prefetch: bool = True
    layers: Layers = "auto"
    num_microbatches: int | None = None
    attention: Literal["xla", "cudnn"] | None = None
    max_segments: int | None = None
    kernels: bool | None = None

    def tensor(self) -> str | None:
        """Returns the tensor axis, if the mesh in force has it."""
        return _here(self.tensor_axis)

    def stages(self) -> str | None:
        """Returns the axis of the pipeline, if layers are split over it here."""
        axis = _here(self.pipeline_axis)
        return axis if axis is not None and is_manual(axis) else None

    def rows(self) -> tuple[str, ...]:
        """Returns those axes of the mesh in force that split rows."""
        return tuple(axis for axis in self.data_axes if _here(axis) is not None)


def on_gpu() -> bool:
    """Returns whether programs are for GPUs: those of the mesh in force, or of the default backend without a mesh."""
    mesh = current_mesh()
    return chip_family(mesh) == "gpu" if mesh is not None else jax.default_backend() == "gpu"


def _here(axis: str | None) -> str | None:
    mesh = current_mesh()
    return axis if mesh is not None and axis in mesh.axis_names else None


def remat_policy(remat: Remat | None, *, by_name: bool = True) -> Callable[..., Any] | None:
    """Returns the `jax.checkpoint` policy of a name, which says what is kept; None where everything is.

    `by_name`: results of matmuls are known by the name that our models give them. A matmul cut into the pieces of a
    ring would otherwise be kept piece by piece and whole.

    Example:
        >>> remat_policy("none") is None, callable(remat_policy("dots"))
        (True, True)
    """
    if callable(remat):
        return remat
    policies, names, to_host = jax.checkpoint_policies, [PROJECTION, GATHERED_ROWS], ("device", "pinned_host")
    dots, offload = policies.dots_with_no_batch_dims_saveable, policies.offload_dot_with_no_batch_dims(*to_host)
    if by_name:
        dots = policies.save_only_these_names(*names)
        offload = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=names,
            offload_src=to_host[0],
            offload_dst=to_host[1],
        )
    known: dict[Any, Callable[..., Any] | None]
    known = {"none": None, "dots": dots, "full": policies.nothing_saveable, "offload": offload}
    if remat is None:
        return None
    if remat not in known:
        hint = did_you_mean(str(remat), known) or f"use one of: {', '.join(known)}, or a jax.checkpoint policy."
        raise MeshwrightError(f"there is no remat policy {remat!r}.", hint=hint)
    return known[remat]
