"""The step on any mesh equals the step on one device: parameters, optimizers, precision, communication."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models import XLSTM, Decoder, Execution, layer_context, stack
from meshwright.parallel import column_dense, row_dense
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train import Precision, init_state, make_eval_step, make_gradients, make_train_step, state_layout


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp:2,fsdp:2,tp:2", {"num_minibatches": 2}),
    ("fsdp:4,tp:2", {"num_minibatches": 2, "view": "global"}),
    ("pp:2,fsdp:2,tp:2", {}),
], ids=str)  # fmt: skip
def test_dropout_does_not_depend_on_mesh_view_or_minibatches(lab, mesh, options):
    job = lab.decoder_job(dropout=0.2)
    lab.assert_same_change(lab.train(job, mesh, **options), lab.reference(dropout=0.2))
    assert abs(float(lab.reference(dropout=0.2)[2]["loss"]) - float(lab.reference()[2]["loss"])) > 1e-4


MOMENTUM = optax.sgd(0.5, momentum=0.9)


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp:4,fsdp:2", {"sync": "every", "num_minibatches": 2}),
    ("dp:4,tp:2", {"sync": "hybrid", "num_minibatches": 2}),
    ("dp:2,fsdp:2,tp:2", {"sync": "once", "num_minibatches": 2}),
    ("dp:4,tp:2", {"view": "global"}),
], ids=str)  # fmt: skip
def test_zero_one_computes_the_same(lab, mesh, options):
    got = lab.train(lab.decoder_job(), mesh, optimizer=MOMENTUM, zero_axis="dp", **options)
    lab.assert_same_change(got, lab.reference(optimizer=MOMENTUM))


def test_zero_one_scatters_gradients_instead_of_summing_them(lab):
    batch = lab.make_batch()
    programs = {}
    for axis in (None, "dp"):
        _, step = lab.start(lab.decoder_job(), "dp:8", optax.adam(1e-3), zero_axis=axis)
        programs[axis] = read_schedule(step.lower(batch).compile().as_text())
    assert programs[None].count("reduce-scatter") == programs[None].count("all-gather") == 0
    assert programs["dp"].count("reduce-scatter") > 0
    assert programs["dp"].count("all-gather") > 0
    # An all-reduce moves twice the bytes of a reduce-scatter, like a reduce-scatter followed by an all-gather.
    assert programs["dp"].wire_bytes < 1.05 * programs[None].wire_bytes


def two_matrices():
    """A job of two matmuls whose gradients are sums of positive numbers.

    Nothing cancels in them, so even Adam's updates, which are as large for small gradients as for large ones, are
    accurate to a few parts in a million.
    """

    def init(key):
        up, down = (jax.random.uniform(k, (16, 32), minval=1.0, maxval=2.0) for k in jax.random.split(key))
        return {"up": up, "down": down.T}

    def loss(params, batch, rng):
        axis = Execution().tensor()
        h = column_dense(batch["x"], params["up"], axis=axis, sequence_parallel=False)
        out = row_dense(h, params["down"], axis=axis, sequence_parallel=False)
        return ((out**2).sum() / 1000, out.shape[0]), {}

    rules = [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))]
    return mw.Job(init=init, rules=rules, loss=loss, local_axes=("tp",))


def positive_batch(seed=0):
    """Features differ in size, so that the norm of a slice differs from the norm of the whole gradient."""
    x = np.random.default_rng(seed).uniform(0.5, 1.0, (16, 16)) * np.linspace(0.1, 1.0, 16)
    return {"x": x.astype(np.float32)}


OPTIMIZERS = {
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8),
    "lamb": optax.lamb(0.1),
    "scheduled": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 4)),
    "own_clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(5.0)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_sees_whole_parameters(lab, name):
    options = {"optimizer": OPTIMIZERS[name], "make_batch": positive_batch}
    one = mw.create_mesh("fsdp:1,tp:1", devices=1)
    wanted, got = (lab.train(two_matrices(), mesh, **options) for mesh in (one, "fsdp:4,tp:2"))
    lab.assert_same_change(got, wanted)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "own_clip"])
def test_optimizers_would_differ_on_slices(name):
    job, optimizer = two_matrices(), OPTIMIZERS[name]
    params = job.init(jax.random.key(0))
    grads = jax.grad(lambda params: job.loss(params, positive_batch(), None)[0][0])(params)
    parts = ((params, grads), jax.tree.map(lambda leaf: leaf[:8, :8], (params, grads)))
    whole, part = (optimizer.update(grads, optimizer.init(params), params)[0] for params, grads in parts)
    for leaf, slice_ in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        assert np.abs(leaf[:8, :8] - slice_).max() > 1e-3 * np.abs(leaf).max()


def test_adam_on_a_decoder(lab):
    """With an epsilon above all gradients, Adam does not amplify their rounding more than SGD."""
    optimizer = optax.adamw(5.0, eps=10.0)
    wanted, got = (lab.train(lab.decoder_job(), m, optimizer=optimizer) for m in (lab.one_device(), "fsdp:4,tp:2"))
    assert float(wanted[2]["grad_norm"]) < 10
    lab.assert_same_change(got, wanted)


def test_parameters_are_gathered_in_the_compute_dtype(lab):
    _, changed, metrics = lab.train(lab.decoder_job(), "fsdp:8", precision="mixed")
    assert {leaf.dtype for leaf in jax.tree.leaves(changed)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(metrics["loss"], lab.reference()[2]["loss"], rtol=5e-3)


@pytest.mark.parametrize(("precision", "gradients"), [
    (Precision(compute="bfloat16"), "f32"),
    (Precision(compute="bfloat16", reduce="bfloat16"), "bf16"),
], ids=["mixed", "narrow"])  # fmt: skip
def test_collectives_use_the_requested_dtype(lab, precision, gradients):
    _, step = lab.start(lab.decoder_job(), "fsdp:8", precision=precision)
    # Reads the program before XLA's CPU compiler, which widens 16-bit collectives.
    text = step.lower(lab.make_batch()).as_text()
    gathered = set(re.findall(r"all_gather.*?: \(tensor<[\dx]*?x([a-z]\w*)>\)", text))
    scattered = set(re.findall(r"reduce_scatter.*?\}\) : \(tensor<[\dx]*?x([a-z]\w*)>\)", text, re.DOTALL))
    assert gathered == {"bf16"}
    assert scattered == {gradients}


def test_evaluation_is_the_loss_without_dropout(lab):
    job, batch = lab.decoder_job(dropout=0.3), lab.make_batch()
    layout = state_layout(job, optax.sgd(0.5), mw.create_mesh("dp:2,fsdp:2,tp:2"))
    state = init_state(job, optax.sgd(0.5), layout, jax.random.key(0))
    quiet = lab.reference(1)[2]
    for view in ("global", "local"):
        metrics = make_eval_step(job, layout, view=view, num_minibatches=2)(state, batch)
        np.testing.assert_allclose(metrics["loss"], quiet["loss"], rtol=1e-5)
        assert float(metrics["tokens"]) == batch["weights"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("model", [Decoder, XLSTM])
def test_twenty_steps_stay_equal(lab, model):
    # A small learning rate, because with a large one training amplifies the last bit in every step.
    job, optimizer = lab.decoder_job(model=model), optax.sgd(0.02)
    wanted = lab.train(job, lab.one_device(), 20, optimizer, clip=1.0)
    for view in ("global", "local"):
        got = lab.train(job, "dp:2,fsdp:2,tp:2", 20, optimizer, num_minibatches=2, view=view, clip=1.0)
        lab.assert_same_change(got, wanted, tolerance=1e-3)  # and the last loss to 1e-5


@pytest.mark.parametrize(("mesh", "sync"), [
    ("dp:2,fsdp:2,tp:2", None),
    ("dp:4,tp:2", None),
    ("dp:2,fsdp:2,tp:2", "once"),
], ids=str)  # fmt: skip
def test_gpu_specific_code_does_not_change_the_function(lab, mesh, sync, monkeypatch):
    # Runs the barriers and unrolled layers for GPUs on CPU devices; overlapped matmuls keep their form.
    for module in (layer_context, stack, importlib.import_module("meshwright.train.accumulate")):
        monkeypatch.setattr(module, "chip_family", lambda mesh: "gpu")
    lab.assert_same_change(lab.train(lab.decoder_job(), mesh, num_minibatches=2, sync=sync), lab.reference())


def test_errors(lab):
    job, optimizer, mesh = lab.decoder_job(), optax.sgd(0.5), mw.create_mesh("fsdp:8")
    layout = state_layout(job, optimizer, mesh)
    with pytest.raises(mw.MeshwrightError, match="sync='once' works only in the local view"):
        make_train_step(job, optimizer, layout, view="global", sync="once")
    with pytest.raises(mw.MeshwrightError, match=r"unknown view 'locl'.\nhint: did you mean 'local'"):
        make_train_step(job, optimizer, layout, view="locl")
    with pytest.raises(mw.JobError, match="the job has no loss"):
        make_train_step(dataclasses.replace(job, loss=None), optimizer, layout)
    with pytest.raises(mw.MeshwrightError, match="clip must be above 0; got 0"):
        make_train_step(job, optimizer, layout, clip=0)
    step = make_train_step(job, optimizer, layout)
    with pytest.raises(
        mw.PlacementError, match=r"12 rows cannot be split over 8 devices \(fsdp=8\).\nhint: use 8 or 16"
    ):
        step.lower({name: leaf[:12] for name, leaf in lab.make_batch().items()})
    with pytest.raises(mw.LayoutError, match="not a state layout"):
        make_train_step(job, optimizer, mw.make_layout(job.rules, mw.abstract_init(job.init), mesh))
    with pytest.raises(mw.PlacementError, match="cannot make 4 minibatches of a batch of 2 rows"):
        make_train_step(job, optimizer, layout, num_minibatches=4).lower(lab.make_batch())


def test_placed_batches_stay_and_others_are_split_by_rows():
    def loss(params, batch, rng):
        return jnp.mean(batch["x"] * params["w"]) * batch["scale"], {}

    job = mw.Job(init=lambda key: {"w": jnp.ones(4)}, rules=[("w", P())], loss=loss)
    mesh = mw.create_mesh("dp:4,fsdp:2")
    step = make_train_step(job, optax.sgd(0.1), state_layout(job, optax.sgd(0.1), mesh))
    batch = {"x": np.arange(32, dtype=np.float32).reshape(8, 4), "scale": np.float32(2)}
    placed = step.place(batch)
    assert (placed["x"].sharding.spec, placed["scale"].sharding.spec) == (P(("dp", "fsdp")), P())
    assert step.place(placed) is placed
    whole = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P()))  # on the mesh, but replicated
    assert step.place(whole)["x"].sharding == placed["x"].sharding
    np.testing.assert_array_equal(step.place({**batch, "x": batch["x"][:, :2]})["x"], batch["x"][:, :2])
    with pytest.raises(mw.PlacementError, match="a batch of 6 rows cannot be split over 8 devices"):
        step.place({**batch, "x": batch["x"][:6]})
    state = init_state(job, optax.sgd(0.1), step.layout, jax.random.key(0))
    assert jax.eval_shape(step, state, placed)[1]["loss"].shape == ()  # a step can be traced inside a program


@pytest.mark.parametrize(("mesh", "waits"), [("dp:8", True), ("dp:1", False)])
def test_simulated_devices_run_one_step_at_a_time(monkeypatch, mesh, waits):
    job = mw.Job(
        init=lambda key: {"w": jnp.ones(8)},
        rules=[("w", P())],
        loss=lambda params, batch, rng: (jnp.mean(batch["x"] @ params["w"]), {}),
    )
    layout = mw.state_layout(job, optax.sgd(0.1), mw.create_mesh(mesh, devices=None if waits else jax.devices()[:1]))
    state = mw.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    run, batch = mw.make_train_step(job, optax.sgd(0.1), layout), {"x": jnp.ones((8, 8))}
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda value: waited.append(value))
    results = []
    for _ in range(2):
        state, metrics = run(state, batch)
        results.append(metrics)
    assert len(waited) == (2 if waits else 0)
    assert not waits or any(waited[1] is value for value in results[0].values())


def test_a_loss_without_a_reduction_is_rejected():
    def loss(params, batch, rng):
        return jnp.mean(batch["x"] @ params["w"]), {}

    rules = [("w", P(None, "tp"))]
    job = mw.Job(init=lambda key: {"w": jnp.zeros((4, 8))}, rules=rules, loss=loss, local_axes=("tp",))
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("tp:8"))
    with pytest.raises(mw.PlacementError, match="the loss varies along 'tp'"):
        make_train_step(job, optax.sgd(0.1), layout).lower({"x": np.ones((8, 4), np.float32)})


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_a_loss_without_remat_is_recomputed_as_a_whole(remat):
    def loss(params, batch, rng):
        h = batch["x"]
        for number in range(4):
            h = jnp.tanh(h @ params["w"][number])
        return jnp.mean(h**2), {}

    job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (4, 16, 16))}, rules=[("w", P(None, "fsdp"))], loss=loss)
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8"))
    results = []
    for policy in ("none", remat):
        state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        step = make_train_step(job, optax.sgd(0.1), layout, remat=policy)
        results.append(jax.device_get(step(state, {"x": np.ones((16, 16), np.float32)})[0].params["w"]))
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize(
    "run", [Execution(sequence_parallel=False), Execution(save_gathered=True), Execution(tensor_axis=None)], ids=str
)
def test_execution_options_do_not_change_the_function(lab, run):
    options = {"view": "global"} if run.tensor_axis is None else {}
    lab.assert_same_change(lab.train(lab.decoder_job(run=run), "dp:2,fsdp:2,tp:2", **options), lab.reference())


def test_gradients_of_gathered_parameters_are_not_rounded_after_their_sum(lab):
    job, optimizer = lab.decoder_job(), optax.sgd(0.5)
    layout = state_layout(job, optimizer, mw.create_mesh("fsdp:8"))
    state = init_state(job, optimizer, layout, jax.random.key(0))
    gradients = make_gradients(job, layout, precision="mixed")
    # 256 valid targets: a bfloat16 sum stays a bfloat16 number when divided by a power of two, so rounding would show.
    batch = lab.make_batch() | {"weights": np.ones((16, 16), np.float32)}
    with jax.set_mesh(layout.mesh):
        grads = jax.jit(lambda params: gradients(params, batch, None)[0].grads)(state.params)
    up = np.asarray(grads["layers"]["mlp"]["up"])
    assert np.mean(up == np.asarray(jnp.asarray(up, jnp.bfloat16), np.float32)) < 0.5
