"""The chunked loss with weights, bad targets, padding, ties and huge logits."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.parallel import LossSums, linear_cross_entropy, local_map, vocab_cross_entropy

from .losses import BATCH, DIM, HEAD, ROWS, VOCAB, naive, sums_and_grads, values, view_functions
from .one_device import close, mesh_of


def mesh_in_force(view):
    return jax.set_mesh(mesh_of(8)) if view == "global" else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("view", "kind"),
    [("plain", bool), ("plain", np.float32), ("plain", np.int32), ("local", bool), ("global", np.float32)],
)
def test_zero_weights_ignore_bad_values(view, kind):
    v = values()
    weights = np.asarray(v["weights"] > 0, kind)
    x = np.where(weights[..., None] != 0, v["x"], np.nan)
    targets = np.where(weights, v["targets"], [-1, 10**6][kind is bool])
    true, (dx, dhead) = sums_and_grads(
        lambda x, head, t, w: naive({"x": x, "head": head, "targets": t, "weights": w}),
        v["x"], v["head"], v["targets"], np.asarray(weights, np.float32),
    )  # fmt: skip
    with mesh_in_force(view):
        sums, grads = sums_and_grads(view_functions()[view], x, v["head"], targets, weights)
    np.testing.assert_allclose(sums, true, rtol=1e-5)
    close(grads[0], dx, 2e-6, "x")
    close(grads[1], dhead, 2e-6, "head")
    assert not np.asarray(grads[0])[weights == 0].any()


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_targets_outside_the_vocabulary_give_nan(view):
    v = values()
    f, weights = view_functions()[view], np.ones_like(v["weights"])
    for bad in (-1, VOCAB, 10**6):
        targets = v["targets"].copy()
        targets[1, 3] = bad
        with mesh_in_force(view):
            sums, (dx, dhead) = sums_and_grads(f, v["x"], v["head"], targets, weights)
        assert np.isnan(sums.total)
        assert np.isnan(sums.cross_entropy)
        assert sums.count == BATCH * ROWS
        assert np.isnan(dhead).all()
        assert np.argwhere(np.isnan(dx).any(-1)).tolist() == [[1, 3]]


def test_all_weights_zero():
    v = values()
    for x in (v["x"], np.full_like(v["x"], np.nan)):
        sums, grads = sums_and_grads(
            view_functions()["plain"], x, v["head"], v["targets"] - 100, np.zeros_like(v["weights"])
        )
        assert all(part == 0 for part in sums)
        assert not any(np.asarray(grad).any() for grad in grads)


def test_only_the_total_has_a_gradient():
    v = values()

    def grads(field, x, head, weights):
        def f(x, head, weights):
            sums = linear_cross_entropy(x, head, v["targets"], weights=weights, z_loss=0.1)
            return sums.total + (5 * getattr(sums, field) if field else 0)

        return jax.grad(f, argnums=(0, 1, 2))(x, head, weights)

    fields = (None, *LossSums._fields[1:])
    true, *found = jax.jit(lambda *args: [grads(field, *args) for field in fields])(v["x"], v["head"], v["weights"])
    assert all(np.asarray(grad).any() for grad in true[:2])
    assert not np.asarray(true[2]).any()  # weights are constants
    for got in found:
        jax.tree.map(np.testing.assert_array_equal, got, true)


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_ties_predict_the_first_token(view):
    v = values()
    targets = np.arange(BATCH * ROWS).reshape(BATCH, ROWS) % 8
    with mesh_in_force(view):
        f = jax.jit(view_functions()[view])
        for first in (0, 5, 7):
            head = np.where(np.arange(VOCAB) >= first, 1.0, -1.0) * np.ones((DIM, 1), np.float32)
            sums = f(np.ones_like(v["x"]), head.astype(np.float32), targets, np.ones_like(v["weights"]))
            assert sums.correct == (targets == first).sum()


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_huge_logits_stay_finite(view):
    x, head = np.full((1, 8, 1), 1e4, np.float32), np.linspace(-1, 1, 8, dtype=np.float32)[None]
    with mesh_in_force(view):
        sums, grads = sums_and_grads(view_functions()[view], x, head, np.full((1, 8), 6), np.ones((1, 8), np.float32))
    np.testing.assert_allclose(sums.total, 8e4 * (head[0, 7] - head[0, 6]), rtol=1e-5)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("view", ["plain", "local", "global"])
def test_padded_columns_are_ignored(view):
    """33 tokens on 8 devices are padded to 40, so the last device has only padding."""
    v = values()
    # The padding has by far the largest logit of each row, and the target the second largest.
    head = np.concatenate([v["head"][:, :33], 1e3 * np.ones((DIM, 7), np.float32)], axis=1)
    x, weights = np.abs(v["x"]), np.ones_like(v["weights"])
    targets = (x @ head[:, :33]).argmax(-1)

    def f(x, head, targets, weights):
        return linear_cross_entropy(x, head, targets, weights=weights, axis="tp", vocab_size=33, label_smoothing=0.1)

    g = f
    if view == "local":
        g = local_map(f, mesh=mesh_of(8), in_specs=(P(None, "tp"), HEAD, P(), P()), out_specs=P())
    with mesh_in_force(view):
        sums, grads = sums_and_grads(g, x, head, targets, weights)
    true, true_grads = sums_and_grads(
        lambda x, head, t, w: naive({"x": x, "head": head, "targets": t, "weights": w}, label_smoothing=0.1),
        x, head[:, :33], targets, weights,
    )  # fmt: skip
    np.testing.assert_allclose(sums, true, rtol=1e-5)
    assert sums.correct == targets.size
    close(grads[0], true_grads[0], 2e-6, "x")
    close(grads[1][:, :33], true_grads[1], 2e-6, "head")
    assert not grads[1][:, 33:].any()


def test_sum_equals_per_token_losses():
    v = values()
    each, sums = jax.jit(lambda *a: (vocab_cross_entropy(*a, axis=None), linear_cross_entropy(*a)))(
        v["x"], v["head"], v["targets"]
    )
    np.testing.assert_allclose(sums.total, each.sum(), rtol=1e-6)
