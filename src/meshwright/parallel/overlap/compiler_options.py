"""What to ask of XLA so that whole collectives, FSDP's gathers and scatters, run beside matmuls: a table by chip.

Rings hide what they move by their own form (`overlap_forms`). A gather of a layer's weights is one instruction, and
only the compiler can make it asynchronous. Its defaults do that on GPUs, and not on TPUs. Read off a compiled train
step of a 7B decoder on 64 chips (benchmarks/RESULTS.md); no such machine was timed.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh

from meshwright.mesh.build import AnyMesh
from meshwright.parallel.overlap.forms import chip_family

# SparseCores carry collectives while the matmul units work. By default all of a v5p's and a v6e's are synchronous, and
# a reduce-scatter over a whole slice becomes an all-reduce, of twice the bytes. Async collective fusion, the other
# way, hid half of a v5p's gathers and left the all-reduces.
_SPARSE_CORE: dict[str, Any] = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "true",
    "xla_tpu_sparse_core_reduce_scatter_offload_min_size_in_bytes": "0",
}
# A layer's weights in one gather, which starts a layer ahead: of seven, three were left exposed.
_COMBINED: dict[str, Any] = {"xla_gpu_all_gather_combine_threshold_bytes": 2**30}
# Where layers are written out, XLA combines the gradients of all of them, and scatters them when all is done: so these
# go one by one. In a loop, one scatter for each layer hides more (89% of all bytes for 85%, with fsdp:8,tp:8).
_ONE_BY_ONE: dict[str, Any] = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20}

OPTIONS: dict[str, dict[str, Any]] = {"v5p": _SPARSE_CORE, "v6e": _SPARSE_CORE, "gpu": _COMBINED}
OPTIONS_WRITTEN_OUT: dict[str, dict[str, Any]] = {"gpu": _ONE_BY_ONE}


def overlap_options(mesh: AnyMesh, *, written_out: bool = False) -> dict[str, Any]:
    """Returns `compiler_options` for `make_train_step` that hide collectives on the chips of a mesh; often none.

    `written_out`: layers are not in a loop (`Execution(layers="unroll")`).

    They are names of one compiler version (jax 0.10 with libtpu 0.0.42; jax 0.10 to 0.12 on GPUs): another may refuse
    one of them, with an error that names it.

    Example:
        >>> import meshwright as mw
        >>> overlap_options(mw.create_mesh("fsdp:8"))
        {}
    """
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
        chip = chip_family()
    return OPTIONS.get(chip, {}) | (OPTIONS_WRITTEN_OUT.get(chip, {}) if written_out else {})
