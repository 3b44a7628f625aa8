"""Model state, declared metrics and frozen parameters of a train step, against one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import meshwright as mw
from meshwright import P
from meshwright.errors import JobError, LayoutError, MeshwrightError
from meshwright.mesh.axes import is_manual
from meshwright.metrics import Last, Max, Mean, Min, Sum
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train.model_state import state_reductions
from meshwright.train.state import trainable_leaves
from meshwright.tree import named_leaves

NUM_ROWS, WIDTH, HIDDEN = 16, 8, 16
RULES = mw.Rules(
    [("embed", P(None, "fsdp")), ("head/w", P("fsdp", "tp")), ("head/b", P("tp"))],
    optional_axes=("fsdp", "tp"),
)
MESHES = ("dp:8", "fsdp:8", "dp:2,fsdp:2,tp:2")


def init(key):
    first, second = jax.random.split(key)
    head = {"w": 0.3 * jax.random.normal(second, (HIDDEN, WIDTH)), "b": jnp.zeros(WIDTH)}
    return {"embed": 0.3 * jax.random.normal(first, (WIDTH, HIDDEN)), "head": head}


def model_state(key):
    statistics = {"mean": jnp.zeros(HIDDEN), "var": jnp.ones(HIDDEN)}
    return {"norm": statistics, "seen": jnp.int32(0), "start": jax.random.normal(key, ())}


def loss(params, state, batch, rng, *, axes=()):
    """A regression with BatchNorm between two matmuls, and a metric of each kind."""
    hidden = batch["x"] @ params["embed"]
    here = tuple(axis for axis in axes if is_manual(axis))

    def mean_of(x):
        return lax.pmean(x.mean(0), here) if here else x.mean(0)

    mean = mean_of(hidden)
    var = mean_of((hidden - mean) ** 2)
    old = state["norm"]
    if rng is None:
        mean, var = old["mean"], old["var"]
    out = jnp.tanh((hidden - mean) * lax.rsqrt(var + 1e-5)) @ params["head"]["w"] + params["head"]["b"]
    norm = {"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var}
    seen = state["seen"] + (lax.psum(len(out), here) if here else len(out))
    metrics = {
        "error": jnp.abs(out - batch["y"]).mean(),
        "outputs": Mean(out.mean(0), weight=len(out)),
        "signs": Sum((out > 0).sum(0)),
        "largest": Max(out.max(0)),
        "smallest": Min(out.min()),
        "rate": Last(jnp.float32(0.25)),
        "pair": ((out > 0).sum(), out.size),
        "dict": {"value": (out > 1).sum(), "count": out.size},
    }
    return ((out - batch["y"]) ** 2).mean(), metrics, {"norm": norm, "seen": seen, "start": state["start"]}


def make_batch(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32) for name in ("x", "y")}


JOB = mw.Job(init=init, rules=RULES, loss=loss, batch=make_batch(0), model_state=model_state)


def run(job, mesh, view=None, num_minibatches=1, num_steps=2):
    """Returns parameters, model state, metrics and evaluation metrics after a few SGD steps, on the host."""
    mesh = mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None)
    optimizer = optax.sgd(0.5)
    layout = mw.state_layout(job, optimizer, mesh)
    state = mw.init_state(job, optimizer, layout, jax.random.key(0))
    step = mw.make_train_step(job, optimizer, layout, view=view, num_minibatches=num_minibatches)
    for number in range(num_steps):
        state, metrics = step(state, make_batch(number))
    evaluated = mw.make_eval_step(job, layout, view=view)(state, make_batch(9))
    return jax.device_get((state.params, state.model_state, metrics, evaluated))


reference = functools.cache(lambda num_minibatches=1: run(JOB, "dp:1", num_minibatches=num_minibatches))


def assert_equal(got, wanted):
    # Values are of order 1 after sums of at most 16 x 16 terms in float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, wanted)


@pytest.mark.parametrize("mesh", MESHES)
def test_state_and_metrics_equal_one_device(mesh):
    got = run(JOB, mesh)
    assert_equal(got, reference())
    assert got[1]["seen"] == 2 * NUM_ROWS
    assert got[2]["signs"].dtype == np.int32
    assert "bad_leaf" in got[2]
    assert set(got[3]) == {*got[2]} - {"grad_norm", "skipped", "skipped_in_a_row", "bad_leaf"}


@pytest.mark.parametrize("mesh", ["dp:8", "dp:2,fsdp:2,tp:2"])
def test_minibatches_pass_the_state_on_as_on_one_device(mesh):
    got = run(JOB, mesh, num_minibatches=2)
    assert_equal(got, reference(2))
    with pytest.raises(AssertionError):  # statistics of half a batch are others
        assert_equal(got[1], reference()[1])


def test_synchronized_layers_equal_one_device_in_the_local_view():
    job = dataclasses.replace(JOB, loss=functools.partial(loss, axes=("dp", "fsdp")))
    assert_equal(run(job, "dp:2,fsdp:4", view="local"), reference())


def test_devices_combine_their_states_in_the_local_view():
    job = dataclasses.replace(JOB, model_state_reduce=[("seen", "sum"), ("var", "max")])
    state = run(job, "dp:8", view="local", num_steps=1)[1]
    rows = (
        make_batch(0)["x"] @ jax.device_get(jax.jit(init)(jax.random.split(jax.random.key(0))[0]))["embed"]
    ).reshape(8, 2, HIDDEN)
    np.testing.assert_allclose(state["norm"]["mean"], 0.1 * rows.mean((0, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state["norm"]["var"], 0.9 + 0.1 * rows.var(1).max(0), rtol=1e-5)
    assert state["seen"] == NUM_ROWS
    assert run(job, "dp:8", view="local", num_steps=3)[1]["seen"] == 3 * NUM_ROWS  # changes add up, not states


def test_a_skipped_step_keeps_the_model_state():
    optimizer = optax.sgd(0.5)
    layout = mw.state_layout(JOB, optimizer, mw.create_mesh("dp:8"))
    state = mw.init_state(JOB, optimizer, layout, jax.random.key(0))
    step = mw.make_train_step(JOB, optimizer, layout, view="global", donate=False)
    batch = make_batch(0)
    batch["x"][3, 2] = np.nan
    after, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.model_state), jax.device_get(state.model_state))


def test_eval_loss_and_raw_metrics_over_batches():
    def eval_loss(params, state, batch, rng):
        assert rng is None
        value, _, state = loss(params, state, batch, rng)
        return (value * len(batch["x"]), len(batch["x"])), {"seen": Sum(jnp.int32(len(batch["x"])))}, state

    job = dataclasses.replace(JOB, eval_loss=eval_loss)
    layout = mw.state_layout(job, optax.sgd(0.5), mw.create_mesh("dp:8"))
    state = mw.init_state(job, optax.sgd(0.5), layout, jax.random.key(0))
    evaluate = mw.make_eval_step(job, layout, view="global", raw=True)
    batch = make_batch(9)
    halves = ({name: leaf[:8] for name, leaf in batch.items()}, {name: leaf[8:] for name, leaf in batch.items()})
    merged = mw.metrics.compute(mw.metrics.merge(*(evaluate(state, half) for half in halves)))
    whole = mw.make_eval_step(job, layout, view="global")(state, make_batch(9))
    assert_equal(merged, jax.device_get(whole))
    assert int(merged["seen"]) == NUM_ROWS


# --- Layouts and errors ---


def test_the_state_is_replicated_unless_a_rule_splits_it():
    layout = mw.state_layout(JOB, optax.sgd(0.5), mw.create_abstract_mesh("dp:4,tp:2"))
    assert layout["model_state/norm/mean"].spec == P()
    assert layout["model_state/norm/mean"].reason == "model state"
    split = dataclasses.replace(JOB, rules=mw.Rules([("norm/", P("tp")), *RULES], optional_axes=RULES.optional_axes))
    layout = mw.state_layout(split, optax.sgd(0.5), mw.create_mesh("dp:4,tp:2"))
    assert layout["model_state/norm/mean"].spec == P("tp")
    assert_equal(run(split, "dp:4,tp:2"), reference())
    with pytest.raises(LayoutError, match=r"`model_state/norm/mean` is split as P\('tp'\), but the local view needs"):
        mw.make_train_step(dataclasses.replace(split, local_axes=("tp",)), optax.sgd(0.5), layout, view="local")


def changed_state(params, state, batch, rng):
    value, metrics, state = loss(params, state, batch, rng)
    return value, metrics, state | {"seen": state["seen"].astype(jnp.float32)}


def lost_state(params, state, batch, rng):
    value, metrics, state = loss(params, state, batch, rng)
    return value, metrics, {"norm": state["norm"], "seen": state["seen"]}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (changed_state, r"returned `seen` of the model state as float32\[\]; it got int32\[\]"),
        (lost_state, r"another structure: missing \['start'\], extra nothing"),
        (lambda *args: loss(*args)[:2], r"must return \(loss, metrics, model_state\), .* returned .*, dict"),
        (lambda *args: (loss(*args)[0], {"n": jnp.arange(3)}, args[1]), r"metric `n` is int32\[3\], .* not declared"),
        (lambda *args: (loss(*args)[0], {"n": jnp.int32(3)}, args[1]), r"metric `n` is int32, .* not declared"),
        (lambda *args: (loss(*args)[0], {"n": "mean"}, args[1]), r"metric `n` is str, .* not declared"),
    ],
)
def test_a_wrong_result_of_the_loss_is_named(broken, message):
    with pytest.raises(JobError, match=message):
        run(dataclasses.replace(JOB, loss=broken), "dp:8", num_steps=1)


def test_a_state_without_model_state_in_the_job_is_named():
    job = dataclasses.replace(JOB, model_state=None, loss=lambda params, batch, rng: (0.0, {}, {}))
    with pytest.raises(JobError, match=r"returned float, dict, dict.\nhint: pass Job\(..., model_state=...\)"):
        run(job, "dp:8", num_steps=1)


def test_reductions_of_a_state():
    state = {"a": jnp.zeros(2), "n": jnp.int32(0)}
    assert state_reductions(state, "max") == ["max", "max"]
    assert state_reductions(state, [("n", "min")]) == ["mean", "min"]
    with pytest.raises(JobError, match="`n` is int32, which has no mean"):
        state_reductions(state, [("n", "mean")])
    with pytest.raises(JobError, match=r"unknown reduction 'men'(.|\n)*did you mean 'mean'"):
        state_reductions(state, "men")


# --- Frozen parameters ---


def plain_loss(params, batch, rng):
    out = jnp.tanh(batch["x"] @ params["embed"]) @ params["head"]["w"] + params["head"]["b"]
    return ((out - batch["y"]) ** 2).mean(), {}


FROZEN = mw.Job(init=init, rules=RULES, loss=plain_loss, batch=make_batch(0), frozen="embed")


def adam(job, mesh, view, sync=None, num_minibatches=1):
    mesh = mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None)
    optimizer = optax.adam(0.1)
    layout = mw.state_layout(job, optimizer, mesh)
    state = mw.init_state(job, optimizer, layout, jax.random.key(0))
    first = jax.device_get(state.params)
    options = {"view": view, "sync": sync, "num_minibatches": num_minibatches, "clip": 0.01}
    step = mw.make_train_step(job, optimizer, layout, **options)
    for number in range(2):
        state, metrics = step(state, make_batch(number))
    return first, jax.device_get(state.params), jax.device_get(metrics), state


@pytest.mark.parametrize(
    ("mesh", "view", "sync"),
    [("dp:8", "local", None), ("dp:2,fsdp:4", "local", "once"), ("dp:2,fsdp:2,tp:2", "global", None)],
)
def test_frozen_parameters_stay_and_the_rest_equals_one_device(mesh, view, sync):
    first, last, metrics, state = adam(FROZEN, mesh, view, sync, 2)
    wanted = adam(FROZEN, "dp:1", "global")
    np.testing.assert_array_equal(last["embed"], first["embed"])
    # Adam divides by its own estimate of the gradient's size, so errors are relative to the learning rate.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5), last, wanted[1])
    np.testing.assert_allclose(metrics["grad_norm"], wanted[2]["grad_norm"], rtol=1e-5)
    assert state.opt_state[0].mu["embed"] is None
    whole = adam(dataclasses.replace(FROZEN, frozen=()), "dp:1", "global")
    assert whole[2]["grad_norm"] > 1.01 * metrics["grad_norm"]  # the norm leaves out frozen parameters


def test_nothing_is_sent_for_frozen_parameters():
    def bytes_sent(job):
        layout = mw.state_layout(job, optax.sgd(0.1), mw.create_mesh("dp:8"))
        step = mw.make_train_step(job, optax.sgd(0.1), layout, view="local")
        schedule = read_schedule(step.lower(make_batch(0)).compile().as_text())
        return sum(one.trips * one.bytes_moved for one in schedule.collectives)

    embed, head = 4 * WIDTH * HIDDEN, 4 * (HIDDEN * WIDTH + WIDTH)
    everything, some = bytes_sent(dataclasses.replace(FROZEN, frozen=())), bytes_sent(FROZEN)
    assert everything - some == embed
    assert some >= head


def test_patterns_of_frozen_parameters_are_checked():
    with pytest.raises(JobError, match=r"'embd' matches no parameter(.|\n)*did you mean 'embed'"):
        adam(dataclasses.replace(FROZEN, frozen=["embd"]), "dp:8", "global")
    with pytest.raises(JobError, match="freezes all 3 parameters, so there is nothing to train"):
        adam(dataclasses.replace(FROZEN, frozen=".*"), "dp:8", "global")


def test_only_named_parameters_are_trained():
    job = dataclasses.replace(FROZEN, frozen=(), trained=["head/w"])
    names = [leaf.name for leaf in named_leaves(jax.eval_shape(init, jax.random.key(0)))]
    learns = dict(zip(names, trainable_leaves(job, jax.eval_shape(init, jax.random.key(0))), strict=True))
    assert learns == {"embed": False, "head/b": False, "head/w": True}
    with pytest.raises(JobError, match=r"trained: 'head/v' matches no parameter(.|\n)*did you mean 'head/w'"):
        adam(dataclasses.replace(job, trained="head/v"), "dp:8", "global")
    with pytest.raises(JobError, match="frozen='head' and trained='head/w' freezes all 3 parameters"):
        adam(dataclasses.replace(job, trained="head/w", frozen="head"), "dp:8", "global")


# --- Moving averages ---


def test_the_average_of_parameters_equals_a_loop_on_one_device():
    decay, optimizer, batch = 0.75, optax.sgd(0.1), make_batch(0)

    def run(mesh, view, zero_axis=None, bad=False):
        mesh = mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None)
        layout = mw.state_layout(FROZEN, optimizer, mesh, ema=decay, zero_axis=zero_axis)
        state = mw.init_state(FROZEN, optimizer, layout, jax.random.key(0))
        step = mw.make_train_step(FROZEN, optimizer, layout, view=view, ema=decay)
        wanted = jax.device_get(state.params["head"])
        for _ in range(3):
            state, _ = step(state, batch)
            new = jax.device_get(state.params["head"])
            wanted = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, wanted, new)
        if bad:
            state, _ = step(state, {**batch, "x": np.full_like(batch["x"], np.nan)})
        evaluate = mw.train.make_eval_step(FROZEN, layout, ema=True)
        return layout, jax.device_get(state), wanted, float(evaluate(state, batch)["loss"])

    _, alone, wanted, loss = run("dp:1", "global")
    average = {"embed": alone.params["embed"], "head": wanted}
    np.testing.assert_allclose(loss, plain_loss(average, batch, None)[0], rtol=1e-6)
    layout, state, wanted, found = run("dp:2,fsdp:2,tp:2", "global", bad=True)  # a skipped step keeps the average
    assert layout["ema/head/w"].spec == layout["params/head/w"].spec
    assert state.ema["embed"] is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), state.ema["head"], wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.ema["head"], alone.ema["head"])
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    layout = mw.state_layout(FROZEN, optimizer, mw.create_abstract_mesh("dp:8"), ema=decay, zero_axis="dp")
    assert layout["ema/head/w"].spec == P("dp")


def test_a_decay_must_fit_the_state():
    layout = mw.state_layout(FROZEN, optax.sgd(0.1), mw.create_mesh("dp:8"))
    for options, message in (
        ({"ema": 0.9}, "the layout has no average of the parameters, but the step has ema=0.9"),
        ({"ema": 1.0}, "ema must be above 0 and below 1; got 1.0"),
    ):
        with pytest.raises(MeshwrightError, match=message):
            mw.make_train_step(FROZEN, optax.sgd(0.1), layout, **options)
    with pytest.raises(MeshwrightError, match="the state has no average to evaluate"):
        mw.train.make_eval_step(FROZEN, layout, ema=True)
