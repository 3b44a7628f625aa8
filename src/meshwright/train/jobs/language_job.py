"""Jobs for language models, and the next-token loss as sums and counts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import JobError, PlacementError
from meshwright.metrics import Sum
from meshwright.models.execution import Execution, Remat
from meshwright.models.language import LanguageModel
from meshwright.parallel.cross_entropy import LossOptions, linear_cross_entropy
from meshwright.parallel.fp8.weight import Amaxes
from meshwright.parallel.fsdp import Gather
from meshwright.parallel.lora.low_rank import Adapters
from meshwright.train.job import Job
from meshwright.types import Metrics, PRNGKeyArray, PyTree


def language_job(
    model: LanguageModel,
    *,
    batch_size: int,
    num_tokens: int,
    run: Execution | None = None,
    mesh: str | None = None,
    packed: bool = False,
    num_sources: int | None = None,
    **loss_options: Any,
) -> Job:
    """Returns a job that trains a language model to predict the next token.

    A batch is a dict of `inputs` and `targets`, integers of shape `[rows, tokens]`, and optionally `weights` (of the
    targets), `segment_ids` and `positions` (for packed documents), and `sources`: booleans of shape `[rows, sources]`
    that say which source of a mixture a row comes from. With them, the metric `by_source` has the sums of loss and
    count of each source, `[2, sources]`.

    Args:
        batch_size, num_tokens: shape of the example batch.
        run: execution options of the model (default: `Execution()`).
        packed: whether the example batch has weights and segment ids.
        num_sources: number of sources, if the example batch has `sources`.
        loss_options: options of `next_token_loss`: `z_loss`, `label_smoothing`, `chunk_rows`.

    Example:
        >>> from meshwright.models import Decoder
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> {name: leaf.shape for name, leaf in job.batch.items()}
        {'inputs': (8, 16), 'targets': (8, 16)}
    """
    shape = (batch_size, num_tokens)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    if packed:
        batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        batch["segment_ids"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    if num_sources is not None:
        batch["sources"] = jax.ShapeDtypeStruct((batch_size, num_sources), jnp.bool_)
    execution = run or Execution()
    return Job(
        init=model.init,
        rules=model.rules,
        loss=LanguageLoss(model, execution, loss_options),
        batch=batch,
        mesh=mesh,
        make_batch=functools.partial(_random_batch, batch, model.vocab_size),
        vocab_size=model.vocab_size,
        model=model,
        execution=execution,
    )


def with_execution(job: Any, **changes: Any) -> Any:
    """Returns a language model's job with some of its execution options changed.

    Another pipeline schedule has its usual number of stages per device, unless `pipeline_rounds` is among the changes.

    Example:
        >>> from meshwright.models import Decoder
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> with_execution(job, pipeline="zb-v", num_microbatches=8).execution.pipeline
        'zb-v'
    """
    loss = getattr(job, "loss", None)
    if not isinstance(job, Job) or not isinstance(loss, LanguageLoss):
        names = " and ".join(changes)
        raise JobError(
            f"this job sets its own execution options, so {names} cannot be changed.",
            hint="use a job of mw.language_job(model, ...), or set Execution(...) in the job.",
        )
    if changes.get("pipeline", loss.execution.pipeline) != loss.execution.pipeline:
        changes = {"pipeline_rounds": None, **changes}
    execution = replace(loss.execution, **changes)
    return replace(job, loss=replace(loss, execution=execution), execution=execution)


def _random_batch(shapes: dict[str, Any], vocab_size: int, seed: int) -> dict[str, Any]:
    """Returns random tokens; if packed, also documents of random lengths and weights of 0 or 1."""
    rng = np.random.default_rng(seed)
    shape = shapes["inputs"].shape
    batch = {name: rng.integers(0, vocab_size, shape).astype(np.int32) for name in ("inputs", "targets")}
    if "segment_ids" in shapes:
        batch["segment_ids"] = 1 + np.cumsum(rng.random(shape) < 4 / shape[1], axis=1).astype(np.int32)
        batch["weights"] = (rng.random(shape) < 0.7).astype(np.float32)
    if "sources" in shapes:
        count = shapes["sources"].shape[1]
        batch["sources"] = rng.integers(0, count, shape[:1])[:, None] == np.arange(count)
    return batch


@dataclass(frozen=True, eq=False)
class LanguageLoss:
    """The loss of a language model: `loss(params, batch, rng)` with batches as `language_job` describes them.

    Args:
        options: options of `next_token_loss`.
    """

    model: LanguageModel
    execution: Execution
    options: Mapping[str, Any]

    def __call__(
        self,
        params: PyTree,
        batch: PyTree,
        rng: PRNGKeyArray | None,
        *,
        gather: Gather | None = None,
        remat: Remat = "none",
        fp8: Amaxes | None = None,
        fp8_weights: PyTree = None,
        lora: Adapters | None = None,
    ) -> Any:
        return self.model.apply(
            params,
            batch["inputs"],
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            rng=rng,
            run=self.execution,
            gather=gather,
            remat=remat,
            fp8=fp8,
            fp8_weights=fp8_weights,
            lora=lora,
            finish=self._finish,
            targets={"targets": batch["targets"], "weights": batch.get("weights"), "sources": batch.get("sources")},
        )

    def _finish(self, h: Any, head: Any, targets: PyTree) -> Any:
        run, sources, grouped = self.execution, targets["sources"], dict[str, Any]()
        if sources is not None:
            ids = jnp.broadcast_to(jnp.argmax(sources, axis=1)[:, None], targets["targets"].shape)
            grouped = {"groups": ids, "num_groups": sources.shape[1]}
        loss, metrics = next_token_loss(
            h,
            head,
            targets["targets"],
            weights=targets["weights"],
            axis=run.tensor(),
            sequence_parallel=run.sequence_parallel,
            batch_axes=run.rows(),
            soft_cap=self.model.logit_soft_cap,
            **({"kernels": run.kernels} | dict(self.options)),
            **grouped,
        )
        # The sums are those of sources here.
        return loss, {"by_source" if name == "by_group" else name: value for name, value in metrics.items()}


def next_token_loss(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    **options: Unpack[LossOptions],
) -> tuple[tuple[Any, Any], Metrics]:
    """Returns the next-token loss as `((sum, count), metrics)`, the form that `accumulate` expects of a `loss_fn`.

    The metrics are `(sum, count)` pairs: `"cross_entropy"` (without label smoothing or z-loss), `"accuracy"` (fraction
    of targets with the largest logit) and, if enabled, `"z_loss"`. With `groups`, `"by_group"` is a `Sum` of the loss
    and the count of each group, `[2, num_groups]`.

    Args:
        x: the model's last hidden states, `[..., rows, D]`.
        head: the output projection, `[D, V]`.
        weights: the weight of each target (default: 1).
        options: options of `meshwright.parallel.linear_cross_entropy`: `axis`, `sequence_parallel`, `batch_axes`,
            `vocab_size`, `z_loss`, `label_smoothing`, `soft_cap`, `chunk_rows`, `logits_dtype`, `groups`, `num_groups`.

    Example:
        >>> import meshwright as mw
        >>> tokens = jnp.array([[3, 1, 2, 3, 1, 2, 3, 1, 2]])
        >>> def loss_fn(params, minibatch, rng):
        ...     inputs, targets, weights = mw.train.shift_targets(minibatch)
        ...     return next_token_loss(params["table"][inputs], params["head"], targets, weights=weights, z_loss=1e-4)
        >>> params = {"table": jnp.zeros((4, 8)), "head": jnp.zeros((8, 4))}
        >>> result = mw.train.accumulate(loss_fn, params, tokens, num_minibatches=1)
        >>> bool(jnp.allclose(result.loss, jnp.log(4) + 1e-4 * jnp.log(4) ** 2)), sorted(result.metrics)
        (True, ['accuracy', 'cross_entropy', 'z_loss'])
    """
    sums = linear_cross_entropy(x, head, targets, weights=weights, **options)
    metrics: dict[str, Any] = {
        "cross_entropy": (sums.cross_entropy, sums.count),
        "accuracy": (sums.correct, sums.count),
    }
    if options.get("z_loss"):
        metrics["z_loss"] = (sums.z_loss, sums.count)
    if options.get("groups") is not None:
        metrics["by_group"] = Sum(sums.by_group)  # type: ignore[attr-defined]
    return (sums.total, sums.count), metrics


def shift_targets(tokens: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns inputs, targets and weights for next-token prediction.

    Args:
        tokens: integers of shape `[..., S + 1]`; inputs and targets have shape `[..., S]`.
        segment_ids: the document of each token in packed rows, 0 for padding. The weight of a target is 0 if it is
            padding or belongs to another document than its input, and 1 otherwise.

    Example:
        >>> inputs, targets, weights = shift_targets(jnp.array([5, 6, 7, 8, 0]), jnp.array([1, 1, 2, 2, 0]))
        >>> inputs.tolist(), targets.tolist(), weights.tolist()
        ([5, 6, 7, 8], [6, 7, 8, 0], [1.0, 0.0, 1.0, 0.0])
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim < 1 or tokens.shape[-1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise PlacementError(
            f"shift_targets needs integers of shape [..., S + 1]; got {tokens.dtype} of shape {tokens.shape}.",
            hint="pass one token more than there are targets.",
        )
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    if segment_ids is None:
        return inputs, targets, jnp.ones(targets.shape, jnp.float32)
    segment_ids = jnp.asarray(segment_ids)
    if segment_ids.shape != tokens.shape:
        raise PlacementError(
            f"shift_targets: tokens have shape {tokens.shape}, but segment_ids {segment_ids.shape}.",
            hint="pass one segment id per token, including the last token.",
        )
    documents = segment_ids[..., 1:]
    weights = (documents == segment_ids[..., :-1]) & (documents != 0)
    return inputs, targets, weights.astype(jnp.float32)
