"""What a job needs, counted once from a few traces: operations, kept activations, bytes. The rest is arithmetic.

Traced is the loss and its gradient for one device and a few rows, in shapes only. What a step needs for more rows is
proportional to them, apart from what does not depend on the batch.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.hardware.flops import Flops, count_jaxpr
from meshwright.models.execution import Execution, remat_policy
from meshwright.parallel.rows import count_rows
from meshwright.plan.compiled.topology import assumed_cudnn
from meshwright.plan.costs.saved_activations import REST, bytes_kept
from meshwright.plan.step_setup import Setup, batch_of, make_optimizer
from meshwright.train.job import execution_of, model_of
from meshwright.train.precision import Precision
from meshwright.train.state import abstract_params, make_state, require_loss
from meshwright.tree import named_leaves
from meshwright.types import PyTree

GATHER_AXIS, TENSOR_AXIS, PIPELINE_AXIS = "fsdp", "tp", "pp"
LAYERS = "layers/"  # where our models stack the parameters of their layers
REMATS = ("none", "dots", "full")
"""What a search tries."""
_PLANNED = (*REMATS, "offload")
_ROWS = 2
_LEAST = "full"  # the policy that keeps the least
_KINDS = {"gpu": "NVIDIA H200", "tpu": "TPU v5", "cpu": "cpu"}


@dataclass(frozen=True)
class Stages:
    """The pipeline of one minibatch, as `parallel.pipeline.engine` runs it (GPipe): 1 stage is no pipeline.

    Args:
        microbatches: parts that the rows of a minibatch pass it in.

    Example:
        >>> two = Stages(2, 4)
        >>> two.ticks, two.idle, Stages(1, 1).idle
        (5, 0.2, 0.0)
    """

    count: int
    microbatches: int

    @property
    def ticks(self) -> int:
        """Ticks from the first microbatch's entry to the last one's exit."""
        return self.microbatches + self.count - 1

    @property
    def idle(self) -> float:
        """The share of ticks that each stage waits through; exactly 0 without a pipeline."""
        return (self.count - 1) / self.ticks


@dataclass(frozen=True)
class Needs:
    """What the gradient of a job's loss needs under one remat policy.

    Args:
        flops: of one row; `moved` without weights, which do not grow with the rows.
        kept: bytes of activations that wait for the backward pass, for each row, by the kind of layer that made them.
        fixed: the same for what does not depend on the rows.
        looped: `kept` where layers are in a loop, which stores all that it hands over.
        hosted: bytes that wait in the host's memory instead, for each row.
    """

    flops: Flops
    kept: Mapping[str, float]
    fixed: Mapping[str, float]
    looped: Mapping[str, float]
    hosted: Mapping[str, float]

    @property
    def kept_per_row(self) -> float:
        return math.fsum(self.kept.values())

    @property
    def kept_fixed(self) -> float:
        return math.fsum(self.fixed.values())

    @property
    def hosted_per_row(self) -> float:
        return math.fsum(self.hosted.values())


@dataclass(frozen=True)
class JobCosts:
    """What a plan needs to know of a job; made by `profile_job`.

    Args:
        tokens_per_row: how many tokens (or examples) a row counts as.
        num_layers: how many layers are stacked under `layers/`; 1 where none are.
        by_layer: whether the loss gathers its parameters layer by layer.
        d_model: features of the arrays between layers; None where the model is not one of ours.
        saves_gathered: whether rows gathered for a matmul are kept for its gradient (`Execution.save_gathered`).
        vocab_size: columns of the head; None where the model is not one of ours.
        written_out: whether layers are written out one after the other where they are not gathered.
        tied: whether the head is the embedding.
        heads: heads, which tp must divide.
        kv_heads: heads of keys and values, which tp must divide or be a multiple of; None where there are no others.
        head_dim: features of a head.
        num_microbatches: parts in which a minibatch passes a pipeline, as the job says; None for the default.
        widths: bytes of each element of a parameter while the loss uses it, by the parameter's name.
        needs: by remat policy.
        forward: operations of one row's loss alone, without a gradient.
        state: the shapes of the whole state, for layouts.
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
    state: Any = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()

    def stages(self, sizes: Mapping[str, int]) -> Stages:
        """Returns the pipeline on a mesh, given as sizes of its axes."""
        count = sizes.get(PIPELINE_AXIS, 1)
        return Stages(count, self.num_microbatches or 2 * count) if count > 1 else Stages(1, 1)

    def in_loop(self, setup: Setup, sizes: Mapping[str, int]) -> bool:
        """Returns whether layers run in a loop: always if they are gathered one by one."""
        gathers = sizes.get(GATHER_AXIS, 1) > 1 and self.by_layer and setup.sync != "once"
        return gathers or not self.written_out

    def sharing(self, tp: int) -> int:
        """Returns how many devices share a head of keys and values."""
        return max(1, tp // self.kv_heads) if self.kv_heads else 1

    def shared_bytes(self, together: int) -> float:
        """Returns how much of the keys and values of one row, in one layer, so many devices have from each other."""
        width = int(self.precision.compute.itemsize)
        return 2 * self.tokens_per_row * (self.head_dim or 0) * width * (together - 1) / together


def profile_job(
    job: Any,
    *,
    precision: Precision | str | Mapping[str, str] = "mixed",
    optimizer: str = "adamw",
    platform: str = "tpu",
    remats: tuple[str, ...] = REMATS,
) -> JobCosts:
    """Counts what a job needs; takes seconds, and no device.

    Args:
        platform: "tpu", "gpu" or "cpu": models may run differently there. For GPUs, cuDNN is taken to be there.

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
    traced = {remat: _trace(job, params, dtypes, remat, _ROWS, platform) for remat in remats}
    # What does not grow with the rows hardly depends on the policy: gradients that the loss already has, and weights
    # that matmuls read. It is clearest where the least is kept.
    # It is taken from one policy, whichever were asked for, so that plans of different searches can be compared.
    least = traced.get(_LEAST) or _trace(job, params, dtypes, _LEAST, _ROWS, platform)
    more = _trace(job, params, dtypes, _LEAST, 2 * _ROWS, platform)
    fixed = {kind: 2 * size - more.kept.get(kind, 0.0) for kind, size in least.kept.items()}
    fixed = {kind: size for kind, size in fixed.items() if size > 0}
    weights = max(0, 2 * least.flops.moved - more.flops.moved)
    # What is in no part of our models is what layers add to, and hand on.
    names = {} if model is None else {REST: "residual stream"}

    def by_row(sizes: Mapping[str, float], fixed: Mapping[str, float]) -> dict[str, float]:
        each = {kind: max(0.0, size - fixed.get(kind, 0.0)) / _ROWS for kind, size in sizes.items()}
        return {names.get(kind, kind): size for kind, size in each.items()}

    needs = {
        remat: Needs(
            _one_row(found.flops, weights),
            by_row(found.kept, fixed),
            {names.get(kind, kind): size for kind, size in fixed.items()},
            by_row(found.looped, fixed),
            by_row(found.hosted, {}),
        )
        for remat, found in traced.items()
    }
    leaves = named_leaves(params)
    layers = [leaf.value.shape[0] for leaf in leaves if leaf.name.startswith(LAYERS)]
    tokens, notes = _tokens_per_row(job)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rule = make_optimizer(optimizer)
    state = jax.eval_shape(lambda key: make_state(job, rule, key, precision=dtypes), key)
    if model is None:
        notes += ("the model is not one of ours: what it sends along tp and pp is not known before it is compiled",)
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
        widths={
            leaf.name: int(dtype.itemsize)
            for leaf, dtype in zip(leaves, jax.tree.leaves(dtypes.compute_dtypes(params)), strict=True)
        },
        needs=needs,
        forward=_forward(job, params, dtypes, platform),
        state=state,
        notes=notes,
    )


def each_count(change: Callable[..., int], *flops: Flops) -> Flops:
    """Returns operations with a change made of every count, of one or of several together."""
    names = ("total", "matmul", "recomputed", "attention", "moved")
    counts = {name: change(*(getattr(one, name) for one in flops)) for name in names}
    dtypes = dict.fromkeys(dtype for one in flops for dtype in one.by_dtype)
    by_dtype = {dtype: change(*(one.by_dtype.get(dtype, 0) for one in flops)) for dtype in dtypes}
    return Flops(by_dtype=by_dtype, notes=flops[0].notes, **counts)


def _trace(job: Any, params: PyTree, dtypes: Precision, remat: str, rows: int, platform: str) -> Needs:
    """Returns what a gradient of so many rows needs, `fixed` not yet told from the rest."""
    batch = batch_of(job, rows)
    loss = _loss(job, remat)
    key = jax.eval_shape(lambda: jax.random.key(0))
    narrow = _narrow(params, dtypes)
    count: list[int] = []

    def gradients(params: PyTree, batch: PyTree, key: Any) -> Any:
        value, pull, metrics = jax.vjp(lambda params: loss(params, batch, key), params, has_aux=True)
        waiting = list({id(leaf): leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "aval")}.values())
        count[:] = [len(waiting)]
        ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), value)
        return waiting, (value, metrics, pull(ones))

    with _traced_for(platform):
        jaxpr = jax.make_jaxpr(gradients)(narrow, batch, key).jaxpr
    num_params = len(jax.tree.leaves(narrow))
    waiting = jaxpr.outvars[: count[0]]
    kept, looped, hosted = bytes_kept(jaxpr, waiting, num_params)
    return Needs(count_jaxpr(jaxpr), kept, {}, looped, hosted)


def _forward(job: Any, params: PyTree, dtypes: Precision, platform: str) -> Flops:
    """Returns the operations of one row's loss, which a pipeline computes once more."""
    loss, key = _loss(job, "none"), jax.eval_shape(lambda: jax.random.key(0))

    def count(rows: int) -> Flops:
        with _traced_for(platform):
            return count_jaxpr(jax.make_jaxpr(loss)(_narrow(params, dtypes), batch_of(job, rows), key).jaxpr)

    found = count(_ROWS)
    weights = max(0, 2 * found.moved - count(2 * _ROWS).moved)
    return _one_row(found, weights)


def _narrow(params: PyTree, dtypes: Precision) -> PyTree:
    return jax.tree.map(
        lambda leaf, dtype: jax.ShapeDtypeStruct(leaf.shape, dtype), params, dtypes.compute_dtypes(params)
    )


@contextlib.contextmanager
def _traced_for(platform: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(_one_device(platform)))
        if platform == "gpu":
            stack.enter_context(assumed_cudnn())
        yield


def _one_row(flops: Flops, weights: int) -> Flops:
    """Returns the operations of one row, without the bytes of weights, which do not grow with the rows."""
    return each_count(lambda count: count // _ROWS, replace(flops, moved=max(0, flops.moved - weights)))


def _loss(job: Any, remat: str) -> Callable[..., Any]:
    """Returns the loss as a train step calls it on one device."""
    if "remat" in inspect.signature(job.loss).parameters:
        return lambda params, batch, key: job.loss(params, batch, key, remat=remat)
    policy = remat_policy(remat, by_name=False)  # type: ignore[arg-type]
    if policy is None:
        return lambda params, batch, key: job.loss(params, batch, key)
    return jax.checkpoint(lambda params, batch, key: job.loss(params, batch, key), policy=policy)


def _one_device(platform: str) -> AbstractMesh:
    device: Any = jax.sharding.AbstractDevice
    known = {"device_kind": _KINDS[platform], "num_cores": None, "platform": platform}
    taken = {name: value for name, value in known.items() if name in inspect.signature(device).parameters}
    return AbstractMesh((1,), ("dp",), axis_types=(AxisType.Auto,), abstract_device=device(**taken))


def _tokens_per_row(job: Any) -> tuple[int, tuple[str, ...]]:
    batch = batch_of(job, None)
    targets = batch.get("targets") if isinstance(batch, Mapping) else None
    if targets is not None and len(targets.shape) == 2:
        return int(targets.shape[1]), ()
    count_rows(batch, who="plan")
    return 1, ("the batch has no [rows, tokens] of `targets`: a row is counted as one token",)
