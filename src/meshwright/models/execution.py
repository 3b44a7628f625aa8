"""Execution options of a model: mesh axes, loops over layers, kernels and rematerialization.

These options do not change the function. One `Execution` works on every mesh; axes that a mesh lacks are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import is_manual, ways_along
from meshwright.mesh.current import current_mesh
from meshwright.parallel.overlap.collective_matmul import GATHERED_ROWS
from meshwright.parallel.pipeline.named_schedules import ScheduleName, check_count, check_rounds

Layers = Literal["auto", "scan", "unroll"] | int
Remat = Literal["none", "dots", "full", "offload"] | Callable[..., Any]

DATA_AXES = ("dp", "fsdp")
"""Default axes that split the rows of a batch."""

PROJECTION = "projection"
"""The `checkpoint_name` of matmul results, which `remat="dots"` keeps."""


@dataclass(frozen=True)
class Execution:
    """Execution options of a `LanguageModel` on a mesh.

    Args:
        tensor_axis: the axis that splits heads, features and vocabulary, with overlapped matmuls. None leaves them to
            XLA, in the global view.
        data_axes: the axes that split the rows of a batch.
        pipeline_axis: the axis that splits layers into stages (local view) or only their storage (global view).
        sequence_parallel: whether to split the sequence over `tensor_axis` between blocks.
        save_gathered: whether to keep the rows gathered for a matmul for its weight gradient. Saves a fifth of the
            communication along `tensor_axis` for more memory (with `remat="full"`, that of one layer).
        prefetch: whether to gather the next layer's weights while a layer computes, if layers are scanned.
        layers: "scan" compiles one layer, "unroll" compiles all of them, a number that many per loop step. "auto" picks
            the fastest form measured on the backend (benchmarks/results/decoder_h200.md).
        num_microbatches: number of microbatches in a pipeline (default: twice the number of stages).
        pipeline: the schedule of a pipeline: "gpipe", "circular", "1f1b", "aligned-1f1b", "interleaved-1f1b",
            "zb-h1" or "zb-v"; see
            `meshwright.parallel.make_schedule`. All but "gpipe" follow `remat`: with "full", the backward pass of a
            stage starts from its input, otherwise forward passes save activations for at most as many microbatches
            as the schedule says. "gpipe" always starts from the inputs.
        pipeline_rounds: stages per device with "circular" or "interleaved-1f1b" (default: 2).
        attention: implementation of attention, "xla", "cudnn" or "splash" (default: chosen by
            `meshwright.models.attention`).
        max_segments: the largest number of documents in a row; allows the fast path for packed rows on GPUs.
        kernels: whether to use Pallas kernels to save passes over memory: gradients of norms, stacked layers and the
            loss's softmax, slices of weights whose products are scattered in parts, matmuls of gathered rows, and the
            mLSTM with the norm and gate of its heads. The default uses them on Hopper GPUs with jax 0.11 or newer if
            the program sees local arrays. False leaves all to XLA. True uses them also on one CPU device (interpreted
            and slow), and raises on devices that cannot run them. XLA computes shapes that a kernel does not take, such
            as norms of over 4096 features.
    """

    tensor_axis: str | None = "tp"
    data_axes: tuple[str, ...] = DATA_AXES
    pipeline_axis: str | None = "pp"
    sequence_parallel: bool = True
    save_gathered: bool = False
    prefetch: bool = True
    layers: Layers = "auto"
    num_microbatches: int | None = None
    pipeline: ScheduleName = "gpipe"
    pipeline_rounds: int | None = None
    attention: Literal["xla", "cudnn", "splash"] | None = None
    max_segments: int | None = None
    kernels: bool | None = None

    def __post_init__(self) -> None:
        check_rounds(self.pipeline, self.pipeline_rounds)
        if self.num_microbatches is not None:
            check_count(self.num_microbatches, "microbatches")

    def tensor(self) -> str | None:
        """Returns the tensor axis if the current mesh has it."""
        return _here(self.tensor_axis)

    def stages(self) -> str | None:
        """Returns the pipeline axis if layers are split over it in the local view."""
        axis = _here(self.pipeline_axis)
        return axis if axis is not None and is_manual(axis) else None

    def stores_along(self) -> str | None:
        """Returns the pipeline axis if it splits only the storage of parameters, in the global view."""
        axis = _here(self.pipeline_axis or "pp")  # that of the models' rules
        return axis if axis is not None and not is_manual(axis) and ways_along(axis, who="Execution") > 1 else None

    def rows(self) -> tuple[str, ...]:
        """Returns the data axes that the current mesh has."""
        return tuple(axis for axis in self.data_axes if _here(axis) is not None)


def on_gpu() -> bool:
    """Whether programs run on GPUs: those of the current mesh or, without a mesh, of the default backend."""
    mesh = current_mesh()
    return chip_family(mesh) == "gpu" if mesh is not None else jax.default_backend() == "gpu"


def _here(axis: str | None) -> str | None:
    mesh = current_mesh()
    return axis if mesh is not None and axis in mesh.axis_names else None


def recomputes_stages(remat: Remat | None) -> bool:
    """Returns whether backward passes of a scheduled pipeline start from the inputs of stages; see `Execution`."""
    if remat == "offload":
        raise MeshwrightError(
            'remat="offload" does not work with a pipeline schedule other than "gpipe".', hint='use "full" or "dots".'
        )
    return remat == "full"


def remat_policy(remat: Remat | None, *, by_name: bool = True) -> Callable[..., Any] | None:
    """Returns the `jax.checkpoint` policy with this name, or None if everything is saved.

    Args:
        remat: "none", "dots", "full", "offload", or a policy.
        by_name: whether to recognize matmul results by the name that `LanguageModel` gives them, instead of by their
            primitive, which would save an overlapped matmul both in pieces and whole.

    Example:
        >>> remat_policy("none") is None, callable(remat_policy("dots"))
        (True, True)
    """
    if remat is None:
        return None
    if callable(remat):
        return functools.partial(_all_but_fp8, remat)
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
    if remat not in known:
        hint = did_you_mean(str(remat), known) or f"use one of: {', '.join(known)}, or a jax.checkpoint policy."
        raise MeshwrightError(f"unknown remat policy {remat!r}.", hint=hint)
    return known[remat]


def _all_but_fp8(policy: Callable[..., Any], primitive: Any, *avals: Any, **params: Any) -> Any:
    """Follows a policy, except that values in fp8 are recomputed.

    JAX rounds residuals that a policy saves with `reduce_precision`, which has no e4m3fn: it turns values above 240, of
    448, into infinities.
    """
    made = params.get("new_dtype") or params.get("out_avals")
    if made is None and primitive.name != "dot_general":  # most operations keep the dtype of their inputs
        made = (*avals, *(var.aval for var in getattr(params.get("jaxpr"), "invars", ())))
    is_fp8 = any(name in str(made) for name in ("float8_", "f8_"))
    return False if is_fp8 else policy(primitive, *avals, **params)
