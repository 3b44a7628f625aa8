"""Metrics of `accumulate_gradients`: values with counts add up and weigh minibatches; strings pass through."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import meshwright as mw
from meshwright.compat.xlstm_jax.common_types import TrainState
from meshwright.compat.xlstm_jax.distributed.single_gpu import Batch, accumulate_gradients

FORMS = pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
WIDTH, ROWS = 16, 16


def make_state(params):
    return TrainState.create(apply_fn=lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"], params=params,
                             tx=optax.sgd(0.1))  # fmt: skip


def make_params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (WIDTH, WIDTH), dtype) / 4,
        "v": jax.random.normal(keys[1], (WIDTH,), dtype),
    }


def make_batch(dtype=jnp.float32):
    """Returns a batch in which the first quarter of the rows and most others are masked, by a negative target."""
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH), dtype)
    targets = jnp.abs(jax.random.normal(jax.random.key(2), (ROWS,), dtype)) + 0.1
    valid = jax.random.bernoulli(jax.random.key(3), 0.4, (ROWS,)) & (jnp.arange(ROWS) >= ROWS // 4)
    assert 3 < int(valid.sum()) < 10
    return Batch(inputs=x, targets=jnp.where(valid, targets, -1))


def loss_fn(params, apply_fn, batch, rng):
    """Mean squared error of the valid rows, with metrics in the style of code for the original; NaN without rows."""
    valid = batch.targets > 0
    errors = jnp.where(valid, (apply_fn(params, batch.inputs) - batch.targets) ** 2, 0)
    count = valid.sum()
    metrics = {
        "loss": {"value": errors.sum(), "count": count, "log_modes": ["mean", "std"]},
        "rows": {"value": jnp.int32(batch.targets.shape[0]), "count": 1, "log_modes": ("sum",)},
        "worst": {"value": errors.max() / count, "count": count.astype(jnp.uint32), "kind": "ratio"},
        "histogram": {"value": jnp.bincount(valid, length=2), "count": jnp.full(2, batch.targets.shape[0])},
        "note": "per row",
    }
    return errors.sum() / count, (metrics, None)


def is_string(leaf):
    return isinstance(leaf, str)


def run(state, batch, num_minibatches, use_scan, jit=True):
    """Returns gradients and metrics; strings cannot leave jit, so the program returns only the numbers."""
    strings = []

    def step(state, batch):
        grads, metrics, _ = accumulate_gradients(state, batch, None, num_minibatches, loss_fn, use_scan)
        strings.append(jax.tree.map(lambda leaf: leaf if is_string(leaf) else None, metrics))
        return grads, jax.tree.map(lambda leaf: None if is_string(leaf) else leaf, metrics)

    grads, metrics = (jax.jit(step) if jit else step)(state, batch)
    return grads, metrics, strings[-1]


@FORMS
@pytest.mark.parametrize("num_minibatches", [1, 2, 8])
def test_pairs_add_up_keep_their_dtypes_and_strings_pass_through(use_scan, num_minibatches):
    state, batch = make_state(make_params()), make_batch()
    _, metrics, strings = run(state, batch, num_minibatches, use_scan)
    valid = int((batch.targets > 0).sum())
    assert strings["loss"]["log_modes"] == ["mean", "std"]
    assert strings["rows"]["log_modes"] == ("sum",)
    assert strings["worst"]["kind"] == "ratio"
    assert strings["note"] == "per row"
    assert int(metrics["loss"]["count"]) == int(metrics["worst"]["count"]) == valid
    assert int(metrics["rows"]["value"]) == ROWS
    assert int(metrics["rows"]["count"]) == num_minibatches
    assert metrics["histogram"]["value"].tolist() == [ROWS - valid, valid]
    assert metrics["histogram"]["count"].tolist() == [ROWS, ROWS]
    dtypes = {name: [str(pair[part].dtype) for part in ("value", "count")] for name, pair in metrics.items() if pair}
    assert dtypes == {
        "loss": ["float32", "int32"],
        "rows": ["int32", "int32"],
        "worst": ["float32", "uint32"],
        "histogram": ["int32", "int32"],
    }
    # The minibatches without valid rows have NaN values, which do not count.
    errors = (np.asarray(state.apply_fn(state.params, batch.inputs), np.float64) - np.asarray(batch.targets)) ** 2
    expected = errors[np.asarray(batch.targets) > 0].sum()
    np.testing.assert_allclose(metrics["loss"]["value"], expected, rtol=ROWS * 2**-23)
    assert np.isfinite(metrics["worst"]["value"])


@FORMS
@pytest.mark.parametrize("num_minibatches", [2, 4, 8])
def test_the_count_of_the_loss_weighs_minibatches_like_the_whole_batch(use_scan, num_minibatches):
    """In float64, for rows that are masked unevenly; the plain mean of minibatches is off by far more."""
    with jax.enable_x64():
        state, batch = make_state(make_params(jnp.float64)), make_batch(jnp.float64)
        grads, _, _ = run(state, batch, num_minibatches, use_scan)
        expected = jax.jit(jax.grad(lambda p: loss_fn(p, state.apply_fn, batch, None)[0]))(state.params)
        for name, leaf in expected.items():
            assert grads[name].dtype == jnp.float64
            np.testing.assert_allclose(grads[name], leaf, rtol=1e-12, atol=1e-13)

        def unweighted(p):
            size = ROWS // num_minibatches
            losses = [loss_fn(p, state.apply_fn, batch[i : i + size], None)[0] for i in range(0, ROWS, size)]
            return jnp.nanmean(jnp.stack(losses))

        naive = jax.grad(unweighted)(state.params)
        assert not np.allclose(naive["w"], expected["w"], rtol=1e-2)


@FORMS
def test_it_works_without_jit_and_with_frozen_dicts(use_scan):
    def frozen(params, apply_fn, batch, rng):
        loss, (metrics, mutable) = loss_fn(params, apply_fn, batch, rng)
        return loss, (FrozenDict(metrics), mutable)

    state, batch = make_state(make_params()), make_batch()
    _, metrics, _ = accumulate_gradients(state, batch, None, 4, frozen, use_scan)
    assert isinstance(metrics, FrozenDict)
    assert metrics["note"] == "per row"
    assert metrics["loss"]["log_modes"] == ["mean", "std"]
    assert metrics["rows"]["value"].dtype == jnp.int32
    assert int(metrics["rows"]["count"]) == 4


@FORMS
def test_narrow_floats_and_flags_add_up(use_scan):
    """A sum of ones in bfloat16 stops at 256; a sum of flags is not a flag."""

    def loss_fn(params, apply_fn, batch, rng):
        pair = {"value": batch.astype(jnp.bfloat16).sum(), "count": jnp.bfloat16(1)}
        return params * batch.sum(), ({"loss": pair, "flag": {"value": batch.sum() > 0, "count": True}}, None)

    rows = 64 if use_scan is False else 512
    batch = jnp.where(jnp.arange(rows) == 0, 256.0, 1.0)
    step = functools.partial(accumulate_gradients, num_minibatches=rows, loss_fn=loss_fn, use_scan=use_scan)
    grads, metrics, _ = jax.jit(step)(
        mw.TrainState.create(apply_fn=None, params=jnp.float32(1), tx=optax.sgd(1.0)), batch, None
    )
    assert float(grads) * rows == 256 + rows - 1
    assert metrics["loss"]["value"].dtype == metrics["loss"]["count"].dtype == jnp.bfloat16
    # The sum is exact in float32 and rounded once.
    assert float(metrics["loss"]["value"]) == float(jnp.bfloat16(256 + rows - 1))
    assert float(metrics["loss"]["count"]) == rows
    assert (int(metrics["flag"]["value"]), int(metrics["flag"]["count"])) == (rows, rows)


def returning(make_metrics):
    calls = iter(range(100))
    return lambda params, apply_fn, batch, rng: (params * batch.sum(), (make_metrics(next(calls), batch), None))


@pytest.mark.parametrize(
    ("make_metrics", "use_scan", "message"),
    [
        (
            lambda call, batch: {"modes": {"a": ["mean", "max"][call]}},
            False,
            r"metric `modes/a` is 'mean' in one minibatch and 'max' in another.\nhint: return numbers",
        ),
        (
            lambda call, batch: {"a": 1.0} if call else {"a": 1.0, "b": 2.0},
            False,
            r"two minibatches returned different metrics: b.\nhint: return the same",
        ),
        (
            lambda call, batch: {"a": "text" if call else 1.0},
            False,
            r"two minibatches returned different metrics: a.",
        ),
        (
            lambda call, batch: {"loss": {"value": batch, "count": batch}},
            True,
            r"the count of metric 'loss' has shape \(2,\), so it cannot weigh a minibatch.\nhint: return one count",
        ),
        (
            lambda call, batch: {"key": jax.random.key(0)},
            True,
            r"metric `key` is an array of key<.*>, which can be neither added up nor averaged.\nhint: return it in the",
        ),
    ],
)
def test_metrics_that_cannot_be_combined(make_metrics, use_scan, message):
    state = mw.TrainState.create(apply_fn=None, params=jnp.float32(1), tx=optax.sgd(1.0))
    with pytest.raises(mw.PlacementError, match=message):
        accumulate_gradients(state, jnp.ones(4), None, 2, returning(make_metrics), use_scan)
