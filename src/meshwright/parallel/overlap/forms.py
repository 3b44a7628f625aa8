"""Forms of the overlapped matmuls and compiler options that hide communication, by chip.

Each form was chosen by compiling [16384, 8192] @ [8192, 28672] in bfloat16 ahead of time (see
benchmarks/results/overlap.md) and reading the hidden hops, the compiler's compute estimate relative to the unsplit
form, and temporary memory. Forms that look equivalent can differ completely in how the compiler schedules them, hence
the table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import PlacementError, did_you_mean
from meshwright.hardware.chips import chip_family
from meshwright.mesh.current import AnyMesh, current_mesh

Operation = Literal["gather_matmul", "matmul_scatter", "gather_matmul_grad", "matmul_scatter_grad"]
Tie = Literal["none", "next", "between", "slice", "late_slice", "operand", "product"]


@dataclass(frozen=True)
class Form:
    """How shards travel in an overlapped matmul, and which barriers keep the compiler from undoing it.

    Args:
        ring: if False, use one collective and one matmul, or with `parts`, several of both.
        both_ways: send half of each shard up and half down, to use both directions of each link.
        tie: the values that pass one optimization barrier at each step; see `ring_loops`.
        parts: without a ring, the relative sizes of the parts, smallest first. A gather starts with the smallest part
            and a scatter ends with it; that transfer is not hidden. See `collective_parts`.
    """

    ring: bool = True
    both_ways: bool = False
    tie: Tie = "none"
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        of_a_ring = self.ring or self.both_ways or self.tie != "none"
        if self.parts and (of_a_ring or min(self.parts) < 1):
            raise PlacementError(
                f"{self}: parts must be positive and need ring=False without both_ways and tie.",
                hint="use e.g. Form(ring=False, parts=(1, 2, 4, 7)).",
            )


WHOLE = Form(ring=False)
PARTS = Form(ring=False, parts=(1, 2, 4, 7))

_V5E: dict[Operation, Form] = {
    # 30/30 hidden, compute 1.03, 0 MiB. Untied it is the same alone, but in a scan of layers 9 of its hops run ahead.
    "gather_matmul": Form(both_ways=True, tie="between"),
    "matmul_scatter": Form(both_ways=True, tie="operand"),  # 30/30, 1.10, 0 MiB
    "gather_matmul_grad": Form(both_ways=True, tie="operand"),  # 60/60, 1.08, 274 MiB (unsplit 512)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 30/30, 1.06, 257 MiB (unsplit 256)
}
_V5P: dict[Operation, Form] = {
    "gather_matmul": Form(both_ways=True, tie="between"),  # 14/14, 1.03, 72 MiB (unsplit 256)
    "matmul_scatter": Form(both_ways=True, tie="late_slice"),  # 14/14, 1.01, 48 MiB (unsplit 256)
    "gather_matmul_grad": Form(both_ways=True, tie="late_slice"),  # 28/28, 1.01, 401 MiB (unsplit 256)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 14/14, 0.99, 321 MiB (unsplit 256)
}
_V6E: dict[Operation, Form] = {
    "gather_matmul": Form(both_ways=True, tie="between"),  # 30/30, 1.02, 0 MiB
    "matmul_scatter": Form(both_ways=True, tie="slice"),  # 30/30, 1.06, 0 MiB
    "gather_matmul_grad": Form(both_ways=True, tie="slice"),  # 60/60, 1.06, 353 MiB (unsplit 256)
    "matmul_scatter_grad": Form(both_ways=True, tie="next"),  # 30/30, 1.28, 289 MiB (unsplit 256)
}
_GPU: dict[Operation, Form] = {  # 8 x H200
    "gather_matmul": Form(tie="next"),  # 7/7, 78 MiB (unsplit 256)
    "matmul_scatter": Form(tie="product"),  # 7/7, 78 MiB (unsplit 256)
    # Its two transfers hide behind its two matmuls as they are (2/2). The ring would need two hops in flight at once,
    # and XLA runs one collective at a time on a GPU (8/14).
    "gather_matmul_grad": WHOLE,
    "matmul_scatter_grad": Form(tie="next"),  # 7/7, 302 MiB (unsplit 256, 0/1)
}
# In a `jit` program with further axes: XLA would gather over those too, before a collective that is not a hop.
_GPU_ISLAND: dict[Operation, Form] = _GPU | {"gather_matmul_grad": Form(tie="product")}
# On GPUs, whole collectives in parts do better than the rings above from so many devices and so many features per
# device on (a row that is gathered meets that many columns, one that is scattered was that long); the first that fits
# counts. What they are chosen by is compute, measured on one H200, plus the transfers that are not hidden, at 370 GB/s
# for a collective, and less for a hop of a ring: benchmarks/results/collective_matmul.md has both. Where a transfer
# takes as long as its matmul, parts are even. Narrower than any measured, all stay rings: in a 7B with tp:8, parts hid
# 84% of bytes for 89%.
GPU_PARTS: dict[Operation, list[tuple[int, int, Form]]] = {
    "gather_matmul": [
        (8, 3584, PARTS),  # 3/4, 218 MiB, or 240 where no kernel writes its products (unsplit 256)
        (8, 1728, Form(ring=False, parts=(1,) * 6)),  # all but one; the narrowest that was measured
    ],
    "matmul_scatter": [
        (4, 3072, PARTS),  # 3/4, 244 MiB, or 216 where XLA cuts the weight (unsplit 256)
        (4, 1728, Form(ring=False, parts=(1,) * 4)),  # 3/4; the narrowest that was measured
    ],
}
# No links to hide: the plain ring, which is what tests compare with everything else.
_CPU: dict[Operation, Form] = dict.fromkeys(_V5E, Form())

FORMS: dict[str, dict[Operation, Form]] = {"v5e": _V5E, "v5p": _V5P, "v6e": _V6E, "gpu": _GPU, "cpu": _CPU}

_NAMED = {"ring": Form(), "both_ways": Form(both_ways=True), "parts": PARTS, "whole": WHOLE}


_in_branch: ContextVar[bool] = ContextVar("in_branch", default=False)


@contextlib.contextmanager
def branch() -> Iterator[None]:
    """Marks traced code that only some devices run, such as a pipeline stage.

    There, a ring would hang on XLA's CPU backend, where every hop waits for all devices of the program. Grouped
    collectives wait only for their group.
    """
    token = _in_branch.set(True)
    try:
        yield
    finally:
        _in_branch.reset(token)


def choose_form(operation: Operation, form: Form | str | None, *, axis_size: int, width: int) -> Form:
    """Returns the caller's form, or the table's entry for this chip.

    Args:
        width: features on one device that each gathered row is multiplied by, or each scattered row is summed over.
    """
    if isinstance(form, str):
        if form not in _NAMED:
            hint = did_you_mean(form, _NAMED) or f"use one of: {', '.join(_NAMED)}, or a Form."
            raise PlacementError(f"{operation}: unknown form {form!r}.", hint=hint)
        return _NAMED[form]
    if form is not None:
        return form
    family = chip_family(current_mesh())
    if family == "cpu" and _in_branch.get():
        return WHOLE
    if family == "gpu":
        mesh = current_mesh()
        if mesh is not None and any(size > 1 and axis not in mesh.manual_axes for axis, size in mesh.shape.items()):
            return _GPU_ISLAND[operation]
        for least_size, least_width, parts in GPU_PARTS.get(operation, []):
            if axis_size >= least_size and width >= least_width:
                return parts
    return FORMS[family][operation]


# --- Whole collectives ---

# An all-gather of a layer's weights (FSDP) is one instruction, and only the compiler can make it asynchronous. By
# default it does so on GPUs but not on TPUs. These options were chosen on a 7B decoder's train step, compiled for 64
# chips (benchmarks/results/train_step_aot.md); none was timed on hardware.

# SparseCores run collectives during matmuls. By default, collectives on v5p and v6e are synchronous, and a
# reduce-scatter over a whole slice becomes an all-reduce of twice the bytes. The alternative, async collective fusion,
# hid half of the all-gathers on v5p and kept the all-reduces.
_SPARSE_CORE: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_sparse_core_reduce_scatter_offload_min_size_in_bytes": "0",
}
# Gather a layer's weights at once, one layer ahead; as seven all-gathers, three were exposed.
_COMBINED: dict[str, Any] = {"xla_gpu_all_gather_combine_threshold_bytes": 2**30}
# With unrolled layers, XLA would combine the gradients of all layers and scatter them at the end, so scatter them one
# by one. In a loop, one scatter per layer hides more (89% of all bytes instead of 85%, with fsdp:8,tp:8).
_ONE_BY_ONE: dict[str, Any] = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20}

OPTIONS: dict[str, dict[str, Any]] = {"v5p": _SPARSE_CORE, "v6e": _SPARSE_CORE, "gpu": _COMBINED}
OPTIONS_WRITTEN_OUT: dict[str, dict[str, Any]] = {"gpu": _ONE_BY_ONE}


def overlap_options(mesh: AnyMesh, *, written_out: bool = False) -> dict[str, Any]:
    """Returns `compiler_options` for `make_train_step` that hide collectives on a mesh's chips; often empty.

    The options belong to certain compilers (jax 0.10 with libtpu 0.0.42; jax 0.10 to 0.12 on GPUs). Another version may
    reject one, with an error that names it.

    Args:
        written_out: set this if layers are unrolled (`Execution(layers="unroll")`).

    Example:
        >>> import meshwright as mw
        >>> overlap_options(mw.create_mesh("fsdp:8"))
        {}
    """
    chip = chip_family(mesh)
    return OPTIONS.get(chip, {}) | (OPTIONS_WRITTEN_OUT.get(chip, {}) if written_out else {})
