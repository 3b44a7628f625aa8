"""Embedding and head of a pipeline: stored in slices, one for each stage, and gathered once per step."""

import faulthandler
import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.checkpoint.store import Checkpoints
from meshwright.mesh.string import parse_mesh
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.parallel import Gather, gather_array, local_map, pipeline
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train import init_state, language_job, make_train_step, state_layout
from meshwright.train.gradients import make_gradients

SIZES = {"vocab_size": 32, "num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 24}
ENDS = ("embed/table", "head/kernel")
UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # compiling takes most of the time


@pytest.fixture(autouse=True)
def time_limit():
    """Ends the process on a deadlock, which compiled code cannot interrupt."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def make_job(kind=Decoder, *, pipeline="1f1b", num_microbatches=2, **changes):
    run = Execution(pipeline=pipeline, num_microbatches=num_microbatches)
    return language_job(kind(**(SIZES | changes)), batch_size=16, num_tokens=8, run=run)


def mesh_of(text):
    return mw.create_mesh(text, devices=math.prod(parse_mesh(text).sizes))


def gradients(job, mesh, **options):
    layout = state_layout(job, optax.sgd(0.1), mesh_of(mesh))
    params = init_state(job, optax.sgd(0.1), layout, jax.random.key(0)).params
    compute = jax.jit(make_gradients(job, layout, **options), compiler_options=UNOPTIMIZED)
    result, _ = compute(params, job.make_batch(0), None)
    return jax.device_get((result.loss, result.grads))


def assert_close(got, expected):
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


INDIVISIBLE = {"num_layers": 4, "vocab_size": 33, "d_model": 18, "num_heads": 3}  # for four stages

# --- Storage ---


@pytest.mark.parametrize("kind", [Decoder, XLSTM])
@pytest.mark.parametrize("mesh", ["pp:4", "dp:2,pp:2", "pp:2,fsdp:2,tp:2", "fsdp:2,pp:4"])
def test_a_device_stores_a_slice_of_parameters_and_of_their_statistics(kind, mesh):
    mesh = mw.create_abstract_mesh(mesh)
    layout = state_layout(make_job(kind, num_layers=4), optax.adam(1e-3), mesh, ema=0.9)
    ways = math.prod(size for axis, size in mesh.shape.items() if axis != "dp")
    for name in ENDS:
        for part in ("params", "opt_state/0/mu", "opt_state/0/nu", "ema"):
            leaf = layout[f"{part}/{name}"]
            assert leaf.bytes_per_device * ways == leaf.bytes_total, (leaf.name, leaf.spec)


def test_an_axis_of_one_device_changes_nothing():
    job, optimizer = make_job(), optax.adam(1e-3)
    one, none = (state_layout(job, optimizer, mw.create_abstract_mesh(mesh)) for mesh in ("fsdp:2,pp:1", "fsdp:2"))
    for name in ENDS:
        assert one[f"params/{name}"].spec == none[f"params/{name}"].spec


def test_rules_made_from_rules_split_the_same():
    job, mesh = make_job(), mw.create_abstract_mesh("pp:2")
    copied = replace(job, rules=mw.Rules(job.rules, optional_axes=job.rules.optional_axes))
    assert state_layout(copied, optax.sgd(0.1), mesh) == state_layout(job, optax.sgd(0.1), mesh)
    assert "spread over 'pp'" in str(state_layout(job, optax.sgd(0.1), mesh).report())


def test_the_first_dim_that_the_stages_divide_is_split():
    def leaves(mesh, **changes):
        layout = state_layout(make_job(**changes), optax.sgd(0.1), mw.create_abstract_mesh(mesh))
        return [layout[f"params/{name}"] for name in ENDS]

    assert [leaf.spec for leaf in leaves("pp:2,fsdp:2,tp:2")] == [P(("tp", "pp"), "fsdp"), P(("fsdp", "pp"), "tp")]
    odd = leaves("pp:2,fsdp:2", vocab_size=33)
    assert [leaf.spec for leaf in odd] == [P(None, ("fsdp", "pp")), P(("fsdp", "pp"))]
    whole = leaves("pp:4", **INDIVISIBLE)
    assert all(leaf.is_replicated for leaf in whole)
    assert all("pp divides no dim" in leaf.reason for leaf in whole)


# --- One step ---

# The vocabulary is odd, or four stages divide no dim; xLSTM; the global view.
EQUAL = [
    (Decoder, "zb-v", "pp:2,fsdp:2", {"vocab_size": 33, "num_layers": 4}, {"num_minibatches": 2, "sync": "every"}),
    (Decoder, "gpipe", "pp:4", {**INDIVISIBLE, "num_microbatches": 4}, {}),
    (XLSTM, "gpipe", "pp:2,fsdp:2", {"chunk_size": 8, "tied_embeddings": True}, {"num_minibatches": 2, "sync": "once"}),
    (Decoder, "gpipe", "pp:2,fsdp:2", {}, {"view": "global"}),
]


@pytest.mark.parametrize(("kind", "schedule", "mesh", "changes", "options"), EQUAL)
def test_loss_and_gradients_equal_one_device(kind, schedule, mesh, changes, options):
    job = make_job(kind, pipeline=schedule, **changes)
    assert_close(gradients(job, mesh, **options), gradients(job, "dp:1"))


@pytest.mark.parametrize(("sync", "tied"), [("every", False), ("hybrid", True), ("once", False)])
def test_slices_are_gathered_and_scattered_once_per_step(sync, tied):
    job = make_job(tied_embeddings=tied)
    layout = state_layout(job, optax.sgd(0.1), mesh_of("pp:2,dp:2"))
    compute = jax.jit(make_gradients(job, layout, num_minibatches=4, sync=sync), compiler_options=UNOPTIMIZED)
    shapes = jax.eval_shape(job.init, jax.random.key(0))
    text = compute.lower(shapes, job.batch, None).compile().as_text()
    trips = Counter()
    for one in read_schedule(text).collectives:
        if one.kind in ("all-gather", "reduce-scatter"):
            trips[one.kind] += one.trips
    arrays = 1 if tied else 2
    assert trips == {"all-gather": arrays, "reduce-scatter": arrays}


def test_statistics_split_further_over_data_axes():
    """ZeRO-1 over dp beside slices over pp: two steps with momentum equal those of one device."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def train(mesh, zero_axis):
        job = make_job()
        layout = state_layout(job, optimizer, mesh_of(mesh), zero_axis=zero_axis)
        step = make_train_step(job, optimizer, layout, num_minibatches=2, sync="every" if zero_axis else None)
        state = init_state(job, optimizer, layout, jax.random.key(0))
        for number in range(2):
            state, _ = step(state, job.make_batch(number))
        return layout, jax.device_get(state.params)

    layout, got = train("pp:2,dp:2", "dp")
    for name in ENDS:
        leaf = layout[f"opt_state/0/trace/{name}"]
        assert leaf.bytes_per_device * 4 == leaf.bytes_total
    assert_close(got, train("dp:1", None)[1])


# --- Other programs around a model, and other models ---


@pytest.mark.parametrize(("mesh", "tied"), [("pp:2,tp:2", True), ("pp:2,fsdp:2", False)])
def test_a_model_in_a_local_map_of_your_own(mesh, tied):
    """The model gathers slices itself, along the axis of its stages, before `gather` does along fsdp."""
    job, mesh = make_job(tied_embeddings=tied), mesh_of(mesh)
    params, batch = job.init(jax.random.key(0)), job.make_batch(0)
    layout = mw.make_layout(job.rules, params, mesh)
    gather = Gather(layout.specs, ("fsdp",)) if "fsdp" in mesh.shape else None

    def loss(params, batch):
        (total, _), _ = job.loss(params, batch, None, gather=gather)
        return jax.lax.psum(total, ("pp", "fsdp") if gather else "pp")

    rows = jax.tree.map(lambda _: P("fsdp") if gather else P(), batch)
    run = local_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(layout.specs, rows), out_specs=(P(), layout.specs))
    got = jax.jit(run, compiler_options=UNOPTIMIZED)(layout.shard(params), batch)
    expected = jax.jit(jax.value_and_grad(lambda params: job.loss(params, batch, None)[0][0]))(params)
    assert_close(jax.device_get(got), jax.device_get(expected))


