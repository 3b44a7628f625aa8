"""Named sets of options for `meshwright train --preset NAME`."""

from __future__ import annotations

from typing import Any

from meshwright.errors import ConfigError, did_you_mean
from meshwright.loop.settings.config import TrainConfig

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "smoke": {
        "model": "decoder-tiny",
        "steps": 20,
        "batch_size": 8,
        "num_tokens": 64,
        "warmup": 5,
        "checkpoint_every": 10,
        "eval_every": 10,
        "eval_batches": 1,
        "sample_tokens": 16,
    },
    "xlstm-small": {"model": "xlstm-small"},
    "decoder-125m": {
        "model": "decoder-125m",
        "batch_size": 64,
        "num_tokens": 1024,
        "steps": 20_000,
        "learning_rate": 6e-4,
        "warmup": 1000,
        "checkpoint_every": 1000,
        "eval_every": 500,
        "eval_batches": 16,
    },
    "decoder-1b": {
        "model": "decoder-1b",
        "batch_size": 256,
        "num_tokens": 4096,
        "steps": 50_000,
        "learning_rate": 3e-4,
        "warmup": 2000,
        "remat": "dots",
        "checkpoint_every": 1000,
        "eval_every": 1000,
        "eval_batches": 16,
    },
}
"""Named sets of options for `meshwright train --preset NAME`."""


def preset(name: str) -> TrainConfig:
    """Returns the configuration of a preset.

    Example:
        >>> preset("smoke").run.steps
        20
    """
    return TrainConfig().changed(preset_options(name))


def preset_options(name: str) -> dict[str, Any]:
    """Returns the options that a preset sets."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"use one of: {', '.join(PRESETS)}."
        raise ConfigError(f"there is no preset {name!r}.", hint=hint)
    return PRESETS[name]
