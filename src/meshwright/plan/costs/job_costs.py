"""Profile of a job: FLOPs and saved activations per row, counted by tracing.

The loss and its gradient are traced for one device and a few rows, without allocating arrays. Costs grow linearly with
the rows, apart from a fixed part.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.hardware.flops import Flops, count_jaxpr, count_matmuls
from meshwright.models.execution import Execution
from meshwright.parallel.lora.low_rank import BASE, LORA_A
from meshwright.parallel.pipeline.named_schedules import check_rounds
from meshwright.parallel.rows import count_rows
from meshwright.plan.costs.fp8.fp8_activations import needs_in_fp8
from meshwright.plan.costs.fp8.fp8_work import Fp8Matrices, fp8_matrices
from meshwright.plan.costs.saved_activations import REST, bytes_kept
from meshwright.plan.costs.stages import Stages
from meshwright.plan.costs.traced_loss import TRACED_ROWS, narrow_params, planned_loss, traced_for, waiting_of
from meshwright.plan.step_setup import Setup, batch_of, named_optimizer
from meshwright.rng import abstract_key
from meshwright.train.fine_tuning.lora import MergedFunction
from meshwright.train.fp8_weights import FP8_WEIGHTS
from meshwright.train.job import execution_of, loss_axes, model_of
from meshwright.train.precision import Precision
from meshwright.train.state import (
    abstract_params,
    make_state,
    only_trainable,
    require_loss,
    trainable_leaves,
    with_frozen,
)
from meshwright.train.views import View
from meshwright.tree import named_leaves
from meshwright.types import PyTree

GATHER_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "fsdp", "tp", "pp"
LAYERS = "layers/"  # path of stacked layer parameters in built-in models
_AFTER_LAYERS = ("final_norm", "head/")  # parameters after the layers in built-in models
REMATS = ("none", "dots", "full")
"""Remat policies that a search tries."""
_PLANNED = (*REMATS, "offload")
_LEAST = "full"  # the policy that keeps the least


@dataclass(frozen=True)
class Needs:
    """Costs of the loss and its gradient under one remat policy.

    Args:
        flops: FLOPs per row; `moved` excludes weights, which do not grow with the rows.
        kept: bytes of saved activations per row, by kind of layer.
        fixed: bytes of saved activations that do not depend on the rows.
        looped: `kept` with layers in a loop, which stores all of its residuals.
        hosted: bytes offloaded to host memory, per row.
        num_matmuls: number of matmuls for a few rows; a loss in chunks of logits has more for many.
    """

    flops: Flops
    kept: Mapping[str, float]
    fixed: Mapping[str, float]
    looped: Mapping[str, float]
    hosted: Mapping[str, float]
    num_matmuls: int

    @property
    def kept_per_row(self) -> float:
        return math.fsum(self.kept.values())

    @property
    def hosted_per_row(self) -> float:
        return math.fsum(self.hosted.values())


@dataclass(frozen=True)
class JobCosts:
    """Profile of a job; made by `profile_job`.

    Args:
        tokens_per_row: tokens (or examples) per row.
        num_layers: number of layers stacked under `layers/`, or 1.
        by_layer: whether the loss gathers its parameters layer by layer.
        d_model: features between layers; None for custom models.
        saves_gathered: whether rows gathered for a matmul are saved for its gradient (`Execution.save_gathered`).
        vocab_size: columns of the head; None for custom models.
        written_out: whether layers are unrolled if they are not gathered one by one.
        tied: whether the head is the embedding.
        heads: number of attention heads, which tp must divide.
        kv_heads: number of key/value heads, which tp must divide or be a multiple of; None if there are no others.
        head_dim: features per head.
        d_ff: hidden features of a feed-forward block; None for custom models.
        fp8_matrices: the matrices that are multiplied in fp8; of custom models, whose rows are not known, none.
        num_microbatches: pipeline microbatches per minibatch; None for the default.
        widths: bytes per element of each parameter in the compute dtype, by name.
        frozen: names of the parameters without a gradient.
        fp8_weights: names of the weights that a step with several minibatches casts to fp8 once.
        merged: bytes per stored element of the matrices that a loss gets merged with their adapters.
        needs: costs by remat policy.
        fp8_needs: these with the activations that fp8 saves, on devices that multiply it; {} without fp8.
        keeps_fp8: whether activations count as in fp8, see `in_fp8`.
        forward: FLOPs per row of the loss without its gradient.
        forward_matmuls: number of its matmuls.
        state: shapes of the train state.
        has_tokens: whether the batch says how many tokens a row has; if not, a row counts as one.
        pipeline, pipeline_rounds: the job's pipeline schedule (`Execution`).
        platform: the platform it was traced for.
        loss_axes: the mesh axes that the loss handles itself in the local view.
        view: the view of the step.
        family: name of the built-in model's class; "" for custom models.
    """

    num_params: int
    tokens_per_row: int
    num_layers: int
    by_layer: bool
    d_model: int | None
    saves_gathered: bool
    vocab_size: int | None
    written_out: bool
    tied: bool
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    num_microbatches: int | None
    precision: Precision
    widths: Mapping[str, int]
    needs: Mapping[str, Needs]
    forward: Flops
    forward_matmuls: int
    state: Any = field(repr=False, compare=False)
    frozen: frozenset[str] = frozenset()
    fp8_weights: frozenset[str] = frozenset()
    merged: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_tokens: bool = True
    pipeline: str = "gpipe"
    pipeline_rounds: int | None = None
    platform: str = "tpu"
    loss_axes: tuple[str, ...] = ()
    view: View = "local"
    d_ff: int | None = None
    fp8_matrices: tuple[Fp8Matrices, ...] = ()
    fp8_needs: Mapping[str, Needs] = field(default_factory=dict)
    keeps_fp8: bool = False
    family: str = ""

    def ways(self, sizes: Mapping[str, int]) -> int:
        """Returns over how many devices along the pipeline axis the layers are split, with their activations."""
        runs = self.view == "local" and (self.d_model is not None or PIPELINE_AXIS in self.loss_axes)
        return sizes.get(PIPELINE_AXIS, 1) if runs else 1

    def stages(self, sizes: Mapping[str, int], setup: Setup) -> Stages:
        """Returns the pipeline of a setup on a mesh with these axis sizes; of a custom model, nothing is known."""
        count = self.ways(sizes)
        if count == 1 or self.d_model is None:
            return Stages(1, 1, num_layers=self.num_layers)
        name = setup.pipeline or self.pipeline
        microbatches = setup.num_microbatches or self.num_microbatches or 2 * count
        own = self.pipeline_rounds if name == self.pipeline else None
        rounds = check_rounds(name, own if setup.pipeline_rounds is None else setup.pipeline_rounds)
        again = name == "gpipe" or setup.remat == "full"
        return Stages(count, microbatches, name, rounds, again, self.num_layers)

    def in_fp8(self) -> JobCosts:
        """Returns the costs on devices that multiply fp8: what matmuls keep for the backward pass stays in it."""
        return replace(self, keeps_fp8=bool(self.fp8_needs))

    @property
    def saved(self) -> Mapping[str, Needs]:
        """The costs by remat policy whose activations count as saved."""
        return self.fp8_needs if self.keeps_fp8 else self.needs

    @property
    def learns_head(self) -> bool:
        """Whether the head of a built-in model is trained."""
        head = "embed/" if self.tied else "head/"
        return any(name.startswith(head) and name not in self.frozen for name in self.widths)

    @property
    def learns_layers(self) -> bool:
        """Whether the backward pass goes through the layers: a parameter in or before them is trained."""
        return any(not name.startswith(_AFTER_LAYERS) and name not in self.frozen for name in self.widths)

    def in_loop(self, setup: Setup, sizes: Mapping[str, int]) -> bool:
        """Returns whether layers run in a loop, as they always do if gathered one by one."""
        gathers = sizes.get(GATHER_AXIS, 1) > 1 and self.by_layer and setup.sync != "once"
        return gathers or not self.written_out

    def sharing(self, tp: int) -> int:
        """Returns the number of devices that share a key/value head."""
        return max(1, tp // self.kv_heads) if self.kv_heads else 1

    def shared_bytes(self, together: int) -> float:
        """Returns the bytes per row and layer that each of `together` devices gets of a shared key/value head."""
        width = int(self.precision.compute.itemsize)
        return 2 * self.tokens_per_row * (self.head_dim or 0) * width * (together - 1) / together


def profile_job(
    job: Any,
    *,
    precision: Precision | str | Mapping[str, Any] = "mixed",
    optimizer: str = "adamw",
    platform: str = "tpu",
    remats: tuple[str, ...] = REMATS,
) -> JobCosts:
    """Profiles a job by tracing it, in seconds and without devices.

    Args:
        platform: "tpu", "gpu" or "cpu", as models may choose other operations; for "gpu", cuDNN is assumed.
        remats: remat policies to profile.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> profile = profile_job(job, remats=("none", "full"))
        >>> profile.num_layers, profile.tokens_per_row, profile.needs["full"].flops.recomputed > 0
        (2, 16, True)
    """
    require_loss(job, who="plan")
    for remat in remats:
        if remat not in _PLANNED:
            hint = did_you_mean(remat, _PLANNED) or f"use one of: {', '.join(_PLANNED)}."
            raise MeshwrightError(f"remat={remat!r} cannot be planned.", hint=hint)
    dtypes = Precision(**precision) if isinstance(precision, Mapping) else Precision.named(precision)
    params = abstract_params(job, dtypes)
    model, run = model_of(job), execution_of(job) or Execution()
    heads = getattr(model, "num_heads", None)
    traced = {remat: _trace(job, params, dtypes, remat, TRACED_ROWS, platform) for remat in remats}
    # The fixed part (gradients in the loss, weights that matmuls read) hardly depends on the policy. It always comes
    # from one policy, so that plans of different searches are comparable.
    least = traced.get(_LEAST) or _trace(job, params, dtypes, _LEAST, TRACED_ROWS, platform)
    more = _trace(job, params, dtypes, _LEAST, 2 * TRACED_ROWS, platform)
    fixed = {kind: 2 * size - more.kept.get(kind, 0.0) for kind, size in least.kept.items()}
    fixed = {kind: size for kind, size in fixed.items() if size > 0}
    weights = max(0, 2 * least.flops.moved - more.flops.moved)
    # In built-in models, everything outside a named part is the residual stream.
    names = {} if model is None else {REST: "residual stream"}

    def by_row(sizes: Mapping[str, float], fixed: Mapping[str, float]) -> dict[str, float]:
        each = {kind: max(0.0, size - fixed.get(kind, 0.0)) / TRACED_ROWS for kind, size in sizes.items()}
        return {names.get(kind, kind): size for kind, size in each.items()}

    needs = {
        remat: Needs(
            _one_row(found.flops, weights),
            by_row(found.kept, fixed),
            {names.get(kind, kind): size for kind, size in fixed.items()},
            by_row(found.looped, fixed),
            by_row(found.hosted, {}),
            found.num_matmuls,
        )
        for remat, found in traced.items()
    }
    leaves = named_leaves(params)
    learns = trainable_leaves(job, params)
    layers = [leaf.value.shape[0] for leaf in leaves if leaf.name.startswith(LAYERS)]
    tokens, notes = _tokens_per_row(job)
    has_tokens = not notes
    key = abstract_key()
    rule = named_optimizer(optimizer, job)
    state = jax.eval_shape(lambda key: make_state(job, rule, key, precision=dtypes), key)
    widths = {
        leaf.name: int(dtype.itemsize)
        for leaf, dtype in zip(leaves, jax.tree.leaves(dtypes.compute_dtypes(params)), strict=True)
    }
    if not all(learns):
        notes += (f"{len(leaves) - sum(learns)} of {len(leaves)} parameters are frozen: they have no gradients",)
    forward, forward_matmuls = _forward(job, params, dtypes, platform)
    frozen = frozenset(leaf.name for leaf, own in zip(leaves, learns, strict=True) if not own)
    return JobCosts(
        num_params=sum(int(leaf.value.size) for leaf in leaves),
        tokens_per_row=tokens,
        num_layers=layers[0] if layers and len(set(layers)) == 1 else 1,
        by_layer="gather" in inspect.signature(job.loss).parameters,
        d_model=None if model is None else model.d_model,
        saves_gathered=run.save_gathered,
        vocab_size=None if model is None else model.vocab_size,
        written_out=run.layers == "unroll" or (model is not None and run.layers == "auto" and platform == "gpu"),
        tied=model is not None and model.tied_embeddings,
        heads=heads,
        kv_heads=getattr(model, "num_kv_heads", None),
        head_dim=getattr(model, "head_dim", None) or (model.d_model // heads if model and heads else None),
        num_microbatches=run.num_microbatches,
        precision=dtypes,
        widths=widths,
        needs=needs,
        forward=forward,
        forward_matmuls=forward_matmuls,
        state=state,
        frozen=frozen,
        fp8_weights=_fp8_weights(job, dtypes, state.params),
        merged=_merged(job, widths),
        notes=notes,
        has_tokens=has_tokens,
        pipeline=run.pipeline,
        pipeline_rounds=run.pipeline_rounds,
        platform=platform,
        loss_axes=loss_axes(job),
        d_ff=getattr(model, "d_ff", None),
        fp8_matrices=() if model is None else fp8_matrices(params, dtypes.fp8, frozen),
        fp8_needs=needs_in_fp8(job, params, dtypes, needs, platform, rest=names.get(REST, REST)),
        family="" if model is None else type(model).__name__,
    )


def _fp8_weights(job: Any, precision: Precision, params: PyTree) -> frozenset[str]:
    is_taken = FP8_WEIGHTS in inspect.signature(job.loss).parameters
    return frozenset(precision.fp8.names(params) if precision.fp8 is not None and is_taken else ())


def _merged(job: Any, widths: Mapping[str, int]) -> dict[str, int]:
    """Returns the bases of adapters that the loss gets merged, see `JobCosts`."""
    if not isinstance(job.loss, MergedFunction):
        return {}
    elements = 2 if job.lora.base == "nf4" else 1  # in a byte
    adapted = [name.removesuffix(f"/{LORA_A}") for name in widths if name.endswith(f"/{LORA_A}")]
    return {f"{name}/{BASE}": elements * widths[f"{name}/{LORA_A}"] for name in adapted}


def each_count(change: Callable[..., int], *flops: Flops) -> Flops:
    """Applies a function to every count of one `Flops`, or of several together."""
    names = ("total", "matmul", "recomputed", "attention", "moved", "masked")
    counts = {name: change(*(getattr(one, name) for one in flops)) for name in names}
    dtypes = dict.fromkeys(dtype for one in flops for dtype in one.by_dtype)
    by_dtype = {dtype: change(*(one.by_dtype.get(dtype, 0) for one in flops)) for dtype in dtypes}
    return Flops(by_dtype=by_dtype, notes=flops[0].notes, **counts)


def _trace(job: Any, params: PyTree, dtypes: Precision, remat: str, rows: int, platform: str) -> Needs:
    """Returns the costs of a gradient for so many rows, with `fixed` still included in the others."""
    batch = batch_of(job, rows)
    loss = planned_loss(job, remat)
    key = abstract_key()
    narrow, learns = narrow_params(params, dtypes), trainable_leaves(job, params)
    count: list[int] = []

    def gradients(params: PyTree, batch: PyTree, key: Any) -> Any:
        def loss_of(learned: PyTree) -> Any:
            return loss(with_frozen(learned, params, learns), batch, key)

        value, pull, metrics = jax.vjp(loss_of, only_trainable(params, learns), has_aux=True)
        waiting = waiting_of(pull)
        count[:] = [len(waiting)]
        ones = jax.tree.map(lambda leaf: np.ones(np.shape(leaf), jnp.result_type(leaf)), value)
        return waiting, (value, metrics, pull(ones))

    with traced_for(platform):
        jaxpr = jax.make_jaxpr(gradients)(narrow, batch, key).jaxpr
    num_params = len(jax.tree.leaves(narrow))
    waiting = jaxpr.outvars[: count[0]]
    kept, looped, hosted = bytes_kept(jaxpr, waiting, num_params)
    return Needs(count_jaxpr(jaxpr), kept, {}, looped, hosted, count_matmuls(jaxpr))


def _forward(job: Any, params: PyTree, dtypes: Precision, platform: str) -> tuple[Flops, int]:
    """Returns the FLOPs of the loss per row, which a pipeline recomputes, and its number of matmuls."""
    loss, key = planned_loss(job, "none"), abstract_key()

    def trace(rows: int) -> Any:
        with traced_for(platform):
            return jax.make_jaxpr(loss)(narrow_params(params, dtypes), batch_of(job, rows), key).jaxpr

    few = trace(TRACED_ROWS)
    found = count_jaxpr(few)
    weights = max(0, 2 * found.moved - count_jaxpr(trace(2 * TRACED_ROWS)).moved)
    return _one_row(found, weights), count_matmuls(few)


def _one_row(flops: Flops, weights: int) -> Flops:
    """Returns the FLOPs per row, without the bytes of weights, which do not grow with the rows."""
    return each_count(lambda count: count // TRACED_ROWS, replace(flops, moved=max(0, flops.moved - weights)))


def _tokens_per_row(job: Any) -> tuple[int, tuple[str, ...]]:
    batch = batch_of(job, None)
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    if targets is not None and len(targets.shape) == 2:
        return int(targets.shape[1]), ()
    count_rows(batch, who="plan")
    return 1, ("the batch has no `targets` of shape [rows, tokens], so a row counts as one token",)
