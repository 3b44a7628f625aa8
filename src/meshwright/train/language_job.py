"""Language models as jobs: a model of ours joined with the next-token loss."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.models.execution import Execution, Remat
from meshwright.models.language import LanguageModel
from meshwright.parallel.fsdp import Gather
from meshwright.train.job import Job
from meshwright.train.loss import next_token_loss
from meshwright.types import PRNGKeyArray, PyTree


def language_job(
    model: LanguageModel,
    *,
    batch_size: int,
    num_tokens: int,
    run: Execution | None = None,
    mesh: str | None = None,
    packed: bool = False,
    **loss_options: Any,
) -> Job:
    """Returns a job that trains a language model to predict the next token.

    A batch is a dict of `inputs` and `targets`, `[rows, tokens]` of whole numbers, and optionally `weights` (which
    targets count), `segment_ids` and `positions` (for packed documents).

    Args:
        batch_size, num_tokens: the shape of the job's example batch.
        run: how the model runs; `Execution()` by default.
        packed: the example batch has weights and segment ids.
        loss_options: of `next_token_loss`: `z_loss`, `label_smoothing`, `chunk_rows`.

    Example:
        >>> from meshwright.models import Decoder
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> {name: leaf.shape for name, leaf in job.batch.items()}
        {'inputs': (8, 16), 'targets': (8, 16)}
    """
    shape = (batch_size, num_tokens)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("inputs", "targets")}
    if packed:
        batch |= {
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
            "segment_ids": jax.ShapeDtypeStruct(shape, jnp.int32),
        }
    loss = functools.partial(_loss, model, run or Execution(), loss_options)
    draw = functools.partial(_random_batch, batch, model.vocab_size)
    return Job(
        init=model.init,
        rules=model.rules,
        loss=loss,
        batch=batch,
        mesh=mesh,
        make_batch=draw,
        vocab_size=model.vocab_size,
    )


def _random_batch(shapes: dict[str, Any], vocab_size: int, seed: int) -> dict[str, Any]:
    """Returns random tokens of these shapes; of packed ones, documents of random lengths, and some do not count."""
    rng = np.random.default_rng(seed)
    shape = shapes["inputs"].shape
    batch = {name: rng.integers(0, vocab_size, shape).astype(np.int32) for name in ("inputs", "targets")}
    if "segment_ids" in shapes:
        batch["segment_ids"] = 1 + np.cumsum(rng.random(shape) < 4 / shape[1], axis=1).astype(np.int32)
        batch["weights"] = (rng.random(shape) < 0.7).astype(np.float32)
    return batch


def _loss(
    model: LanguageModel,
    run: Execution,
    options: dict[str, Any],
    params: PyTree,
    batch: PyTree,
    rng: PRNGKeyArray | None,
    *,
    gather: Gather | None = None,
    remat: Remat = "none",
) -> Any:
    def finish(h: Any, head: Any, targets: PyTree) -> Any:
        return next_token_loss(
            h,
            head,
            targets["targets"],
            weights=targets["weights"],
            axis=run.tensor(),
            sequence_parallel=run.sequence_parallel,
            batch_axes=run.rows(),
            soft_cap=model.logit_soft_cap,
            **({"kernels": run.kernels} | options),
        )

    return model.apply(
        params,
        batch["inputs"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        rng=rng,
        run=run,
        gather=gather,
        remat=remat,
        finish=finish,
        targets={"targets": batch["targets"], "weights": batch.get("weights")},
    )
