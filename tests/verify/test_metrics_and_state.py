"""`verify` compares the job's metrics, by their declared meaning, and its model state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.parallel import is_manual
from meshwright.verify import verify

RULES = mw.Rules([("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))], optional_axes=("fsdp", "tp"))


def init(key):
    k_up, k_down = jax.random.split(key)
    return {"up": jax.random.normal(k_up, (8, 16)) / 3, "down": jax.random.normal(k_down, (16, 4)) / 4}


def batch(rows=16):
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((rows, size)).astype(np.float32) for size in (8, 4))
    return {"x": x, "y": y}


def with_metrics(params, batch, rng, wrong=False):
    y = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    errors = ((y - batch["y"]) ** 2).mean(-1)
    value = (errors.sum(), jnp.float32(errors.size))
    good = {"positive": mw.metrics.Sum((y > 0).sum(0)), "largest": mw.metrics.Max(y.max()), "error": value}
    return value, good | ({"perplexity": jnp.exp(errors.mean())} if wrong else {})


def with_state(params, state, batch, rng):
    h = batch["x"] @ params["up"]
    axes = [axis for axis in ("dp", "fsdp") if is_manual(axis)]

    def mean_of(x):
        return lax.pmean(x.mean(0), axes) if axes else x.mean(0)

    mean = mean_of(h)
    y = jnp.tanh((h - mean) * lax.rsqrt(mean_of((h - mean) ** 2) + 1e-5)) @ params["down"]
    y = mw.parallel.dropout(y, 0.25, rng)
    return jnp.mean((y - batch["y"]) ** 2), {}, {"mean": 0.9 * state["mean"] + 0.1 * mean}


def make_job(loss, **changes):
    return mw.Job(init=init, rules=RULES, loss=loss, batch=batch(), **changes)


def state_job():
    return make_job(with_state, model_state=lambda key: {"mean": jnp.zeros(16)})


def test_metrics_of_every_kind_are_compared():
    report = verify(make_job(with_metrics), meshes="dp:4,fsdp:2", num_minibatches=(1, 2), num_steps=1)
    report.require()
    assert all(case["metrics"].num_leaves == 4 for case in report.cases)  # and the number of tokens
    assert "metrics" in report.table()
    assert "model state" not in report.table()


def test_a_metric_that_is_not_a_mean_over_rows():
    loss = functools.partial(with_metrics, wrong=True)
    report = verify(make_job(loss), meshes="dp:8", num_steps=1)
    assert [case.verdict for case in report.cases] == ["equal", "different"]
    case = report.cases[1]
    assert case["metrics"].different == ("perplexity",)
    assert case.causes[0].kind == "metric"
    assert "the metric `perplexity` does not: the values of 8 devices do not combine to that of the whole batch" in str(
        report
    )


def test_a_model_state_is_compared_with_one_device_and_as_many_minibatches():
    report = verify(state_job(), meshes="dp:4,fsdp:2", views=("global", "local"), num_minibatches=(1, 2))
    assert [(case.view, case.num_minibatches, case.verdict) for case in report.cases] == [
        ("global", 1, "equal"), ("global", 2, "equal"), ("local", 1, "equal"), ("local", 2, "equal")
    ]  # fmt: skip
    assert report.cases[0]["model state"].num_leaves == 1


def test_statistics_of_single_devices_are_found():
    job = make_job(
        lambda params, state, batch, rng: (
            jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2),
            {},
            {"largest": jnp.abs(batch["x"]).max(0)},
        ),
        model_state=lambda key: {"largest": jnp.zeros(8)},
        model_state_reduce="mean",
    )
    report = verify(job, meshes="dp:8", views=("global", "local"), num_steps=1)
    assert [case.verdict for case in report.cases] == ["equal", "different"]
    assert report.cases[1]["model state"].different == ("largest",)
    assert report.cases[1].causes[0].kind == "model state"
