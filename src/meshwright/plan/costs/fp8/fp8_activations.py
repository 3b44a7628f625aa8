"""Bytes that a step in fp8 saves for its backward pass.

A projection in fp8 keeps its input in one byte per element, for the gradient of its weight. What other operations need
stays in the compute dtype: the queries, keys and output of attention, and both factors of a gated feed-forward block.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from meshwright.plan.costs.saved_activations import REST, bytes_kept
from meshwright.plan.costs.traced_loss import TRACED_ROWS, narrow_params, planned_loss, traced_for, waiting_of
from meshwright.plan.step_setup import batch_of
from meshwright.rng import abstract_key
from meshwright.train.precision import Precision
from meshwright.train.state import only_trainable, trainable_leaves, with_frozen
from meshwright.types import PyTree

if TYPE_CHECKING:
    from meshwright.plan.costs.job_costs import Needs


def needs_in_fp8(
    job: Any, params: PyTree, dtypes: Precision, needs: Mapping[str, Needs], platform: str, *, rest: str
) -> dict[str, Needs]:
    """Returns the costs by remat policy with the activations that fp8 saves; {} if the job's loss does not take `fp8`.

    The FLOPs, and the bytes that do not grow with the rows, stay those of the compute dtype.

    Args:
        rest: name of the part of a model that is not in a named part.
    """
    if dtypes.fp8 is None or "fp8" not in inspect.signature(job.loss).parameters:
        return {}
    found = {}
    for remat, known in needs.items():
        few, more = (_kept(job, params, dtypes, remat, times * TRACED_ROWS, platform) for times in (1, 2))
        kept, looped, hosted = (
            {(rest if kind == REST else kind): _growth(less.get(kind, 0.0), size) for kind, size in many.items()}
            for less, many in zip(few, more, strict=True)
        )
        found[remat] = replace(known, kept=kept, looped=looped, hosted=hosted)
    return found


def _growth(few: float, more: float) -> float:
    return max(0.0, more - few) / TRACED_ROWS


def _kept(
    job: Any, params: PyTree, dtypes: Precision, remat: str, rows: int, platform: str
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    loss, learns = planned_loss(job, remat), trainable_leaves(job, params)
    narrow = narrow_params(params, dtypes)
    amaxes = jax.eval_shape(lambda params: dtypes.fp8.amaxes(params, None), narrow)

    def saved(params: PyTree, amaxes: Any, batch: PyTree, key: Any) -> Any:
        def loss_of(learned: PyTree) -> Any:
            return loss(with_frozen(learned, params, learns), batch, key, fp8=amaxes)

        return waiting_of(jax.vjp(loss_of, only_trainable(params, learns), has_aux=True)[1])

    with traced_for(platform):
        jaxpr = jax.make_jaxpr(saved)(narrow, amaxes, batch_of(job, rows), abstract_key()).jaxpr
    return bytes_kept(jaxpr, jaxpr.outvars, len(jax.tree.leaves((narrow, amaxes))))
