"""Memory of weights in fp8: cast once for all minibatches, or where they are used and kept for the backward pass."""

from __future__ import annotations

from meshwright.hardware.chips import is_hopper_kind
from meshwright.layout import Layout
from meshwright.parallel.kernels.cast_kernel import can_cast
from meshwright.plan.costs.communication import local_size, param_leaves
from meshwright.plan.costs.job_costs import GATHER_AXIS, PIPELINE_AXIS, JobCosts
from meshwright.plan.step_setup import Setup
from meshwright.plan.target import Target
from meshwright.specs import spec_axes

FP8_COPIES = "fp8 weights"
"""Name of the part of memory."""


def cast_once(profile: JobCosts, layout: Layout, setup: Setup) -> frozenset[str]:
    """Returns the names of the weights that are cast to fp8 before the minibatches."""
    has_stages = layout.mesh.shape.get(PIPELINE_AXIS, 1) > 1
    return profile.fp8_weights if setup.num_minibatches > 1 and not has_stages else frozenset()


def kept_for_backward(profile: JobCosts, layout: Layout, setup: Setup) -> frozenset[str]:
    """Returns the names of the weights that unrolled layers cast where they use them.

    The gradient of their input reads the cast, one byte per element, so nothing reads a copy in the compute dtype after
    the cast. A loop over layers and layers that are recomputed read such copies again; gathered weights are cast again.
    """
    sizes = dict(layout.mesh.shape)
    is_apart = not profile.in_loop(setup, sizes) and sizes.get(PIPELINE_AXIS, 1) == 1
    once = setup.remat == "none" and setup.num_minibatches == 1
    return profile.fp8_weights if profile.keeps_fp8 and is_apart and once else frozenset()


def fp8_copies(profile: JobCosts, layout: Layout, target: Target, setup: Setup) -> float:
    """Returns the bytes of the copies that live over the whole step: one per element, two with a transpose.

    Hopper's kernel transposes weights that no axis splits. With `sync="once"`, gathered copies count as gathered
    weights instead.
    """
    sizes, names, total = dict(layout.mesh.shape), cast_once(profile, layout, setup), 0.0
    has_kernels = is_hopper_kind(target.kind.upper()) and (profile.view == "local" or layout.mesh.size == 1)
    for leaf in param_leaves(layout):
        if leaf.name.removeprefix("params/") not in names:
            continue
        if setup.sync == "once" and GATHER_AXIS in spec_axes(leaf.spec) and sizes.get(GATHER_AXIS, 1) > 1:
            continue
        turns = has_kernels and leaf.is_replicated and can_cast(leaf.shape[-2:])
        total += local_size(leaf) * (2 if turns else 1)
    return total
