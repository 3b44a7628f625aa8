"""The next-token loss of packed documents, accumulated over devices and minibatches, equals one device's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import PlacementError
from meshwright.parallel import local_map, vocab_embed
from meshwright.train import Accumulated, accumulate, next_token_loss, shift_targets

BATCH, ROWS, DIM, VOCAB = 8, 16, 6, 40
OPTIONS = {"z_loss": 0.01, "label_smoothing": 0.1, "soft_cap": 5.0, "chunk_rows": 6}


@functools.cache
def params():
    keys = jax.random.split(jax.random.key(0))
    return jax.device_get(
        {"table": jax.random.normal(keys[0], (VOCAB, DIM)), "head": jax.random.normal(keys[1], (DIM, VOCAB))}
    )


@functools.cache
def batch():
    """Rows of two documents and some padding; the last two rows are all padding."""
    rng = np.random.default_rng(0)
    ends = np.sort(rng.integers(2, ROWS, (BATCH, 2)), axis=-1)
    place = np.arange(ROWS + 1)
    segments = 1 + (place >= ends[:, :1]) - 2 * (place >= ends[:, 1:])
    segments[-2:] = 0
    tokens = np.where(segments > 0, rng.integers(0, VOCAB, segments.shape), -1)
    return {"tokens": tokens.astype(np.int32), "segments": segments.astype(np.int32)}


def loss_fn(params, batch, rng, *, axis=None, sp=True):
    inputs, targets, weights = shift_targets(batch["tokens"], batch["segments"])
    # Padding (-1) has no embedding.
    x = vocab_embed(jnp.maximum(inputs, 0), params["table"], axis=axis, sequence_parallel=sp)
    return next_token_loss(
        jnp.tanh(x), params["head"], targets, weights=weights, axis=axis, sequence_parallel=sp, **OPTIONS
    )


def naive(params, batch):
    tokens, segments = batch["tokens"], batch["segments"]
    weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    logits = 5.0 * jnp.tanh(jnp.tanh(params["table"][tokens[:, :-1]]) @ params["head"] / 5.0)
    log_p = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
    z = 0.01 * jax.nn.logsumexp(logits, axis=-1) ** 2
    count = weights.sum()

    def total(each):
        return jnp.where(weights, each, 0.0).sum()

    metrics = {
        "cross_entropy": (total(losses), count),
        "accuracy": (total(logits.argmax(-1) == tokens[:, 1:]), count),
        "z_loss": (total(z), count),
    }
    return total(0.9 * losses - 0.1 * log_p.mean(-1) + z) / count, metrics


@functools.cache
def expected():
    (loss, metrics), grads = jax.jit(jax.value_and_grad(naive, has_aux=True))(params(), batch())
    return jax.device_get(Accumulated(loss, grads, metrics))


def assert_close(got, true, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(true)
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(true), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() / scale < tolerance, jax.tree_util.keystr(path)


def distributed(mesh_text, *, sync, num_minibatches, sp):
    mesh = mw.create_mesh(mesh_text)
    fsdp, axis = (name if name in mesh.axis_names else None for name in ("fsdp", "tp"))
    specs = {"table": P(axis, fsdp), "head": P(fsdp, axis)}
    rows = P(tuple(name for name in mesh.axis_names if name != "tp"))
    return local_map(
        lambda params, batch: accumulate(
            functools.partial(loss_fn, axis=axis, sp=sp),
            params,
            batch,
            num_minibatches=num_minibatches,
            specs=specs,
            sync=sync,
        ),
        mesh=mesh,
        in_specs=(specs, rows),
        out_specs=Accumulated(loss=P(), grads=specs, metrics=P()),
    )


TABLE = [
    ("dp:2,tp:4", "every", 2, True),
    ("dp:2,tp:4", "hybrid", 4, False),
    ("dp:2,tp:4", "once", 1, False),
    ("dp:2,fsdp:2,tp:2", "once", 2, True),
    ("dp:2,fsdp:2,tp:2", "hybrid", 2, True),
    ("dp:8", "hybrid", 1, True),
    ("tp:8", "every", 4, True),
]


@pytest.mark.parametrize(("mesh", "sync", "num_minibatches", "sp"), TABLE)
def test_any_mesh_sync_and_number_of_minibatches_equals_one_device(mesh, sync, num_minibatches, sp):
    step = distributed(mesh, sync=sync, num_minibatches=num_minibatches, sp=sp)
    assert_close(jax.jit(step)(params(), batch()), expected())


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_one_device_with_and_without_minibatches(num_minibatches):
    step = jax.jit(lambda params, batch: accumulate(loss_fn, params, batch, num_minibatches=num_minibatches))
    assert_close(step(params(), batch()), expected())


def test_z_loss_is_a_metric_if_enabled():
    x, targets = jnp.zeros((4, DIM)), jnp.arange(4)
    (total, count), metrics = next_token_loss(x, params()["head"], targets)
    assert set(metrics) == {"cross_entropy", "accuracy"}
    assert metrics["cross_entropy"] == (total, count)
    assert metrics["accuracy"] == (1, 4)  # the first of equal logits
    (total, count), metrics = next_token_loss(x, params()["head"], targets, z_loss=0.5)
    np.testing.assert_allclose(metrics["z_loss"][0], 4 * 0.5 * np.log(VOCAB) ** 2, rtol=1e-6)
    np.testing.assert_allclose(total, metrics["cross_entropy"][0] + metrics["z_loss"][0], rtol=1e-6)


# --- Targets ---


def test_targets_are_the_next_tokens_of_the_same_document():
    tokens, segments = batch()["tokens"], batch()["segments"]
    inputs, targets, weights = jax.device_get(shift_targets(tokens, segments))
    assert inputs.shape == targets.shape == weights.shape == (BATCH, ROWS)
    for row in range(BATCH):
        pairs = [
            (tokens[row, i], tokens[row, i + 1])
            for i in range(ROWS)
            if segments[row, i] == segments[row, i + 1] and segments[row, i] != 0
        ]
        counted = weights[row] == 1
        assert [*zip(inputs[row, counted], targets[row, counted], strict=True)] == pairs
        assert not weights[row, ~counted].any()
    assert not weights[-2:].any()


def test_without_documents_every_target_counts():
    inputs, targets, weights = shift_targets(np.arange(6).reshape(2, 3))
    assert inputs.tolist() == [[0, 1], [3, 4]]
    assert targets.tolist() == [[1, 2], [4, 5]]
    assert weights.tolist() == [[1, 1], [1, 1]]
    assert weights.dtype == jnp.float32


def test_bad_tokens_and_segment_ids():
    for tokens in (np.zeros((2, 1), int), np.zeros((2, 3)), np.int32(0)):
        with pytest.raises(PlacementError, match=r"needs integers of shape .*; got .*\nhint: pass one token more"):
            shift_targets(tokens)
    with pytest.raises(PlacementError, match=r"tokens have shape \(2, 3\), but segment_ids \(2, 2\)"):
        shift_targets(np.zeros((2, 3), int), np.zeros((2, 2), int))