def init_own(key):
    one, other, table = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (12, 8)),
        "blocks": jax.random.normal(one, (4, 8, 8)) / 3,
        "head": jax.random.normal(other, (8, 6)),
    }


def own_loss(params, batch, rng, *, gathers=True):
    """A model of your own: with stages along pp, it gathers what its rules only store there."""
    run = lambda blocks, h: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, blocks)[0]  # noqa: E731
    errors = lambda head, h, y: ((h @ head - y) ** 2).sum()  # noqa: E731
    table, head, x, y = params["table"], params["head"], batch["x"], batch["y"]
    if "pp" not in jax.sharding.get_abstract_mesh().manual_axes:
        return (errors(head, run(params["blocks"], table[x]), y), jnp.float32(x.size)), {}
    if gathers:
        table, head = (gather_array(leaf, dim=0, axis="pp") for leaf in (table, head))
    total = pipeline(
        run, params["blocks"], x, axis="pp", num_microbatches=2, first=lambda table, x: table[x], first_params=table,
        last=errors, last_params=head, targets=y, combine="sum",
    )  # fmt: skip
    is_last = jax.lax.axis_index("pp") == 1
    return (total, jnp.float32(x.size) * is_last), {}


def own_job(loss=own_loss, ends=P("pp")):
    rng = np.random.default_rng(0)
    batch = {"x": rng.integers(0, 12, 16), "y": rng.normal(size=(16, 6)).astype(np.float32)}
    rules = mw.Rules([("blocks", P("pp")), ("table|head", ends)], optional_axes=("pp",))
    return mw.Job(init_own, rules, loss, batch=batch, make_batch=lambda seed: batch, local_axes=("pp",))


