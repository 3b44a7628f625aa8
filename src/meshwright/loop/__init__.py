"""The training loop: a run from its configuration to its report."""

from __future__ import annotations

from meshwright.lazy import lazy_names
from meshwright.loop.fit import Loop, Result, fit
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.loop.settings.presets import PRESETS, preset

_WHERE = {
    "train": "run",
    "build_report": "report",
    "Callback": "callbacks",
    "StepRecord": "callbacks",
    "StepLog": "logging.step_log",
    "SkippedSteps": "callbacks",
    "Evaluation": "callbacks",
    "Checkpointing": "callbacks",
    "choose_mesh": "settings.choices",
    "MeshChoice": "settings.choices",
    "make_model": "settings.choices",
    "make_optimizer": "settings.optimizers",
    "RunLog": "logging.run_log",
    "Progress": "logging.progress",
    "Preemption": "safety.preemption",
    "Watchdog": "safety.watchdog",
    "EarlyStop": "safety.early_stop",
    "SpikeGuard": "safety.spike",
    "Rollback": "safety.spike",
    "StepProfiler": "logging.profiler",
    "open_run": "results.saved_run",
    "SavedRun": "results.saved_run",
    "harness_model": "results.lm_eval_adapter",
    "Memory": "logging.memory_use",
    "read_memory": "logging.memory_use",
}

__all__ = ["PRESETS", "TrainConfig", "preset", "read_config", "fit", "Loop", "Result", *_WHERE]

# Import lazily, so that reading a configuration does not import Orbax and Grain.
__getattr__ = lazy_names(__name__, {name: f"meshwright.loop.{module}" for name, module in _WHERE.items()})
