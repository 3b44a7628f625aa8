"""Weights in fp8 that are cast once for all minibatches, against weights cast where they are used.

Both cast the same values with the same scales, so results are equal bit for bit. A loss without `fp8_weights=` has its
weights cast where they are used.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.parallel import column_dense, row_dense
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train import Fp8, Precision, init_state, language_job, make_gradients, make_train_step, state_layout
from meshwright.train.fp8_weights import make_weight_casts
from meshwright.train.state import params_layout
from meshwright.tree import named_leaves

MODELS = {
    "decoder": Decoder(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=64),
    "xlstm": XLSTM(vocab_size=64, num_layers=2, d_model=64, num_heads=4, d_ff=64, qk_factor=1.0, chunk_size=8),
}
FP8 = Fp8(least_dim=16, history=3)
OPTIMIZER = optax.sgd(0.1)
MINIBATCHES = 4


@functools.cache
def job_of(model="decoder", ways=1, in_place=False, **run):
    # 3 rows of 24 tokens in a minibatch of a device, so that no input has the shape of a weight.
    job = language_job(MODELS[model], batch_size=3 * MINIBATCHES * ways, num_tokens=24, run=Execution(**run))
    return without_casts(job) if in_place else job


def without_casts(job):
    """Returns the job with a loss that does not take weights in fp8."""

    def loss(params, batch, rng, *, gather=None, remat="none", fp8=None):
        return job.loss(params, batch, rng, gather=gather, remat=remat, fp8=fp8)

    return dataclasses.replace(job, loss=loss)


@functools.cache
def arguments(model, scaling):
    """Returns parameters and a scaling state that some steps could have left."""
    job = job_of(model)
    params = job.init(jax.random.key(0))
    state = precision_of(scaling).fp8.init(params)
    filled = jax.tree.map(lambda leaf: jax.random.uniform(jax.random.key(1), leaf.shape) * 4, state)
    return jax.device_get((params, filled))


def precision_of(scaling="delayed"):
    # In bfloat16, so that gathers of other weights differ from those in fp8.
    return Precision(compute="bfloat16", fp8=dataclasses.replace(FP8, scaling=scaling))


def make(mesh, *, model="decoder", in_place=False, view="local", scaling="delayed", num_minibatches=None, **options):
    """Returns a function of parameters and scaling state, and the parameters' layout."""
    mesh = mw.create_mesh(mesh, devices=math.prod(int(part.split(":")[1]) for part in mesh.split(",")))
    ways = math.prod(mesh.shape.get(axis, 1) for axis in ("dp", "fsdp"))
    job, precision = job_of(model, ways, in_place, **options.pop("run", {})), precision_of(scaling)
    layout = state_layout(job, OPTIMIZER, mesh, precision=precision)
    count = MINIBATCHES if num_minibatches is None else num_minibatches
    gradients = make_gradients(job, layout, view=view, num_minibatches=count, precision=precision, **options)
    batch = jax.tree.map(jax.numpy.asarray, job.make_batch(0))

    def run(params, fp8):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            result, squares = gradients(params, batch, None, None, fp8)
        return result.loss, result.grads, result.fp8.tree, squares

    return jax.jit(run, in_shardings=(layout.shardings.params, None)), layout


# --- Each weight is cast once ---


