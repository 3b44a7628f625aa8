"""FLOPs and matmuls of a step on all devices, with those that a pipeline's stages compute twice or ignore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.hardware.flops import Flops
from meshwright.plan.costs.job_costs import PIPELINE_AXIS, JobCosts, each_count
from meshwright.plan.costs.stages import Stages
from meshwright.plan.step_setup import Setup


def step_flops(
    profile: JobCosts, stages: Stages, setup: Setup, sizes: Mapping[str, int], *, rows: int
) -> tuple[Flops, tuple[str, ...]]:
    """Returns the FLOPs of a step over all devices, and notes on what they assume of its pipeline."""
    flops = each_count(lambda count: count * rows, profile.needs[setup.remat].flops)
    notes: tuple[str, ...] = ()
    if stages.count > 1 and not stages.is_scheduled:  # every backward tick recomputes its forward pass
        forward = each_count(lambda count: count * rows, profile.forward)
        flops = replace(
            each_count(int.__add__, flops, forward),
            recomputed=flops.recomputed + forward.matmul,
            masked=flops.masked,
        )
    if sizes.get(PIPELINE_AXIS, 1) > max(1, stages.count):
        flops, words = _without_schedule(flops, profile, sizes)
        notes += (words,)
    if stages.extra > 1:
        flops = _with_ignored_layers(flops, head_flops(profile, stages, rows * profile.tokens_per_row), stages)
        notes += (
            f"{profile.num_layers} layers in {stages.count} x {stages.rounds} pipeline stages of different lengths: "
            f"devices compute as many as in {stages.count * stages.computed_layers}",
        )
    return flops, notes


def head_flops(profile: JobCosts, stages: Stages, tokens: int) -> int:
    """Returns the FLOPs of the head in a pipeline: its matmul, twice with "gpipe", and two for gradients."""
    matmuls = 3 if stages.is_scheduled else 4
    return matmuls * 2 * (profile.vocab_size or 0) * (profile.d_model or 0) * tokens


def count_device_matmuls(profile: JobCosts, stages: Stages, setup: Setup, *, ways: int) -> int:
    """Returns how many matmuls a device runs in a step: all of each minibatch, or its layers of each microbatch."""
    again = profile.forward_matmuls if stages.count > 1 and not stages.is_scheduled else 0
    each = profile.needs[setup.remat].num_matmuls + again
    return round(each * setup.num_minibatches * stages.microbatches * stages.extra / ways)


def _without_schedule(flops: Flops, profile: JobCosts, sizes: Mapping[str, int]) -> tuple[Flops, str]:
    """Returns the FLOPs on all devices if the plan knows no schedule of a pipeline, and what it assumes instead."""
    if profile.ways(sizes) > 1:
        return flops, (
            f"custom model: its stages along {PIPELINE_AXIS} are assumed to be always busy, to compute nothing twice "
            "and to keep the activations of all microbatches"
        )
    more = each_count(lambda count: count * sizes[PIPELINE_AXIS], flops)
    more = replace(more, recomputed=more.matmul - flops.matmul + flops.recomputed, masked=flops.masked)
    return more, (
        f"the loss runs no stages along {PIPELINE_AXIS} in the {profile.view} view, so each device along it is assumed "
        "to gather and compute all layers"
    )


def _with_ignored_layers(flops: Flops, head: int, stages: Stages) -> Flops:
    """Adds the layers that shorter stages compute and ignore; like recomputed matmuls, the model does not need them.

    Args:
        head: FLOPs of the head, which runs once per step whatever the stages.
    """
    factor = 1 + (stages.extra - 1) * max(0.0, 1 - head / flops.matmul)
    more = each_count(lambda count: round(count * factor), flops)
    attention, model = round(flops.attention * stages.extra), flops.matmul - flops.recomputed
    masked = flops.masked
    return replace(more, attention=attention, recomputed=more.matmul - model, masked=masked)
