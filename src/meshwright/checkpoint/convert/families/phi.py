"""Phi 3 and 4: fused projections, partial rotary positions, longrope."""

from typing import Any

from meshwright.checkpoint.convert.family import FUSED, NAMES, Family
from meshwright.checkpoint.convert.layer_types import window_everywhere, write_window
from meshwright.models import Decoder
from meshwright.models.rope import parse_scaling


def _write(model: Decoder) -> dict[str, Any]:
    kind, values = parse_scaling(model.rope_scaling) if model.rope_scaling else ("default", {})
    # Phi's own field overrides the one of the scaling.
    original = {"original_max_position_embeddings": int(values["original"])} if kind == "longrope" else {}
    return write_window(model) | original


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    only={},
    names=NAMES | FUSED,
    read_kinds=window_everywhere(None),
    write_kinds=_write,
    rope_kinds=("longrope",),
    partial_rotary=True,
    eps=1e-5,
)
