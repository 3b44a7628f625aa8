"""Gradients that are mathematically zero are compared by their rounding errors, and real errors are still found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import column_dense, is_manual
from meshwright.train import Fp8, Precision
from meshwright.verify import verify
from meshwright.verify.fuzz import TOLERANCES
from meshwright.verify.rounding import MARGIN, jitter, rounding_scales

DIM = 16
RULES = mw.Rules([("bias", P()), (".*", P("fsdp", "tp"))], optional_axes=("fsdp", "tp"))


def init(key):
    keys = jax.random.split(key, 5)

    def dense(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / rows**0.5

    return {
        **{name: dense(keys[number], DIM, DIM) for number, name in enumerate("qkv")},
        **{f"{name}_bias": jnp.zeros(DIM) for name in "qk"},
        "up": dense(keys[3], DIM, 32),
        "up_bias": jnp.zeros(32),
        "down": dense(keys[4], 32, 4),
    }


def loss(params, batch, rng, error=None):
    """Attention, whose key bias has no gradient, and a BatchNorm, before which a bias has none."""
    x = batch["x"]
    q, k = (x @ params[name] + params[f"{name}_bias"] for name in "qk")
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k) / DIM**0.5)
    h = x + jnp.einsum("bts,bsd->btd", weights, x @ params["v"])
    h = h @ params["up"] + params["up_bias"]
    h = (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-5)
    value = jnp.mean((jnp.tanh(h) @ params["down"] - batch["y"]) ** 2)
    if error is not None and mw.current_mesh().size > 1:
        value += error(params)
    return value, {}


def make_job(error=None):
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((16, 8, size)).astype(np.float32) for size in (DIM, 4))
    return mw.Job(init=init, rules=RULES, loss=functools.partial(loss, error=error), batch={"x": x, "y": 10 * y})


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_gradients_that_are_zero_up_to_rounding(optimizer):
    report = verify(make_job(), meshes=["dp:8", "fsdp:2,tp:4"], views="global", optimizer=optimizer)
    report.require()
    assert len(report.cases) == 2


@pytest.mark.parametrize(
    ("error", "leaf"),
    [
        (lambda params: 1e-5 * params["k_bias"].sum(), "k_bias"),
        (lambda params: 1e-5 * params["up_bias"].sum(), "up_bias"),
        (lambda params: 1e-4 * params["down"].sum(), "down"),
    ],
)
def test_a_small_error_is_found(error, leaf):
    (case,) = verify(make_job(error), meshes="dp:8", views="global", num_steps=1).cases
    assert case.verdict == "different"
    assert case["gradients"].different == (leaf,)


def test_jitter_changes_floats_by_one_unit_in_the_last_place():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    tree = {"x": x, "mask": np.array([0.0, 1.0], np.float32), "tokens": np.arange(3), "key": jax.random.key(0)}
    changed = jitter(tree, 1)
    assert changed["x"].dtype == np.float32
    assert (changed["x"] != x).mean() > 0.5
    np.testing.assert_allclose(changed["x"], x, rtol=2 * np.finfo(np.float32).eps)
    assert changed["mask"].tolist() == [0.0, 1.0]
    assert changed["tokens"].tolist() == [0, 1, 2]
    assert changed["key"] is tree["key"]
    assert np.array_equal(changed["x"], jitter(tree, 1)["x"])
    assert not np.array_equal(changed["x"], jitter(tree, 2)["x"])
    coarse = np.abs(jitter(tree, 1, dtype=jnp.bfloat16)["x"] / x - 1).max()
    assert coarse == pytest.approx(2**-7, rel=0.01)


def test_samples_that_are_not_finite_do_not_count():
    samples = [{"w": np.array([1.0, np.nan])}, {"w": np.array([1.5, 2.0])}]
    assert rounding_scales({"w": np.array([1.0, 2.0])}, samples) == {"w": 0.5 * MARGIN}


# --- fp8 ---


def fp8_job(broken):
    def loss(params, batch, rng, fp8=None):
        weights = params if fp8 is None else fp8.weights(params)
        value = jnp.mean((column_dense(jnp.tanh(batch["x"]), weights["up"], axis=None) - batch["y"]) ** 2)
        if broken and is_manual("dp"):
            value = jnp.where(lax.axis_index("dp") == 0, value, lax.stop_gradient(value))
        return value, {}

    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((16, 16), np.float32), "y": rng.standard_normal((16, 32), np.float32)}
    return mw.Job(
        init=lambda key: {"up": jax.random.normal(key, (16, 32))}, rules=[("up", mw.P())], loss=loss, batch=batch
    )


@pytest.mark.parametrize("broken", [False, True])
def test_the_tolerance_of_fp8_is_a_rounding_of_a_gradient(broken):
    """Half of a gradient is missing: more than fp8's rounding, and less than all."""
    assert TOLERANCES["fp8"] == float(jnp.finfo(jnp.float8_e5m2).eps) / 2
    precision = Precision(compute="bfloat16", fp8=Fp8(least_dim=16))
    report = verify(
        fp8_job(broken), meshes="dp:2", views="local", precision=precision, devices=2, tolerance=TOLERANCES["fp8"]
    )
    assert report.ok == (not broken)


def test_every_named_precision_has_a_tolerance():
    assert all(Precision.named(name) for name in TOLERANCES)
    with pytest.raises(mw.MeshwrightError, match="use one of: float32, mixed, bfloat16, fp8"):
        Precision.named("nothing of it")
