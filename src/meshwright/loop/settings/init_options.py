"""The options of `meshwright train` that start a run from the weights of another model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class InitOptions:
    """Initial weights."""

    init_from: str | None = None
    """Start from these weights: the path or URL of a Hugging Face model folder, or of a run, its checkpoints folder, or
    one step (default: random weights)."""
    init_adapters: str | None = None
    """Also start from these LoRA adapters of --init-from: a PEFT folder; it sets --lora (default: no adapters)."""
    init_step: int | None = None
    """Step of the run in --init-from (default: the last good one)."""
    init_part: Literal["params", "all"] = "params"
    """Part of a run to start from: params, or all (also optimizer state, step and random key; data starts anew)."""
    init_missing: Literal["refuse", "random"] = "refuse"
    """Parameters that --init-from lacks: refuse, or keep random values."""
    init_extra: Literal["refuse", "drop"] = "refuse"
    """Parameters that only --init-from has: refuse, or drop them."""
    init_shape: Literal["refuse", "random"] = "refuse"
    """Parameters with another shape in --init-from: refuse, or keep random values. A smaller vocabulary is padded with
    zeros in any case."""
    init_ignore: tuple[str, ...] = ()
    """Fields of config.json that are not supported but do not change the logits."""
