"""The local view: parallel operations on plain arrays, for use inside `shard_map`."""

from meshwright.mesh.axes import axis_index, axis_size, is_manual, pcast_varying, varying_axes, view_of
from meshwright.parallel.cross_entropy import linear_cross_entropy
from meshwright.parallel.dropout import dropout
from meshwright.parallel.fp8.weight import Amaxes, CastWeight, Fp8Weight
from meshwright.parallel.fsdp import Gather, gather_array, gather_tree
from meshwright.parallel.heads import local_heads, split_heads
from meshwright.parallel.local_map import island, local_map
from meshwright.parallel.logit_chunks import LossSums
from meshwright.parallel.overlap.collective_matmul import gather_matmul, matmul_scatter
from meshwright.parallel.overlap.forms import Form, overlap_options
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.pipeline.named_schedules import make_schedule, place_orders
from meshwright.parallel.pipeline.schedule import (
    Schedule,
    circular_schedule,
    gpipe_schedule,
    stage_layers,
    unstage_layers,
)
from meshwright.parallel.pipeline.training_engine import pipeline_loss
from meshwright.parallel.pipeline.training_schedule import Cell, TrainingSchedule, Work
from meshwright.parallel.row_keys import row_key, row_keys
from meshwright.parallel.tensor import column_dense, fused_column_dense, row_dense, sequence_norm, split_norm
from meshwright.parallel.vocabulary import vocab_cross_entropy, vocab_embed

__all__ = [
    "Amaxes",
    "CastWeight",
    "Form",
    "Fp8Weight",
    "Gather",
    "axis_size",
    "gather_array",
    "gather_tree",
    "gather_matmul",
    "is_manual",
    "local_map",
    "matmul_scatter",
    "axis_index",
    "split_heads",
    "pcast_varying",
    "varying_axes",
    "Cell",
    "Schedule",
    "TrainingSchedule",
    "Work",
    "circular_schedule",
    "dropout",
    "gpipe_schedule",
    "make_schedule",
    "pipeline",
    "pipeline_loss",
    "place_orders",
    "row_key",
    "row_keys",
    "stage_layers",
    "unstage_layers",
    "column_dense",
    "fused_column_dense",
    "island",
    "overlap_options",
    "linear_cross_entropy",
    "local_heads",
    "LossSums",
    "row_dense",
    "sequence_norm",
    "split_norm",
    "view_of",
    "vocab_cross_entropy",
    "vocab_embed",
]