def test_a_job_of_your_own_gets_slices_and_gathers_them():
    expected = gradients(own_job(), "dp:1")
    assert_close(gradients(own_job(), "pp:2,dp:2"), expected)
    whole = own_job(lambda *arguments: own_loss(*arguments, gathers=False), ends=P())
    assert_close(gradients(whole, "pp:2,dp:2"), expected)


def test_slices_of_your_own_that_are_not_gathered_are_an_error():
    """Looking tokens up in a slice of the table would clamp those of the other slices."""
    job = own_job(lambda *arguments: own_loss(*arguments, gathers=False))
    with pytest.raises(mw.PlacementError, match=r"`table` is split over 'pp' along dim 0(.|\n)*gather_array\(x, dim=0"):
        gradients(job, "pp:2,dp:2")


@pytest.mark.parametrize("end", ["first", "last"])
def test_slices_that_a_function_closes_over_are_an_error(end):
    def loss(params, batch, rng):
        whole = {name: gather_array(params[name], dim=0, axis="pp") for name in ("table", "head")}
        used = {**whole, "table" if end == "first" else "head": params["table" if end == "first" else "head"]}
        total = pipeline(
            lambda blocks, h: jnp.tanh(h @ blocks[0]), params["blocks"], batch["x"], axis="pp", num_microbatches=2,
            first=lambda _, x: used["table"][x], last=lambda _, h, y: (h.sum() * used["head"][0] - y).sum(),
            targets=batch["y"], combine="sum",
        )  # fmt: skip
        return total, {}

    name = "table" if end == "first" else "head"
    with pytest.raises(mw.PlacementError, match=rf"pipeline: {end}: `{name}` is split over 'pp' along dim 0"):
        gradients(own_job(loss), "pp:2,dp:2")


def test_an_axis_that_is_not_the_last_of_a_dim_cannot_be_gathered_first():
    job = make_job()
    rules = [("layers/", P("pp")), ("embed", P(("pp", "fsdp"))), (".*", P())]
    with pytest.raises(mw.PlacementError, match=r"`embed/table` is split over \('pp', 'fsdp'\)"):
        gradients(replace(job, rules=rules), "pp:2,fsdp:2")


def test_checkpoints_of_whole_arrays_restore_in_slices(tmp_path):
    """Earlier releases stored embedding and head on all stages."""
    job, optimizer, mesh = make_job(), optax.adam(1e-3), mesh_of("pp:2,dp:2")
    whole = replace(job, rules=[*((text, spec) for text, spec in job.rules if "layers" in text), (".*", P())])
    whole = replace(whole, rules=mw.Rules(whole.rules, optional_axes=("fsdp", "tp")))
    before, after = (state_layout(each, optimizer, mesh) for each in (whole, job))
    assert before["params/embed/table"].is_replicated
    assert not after["params/embed/table"].is_replicated
    state = init_state(whole, optimizer, before, jax.random.key(0))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, step=1, layout=before, facts={})
    restored = Checkpoints(tmp_path).restore(after)
    assert restored.state.params["embed"]["table"].sharding.spec == after["params/embed/table"].spec
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state.params), jax.device_get(state.params))
    started = init_state(job, optimizer, after, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(started.params), jax.device_get(state.params))
