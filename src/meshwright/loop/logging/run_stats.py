"""Statistics of a run (parameters, FLOPs, learning rates) and the metadata saved with it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshwright.checkpoint.manifest import current_versions, model_fact
from meshwright.hardware.chips import chip_of
from meshwright.hardware.flops import count_flops
from meshwright.loop.text_source import MixedSource
from meshwright.rng import abstract_key
from meshwright.train.job import abstract_init, traceable_loss

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup


def run_facts(run: RunSetup, flops: float | None) -> dict[str, Any]:
    """Returns the contents of `run.json`; `flops` are per step."""
    devices, tokens, peak = jax.devices(), tokens_per_step(run), peak_flops(run)
    return {
        "config": run.config.flat(),
        "mesh": dict(run.layout.mesh.shape),
        "mesh_reason": run.choice.reason,
        "layout": json.loads(run.layout.to_json()),
        "devices": [device.device_kind for device in devices],
        "device_kind": devices[0].device_kind,
        "num_processes": jax.process_count(),
        "versions": current_versions(),
        "num_params": num_params(run.job),
        "flops_per_token": None if flops is None or not tokens else flops / tokens,
        "peak_flops": None if peak is None else peak / len(devices),
        "tokens_per_step": tokens,
        "mixture": run.source.described() if isinstance(run.source, MixedSource) else None,
    }


def checkpoint_facts(run: RunSetup) -> dict[str, Any]:
    """Returns the metadata of a checkpoint, except for the position in the data."""
    model = model_fact(run.model) if run.model is not None else run.config.model.job
    adapters = getattr(run.job, "lora", None)
    lora = {} if adapters is None else {"lora": dataclasses.asdict(adapters)}
    origin = {} if run.origin is None or run.origin.pretrained is None else {"pretrained": run.origin.pretrained}
    return {"config": run.config.flat(), "model": model, "precision": run.precision, **lora, **origin}


def num_params(job: Any) -> int:
    """Returns the number of parameters of a job, without computing anything."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_init(job.init)))


def flops_per_step(run: RunSetup) -> float | None:
    """Returns the FLOPs of the forward and backward pass without remat, or None if MFU cannot be computed."""
    if peak_flops(run) is None:
        return None

    def loss(params: Any, batch: Any, key: Any) -> Any:
        value = traceable_loss(run.job)(params, batch, key)[0]
        return value[0] if isinstance(value, tuple) else value

    key = abstract_key()
    try:
        counted = count_flops(jax.grad(loss), abstract_init(run.job.init), run.job.batch, key)
    except Exception as error:  # some losses only work on their mesh; MFU is not worth failing the run
        run.tell(f"MFU is not shown: could not count FLOPs: {type(error).__name__}: {error}")
        return None
    return float(counted.model) or None


def peak_flops(run: RunSetup) -> float | None:
    """Returns the peak FLOP/s of all devices together, or None for an unknown chip."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return None
    peak = chip.peak("float32" if run.precision == "float32" else "bfloat16")
    return None if peak is None else peak * run.layout.mesh.size


def tokens_per_step(run: RunSetup) -> int | None:
    """Returns the number of tokens per batch, or None if batches are not text."""
    return int(np.prod(run.job.batch["inputs"].shape)) if run.source.counts_tokens else None