def casts_of_weights(jaxpr, shapes, loop, inside=False):
    """Returns the number of weights' elements that are cast to e4m3 before a loop of `loop` steps, and within it."""
    found = np.zeros(2, int)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "convert_element_type":
            cast = eqn.outvars[0].aval
            if cast.dtype == jax.numpy.float8_e4m3fn and cast.shape[-2:] in shapes:
                found[int(inside)] += cast.size
        here = inside or (eqn.primitive.name == "scan" and eqn.params["length"] == loop)
        times = eqn.params["length"] if eqn.primitive.name == "scan" and here == inside else 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda node: hasattr(node, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += times * casts_of_weights(inner, shapes, loop, here)
    return found


def weights_of(layout, part):
    found = [leaf for leaf in layout.leaves if leaf.name.startswith("params/")]
    names = FP8.names(job_of().init(jax.random.key(0)))
    return [getattr(leaf, part) for leaf in found if leaf.name.removeprefix("params/") in names]


@pytest.mark.parametrize(
    ("mesh", "view", "options"),
    [
        ("dp:1", "local", {}),
        ("dp:1", "local", {"run": {"layers": "unroll"}}),
        ("fsdp:2", "local", {"sync": "every"}),
        ("fsdp:2", "local", {"sync": "hybrid"}),
        ("fsdp:2", "local", {"sync": "hybrid", "remat": "full"}),
        ("fsdp:2", "local", {"sync": "once"}),
        ("tp:2", "local", {}),
        ("dp:2,fsdp:2,tp:2", "global", {}),
    ],
    ids=str,
)
def test_each_weight_is_cast_once(mesh, view, options):
    """Before the loop over minibatches, and not within it; a loss without `fp8_weights=` casts in each."""

    def count(**more):
        run, layout = make(mesh, view=view, **options, **more)
        own = weights_of(layout, "shape" if view == "global" else "shard_shape")
        halves = ((1, 1), (1, 2), (2, 1))
        shapes = {(shape[-2] // a, shape[-1] // b) for shape in weights_of(layout, "shape") for a, b in halves}
        traced = run.trace(layout.abstract.params, layout.abstract.fp8)
        return tuple(casts_of_weights(traced.jaxpr.jaxpr, shapes, MINIBATCHES)), sum(map(math.prod, own))

    found, whole = count()
    assert found == (whole, 0)
    (before, within), whole = count(in_place=True)
    assert before == 0
    assert within >= whole / (2 if view == "global" else 1)  # in a matmul over tp, each device casts its half


def test_one_minibatch_casts_weights_where_they_are_used():
    traced = [
        make("dp:1", num_minibatches=1, in_place=in_place)[0].trace(*arguments("decoder", "delayed"))
        for in_place in (False, True)
    ]
    once, in_place = (
        [eqn.primitive.name for eqn in one.jaxpr.jaxpr.eqns if eqn.primitive.name != "pjit"] for one in traced
    )
    assert once == in_place


@pytest.mark.parametrize(
    ("form", "rules", "by_layer"),
    [
        ("scan", None, False),
        (1, None, False),
        (2, None, True),
        ("unroll", None, True),
        ("unroll", [("layers/", P("fsdp")), (".*", P())], None),  # cast where they are used
        ("scan", [("layers/", P("fsdp")), (".*", P())], False),
    ],
)
def test_weights_of_unrolled_layers_are_arrays_of_their_own(form, rules, by_layer):
    job = job_of("decoder", 2, layers=form)
    job = job if rules is None else dataclasses.replace(job, rules=rules)
    layout = params_layout(state_layout(job, OPTIMIZER, mw.create_mesh("fsdp:2", devices=2)))
    dtypes = precision_of().compute_dtypes(layout.abstract)
    found = make_weight_casts(
        job, layout, FP8, dtypes, takes=["fp8_weights"], num_minibatches=MINIBATCHES, by_layer=False
    )
    assert (None if found is None else found.by_layer) is by_layer


# --- Results ---

CASES = [
    ("dp:1", "decoder", "local", {"num_minibatches": 2}),
    ("dp:1", "decoder", "local", {"scaling": "current", "run": {"layers": "unroll"}}),
    ("dp:2,fsdp:2,tp:2", "decoder", "local", {"sync": "every"}),
    ("dp:2,fsdp:2,tp:2", "decoder", "local", {"sync": "hybrid", "remat": "dots"}),
    ("dp:2,fsdp:2,tp:2", "decoder", "local", {"sync": "once", "scaling": "current"}),
    ("fsdp:2", "decoder", "local", {"sync": "once", "run": {"layers": "unroll"}}),
    ("tp:2", "decoder", "local", {"run": {"sequence_parallel": False}}),
    ("fsdp:2,tp:2", "xlstm", "local", {"sync": "hybrid"}),
    ("dp:2,fsdp:2,tp:2", "decoder", "global", {}),
    ("fsdp:4", "xlstm", "global", {"scaling": "current"}),
]


@pytest.mark.slow  # two programs with all collectives for each case
@pytest.mark.parametrize(("mesh", "model", "view", "options"), CASES, ids=str)
def test_results_equal_those_of_weights_cast_in_place(mesh, model, view, options):
    given = arguments(model, options.get("scaling", "delayed"))
    got, want = (
        jax.device_get(make(mesh, model=model, view=view, in_place=in_place, **options)[0](*given))
        for in_place in (False, True)
    )
    for leaf, leaf_1 in zip(named_leaves(got), named_leaves(want), strict=True):
        np.testing.assert_array_equal(leaf.value, leaf_1.value, err_msg=leaf.name)


@pytest.mark.parametrize("sync", ["every", "hybrid", "once"])
def test_a_loss_without_layers_takes_casts(sync):
    """Parameters that the loss does not gather itself are gathered before it, in fp8 as well; also those in lists."""

    def loss(params, batch, rng, *, fp8=None, fp8_weights=None):
        weights = fp8.weights(params, casts=fp8_weights)
        (block,) = weights["blocks"]
        h = jax.nn.silu(column_dense(batch["x"], block["up"], axis=None))
        y = row_dense(h, block["down"], axis=None) * params["scale"]
        return ((y - batch["x"]) ** 2).mean(), {}

    def init(key):
        up, down = (jax.random.normal(key, shape) / 8 for shape in ((32, 64), (64, 32)))
        return {"blocks": [{"up": up, "down": down}], "scale": jax.numpy.ones(32)}

    rules = [("up", P("fsdp")), ("down", P(None, "fsdp")), ("scale", P())]
    batch = {"x": jax.random.normal(jax.random.key(1), (24, 32))}
    mesh = mw.create_mesh("dp:2,fsdp:2", devices=4)
    precision = Precision(fp8=Fp8(matmuls="up|down", least_dim=16))
    found, sent = [], []
    for takes in (loss, lambda params, batch, rng, *, fp8=None: loss(params, batch, rng, fp8=fp8)):
        job = mw.Job(init=init, rules=rules, loss=takes)
        layout = state_layout(job, OPTIMIZER, mesh, precision=precision)
        state = init_state(job, OPTIMIZER, layout, jax.random.key(0), precision=precision)
        options = {"view": "local", "sync": sync, "num_minibatches": 2, "precision": precision}
        step = make_train_step(job, OPTIMIZER, layout, donate=False, **options)
        found.append(jax.device_get(step(state, batch)[0].params))
        schedule = read_schedule(step.compile(batch).as_text())
        sent.append(sum(one.bytes_moved * one.trips for one in schedule.collectives if one.kind == "all-gather"))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert 4 * sent[0] == sent[1] > 0  # float32 otherwise


def test_steps_resume_bit_for_bit(tmp_path):
    from meshwright.checkpoint import Checkpoints

    job, precision = job_of("decoder", 2), precision_of()
    layout = state_layout(job, OPTIMIZER, mw.create_mesh("fsdp:2", devices=2), precision=precision)
    state = init_state(job, OPTIMIZER, layout, jax.random.key(0), precision=precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision, num_minibatches=MINIBATCHES, donate=False)
    state, _ = step(state, job.make_batch(0))
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, step=1, layout=layout, facts={})
        checkpoints.wait()
        resumed = checkpoints.restore(layout).state
    ends = [step(start, job.make_batch(1))[0] for start in (state, resumed)]
    for got, want in zip(*(jax.tree.leaves((end.params, end.fp8)) for end in ends), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# --- Bytes ---


@pytest.mark.parametrize(
    ("view", "options", "share"),
    [
        ("local", {"sync": "every"}, 1.0),  # in fp8 either way
        ("local", {"sync": "hybrid"}, 1.0),
        ("local", {"sync": "once"}, 0.5),  # in bfloat16 if cast later
        ("global", {}, 1.0),
    ],
    ids=str,
)
def test_gathers_of_weights_do_not_grow(view, options, share):
    sent = {}
    for in_place in (False, True):
        run, layout = make("fsdp:2", view=view, in_place=in_place, **options)
        text = run.lower(layout.abstract.params, layout.abstract.fp8).compile().as_text()
        gathers = [one for one in read_schedule(text).collectives if one.kind == "all-gather"]
        sent[in_place] = sum(one.bytes_moved * one.trips for one in gathers)
    assert sent[False] <= share * sent[True]
