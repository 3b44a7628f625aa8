"""Language-model losses in the form that `accumulate` wants: sums and counts, over whatever part of a batch is here."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from meshwright.errors import PlacementError
from meshwright.parallel.cross_entropy import LossOptions, linear_cross_entropy
from meshwright.types import Metrics

WHO = "shift_targets"


def next_token_loss(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    **options: Unpack[LossOptions],
) -> tuple[tuple[Any, Any], Metrics]:
    """Returns what a `loss_fn` of `accumulate` returns: the summed loss with its count, and metrics as such pairs.

    `"cross_entropy"` is the plain one, whatever is added to what is trained on; `"accuracy"` the share of targets that
    had the largest logit; `"z_loss"` is there where it was asked for.

    Args:
        x: `[..., rows, D]`, the model's last hidden states.
        head: `[D, V]`; see `meshwright.parallel.linear_cross_entropy`, also for the other arguments.
        options: its options: `axis`, `sequence_parallel`, `batch_axes`, `vocab_size`, `z_loss`, `label_smoothing`,
            `soft_cap`, `chunk_rows`, `logits_dtype`.

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
    return (sums.total, sums.count), metrics


def shift_targets(tokens: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns inputs, targets and weights for predicting each token from those before it.

    Args:
        tokens: `[..., S + 1]`; inputs and targets are `[..., S]` of them.
        segment_ids: which document each token belongs to, where rows are packed with several; 0 is padding. Targets in
            another document than their input, and padding, get weight 0, all others 1.

    Example:
        >>> inputs, targets, weights = shift_targets(jnp.array([5, 6, 7, 8, 0]), jnp.array([1, 1, 2, 2, 0]))
        >>> inputs.tolist(), targets.tolist(), weights.tolist()
        ([5, 6, 7, 8], [6, 7, 8, 0], [1.0, 0.0, 1.0, 0.0])
    """
    tokens = jnp.asarray(tokens)
    if tokens.ndim < 1 or tokens.shape[-1] < 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise PlacementError(
            f"{WHO} got tokens of shape {tokens.shape} and type {tokens.dtype}.",
            hint="tokens must be [..., S + 1] of integers: one more than there are targets.",
        )
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    if segment_ids is None:
        return inputs, targets, jnp.ones(targets.shape, jnp.float32)
    segment_ids = jnp.asarray(segment_ids)
    if segment_ids.shape != tokens.shape:
        raise PlacementError(
            f"{WHO}: tokens of shape {tokens.shape} have segment_ids of shape {segment_ids.shape}.",
            hint="give one for each token, the last one included.",
        )
    documents = segment_ids[..., 1:]
    weights = (documents == segment_ids[..., :-1]) & (documents != 0)
    return inputs, targets, weights.astype(jnp.float32)
