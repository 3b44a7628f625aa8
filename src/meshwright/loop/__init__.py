"""What happens around the step: a run from its configuration to its report."""

from __future__ import annotations

import importlib
from typing import Any

from meshwright.loop.config import PRESETS, TrainConfig, preset, read_config

_WHERE = {
    "train": "run",
    "build_report": "report",
    "fit": "loop",
    "Loop": "loop",
    "Result": "loop",
    "choose_mesh": "mesh_choice",
    "MeshChoice": "mesh_choice",
    "make_model": "models",
    "make_optimizer": "optimizers",
    "RunLog": "log",
    "Progress": "progress",
    "Preemption": "preemption",
    "Watchdog": "watchdog",
    "SpikeGuard": "spike",
    "Profile": "profile",
    "make_sampler": "sample",
    "Memory": "memory",
    "read_memory": "memory",
}

__all__ = ["PRESETS", "TrainConfig", "preset", "read_config", *_WHERE]


def __getattr__(name: str) -> Any:
    # Late, so that a configuration can be read without Orbax and Grain.
    if name in _WHERE:
        return getattr(importlib.import_module(f"meshwright.loop.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
