"""A decoder trained by any pipeline schedule equals one device in loss, metrics and every gradient."""

import faulthandler
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.train import init_state, language_job, make_eval_step, make_train_step, state_layout
from meshwright.train.fine_tuning.lora import lora
from meshwright.train.gradients import make_gradients

MODEL = Decoder(
    vocab_size=32, num_layers=8, d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24, dropout=0.1
)  # fmt: skip


@pytest.fixture(autouse=True)
def time_limit():
    """Ends the process on a deadlock, which compiled code cannot interrupt."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def make_job(*, tied, run=None, **changes):
    model = MODEL.named("tiny", **{**vars(MODEL), "tied_embeddings": tied, **changes})
    return language_job(model, batch_size=16, num_tokens=8, run=run, packed=True, z_loss=1e-3)


def mesh_of(text):
    return mw.create_mesh(text, devices=int(np.prod([int(part.split(":")[1]) for part in text.split(",")])))


def loss_and_gradients(job, mesh, *, pad=False, **options):
    layout = state_layout(job, optax.sgd(0.1), mesh, pad=pad)
    params = init_state(job, optax.sgd(0.1), layout, jax.random.key(0)).params
    result, _ = jax.jit(make_gradients(job, layout, **options))(params, job.make_batch(0), jax.random.key(1))
    return jax.device_get((result.loss, result.metrics, result.grads))


@functools.cache
def one_device(tied, **changes):
    return loss_and_gradients(make_job(tied=tied, **changes), mesh_of("dp:1"))


# Covers every pair of: schedule, size of pp, kind of other axis, tied or untied embeddings, accumulation, remat; and
# every sync mode with each kind of other axis.
CASES = [
    ("1f1b", "pp:2,dp:2,tp:2", True, 1, "none", None),
    ("1f1b", "pp:4,fsdp:2", False, 2, "full", "once"),
    ("aligned-1f1b", "pp:2,dp:2,tp:2", False, 2, "full", "every"),
    ("aligned-1f1b", "pp:4,fsdp:2", True, 1, "none", None),
    ("interleaved-1f1b", "pp:2,dp:2,fsdp:2", False, 1, "none", "once"),
    ("interleaved-1f1b", "pp:4,tp:2", True, 2, "full", "once"),
    ("zb-h1", "pp:2,fsdp:2,tp:2", True, 2, "dots", "every"),
    ("zb-h1", "pp:4,dp:2", False, 1, "full", "once"),
    ("zb-v", "pp:2,dp:2,fsdp:2", True, 2, "none", "every"),
    ("zb-v", "pp:4,tp:2", False, 1, "full", None),
]


@pytest.mark.parametrize(("schedule", "mesh", "tied", "num_minibatches", "remat", "sync"), CASES)
def test_loss_and_gradients_equal_one_device(schedule, mesh, tied, num_minibatches, remat, sync):
    mesh = mesh_of(mesh)
    job = make_job(tied=tied, run=Execution(pipeline=schedule, num_microbatches=mesh.shape["pp"]))
    got = loss_and_gradients(job, mesh, num_minibatches=num_minibatches, remat=remat, sync=sync)
    for (path, a), (_, b) in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(one_device(tied)), strict=True
    ):
        # The norm after an embedding of size 0.02 amplifies rounding: dp:2,fsdp:2,tp:2 differs by 1.7e-5 as well.
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("num_layers", "schedule", "mesh"),
    [
        (7, "gpipe", "pp:4,dp:2"),
        (7, "zb-h1", "pp:4,fsdp:2"),
        (7, "zb-v", "pp:2,tp:2"),
        (6, "gpipe", "pp:4,fsdp:2"),
        (6, "1f1b", "pp:4,dp:2"),
        (6, "zb-h1", "pp:4,tp:2"),
        (5, "gpipe", "pp:4,tp:2"),
    ],
)
def test_stages_that_do_not_divide_the_layers(num_layers, schedule, mesh):
    """Seven layers are stored as eight, and are stages of 2, 2, 2 and 1 layers on four devices or two.

    Six are stored as 2, 2, 2 and 0, and computed as 2, 2, 1 and 1; five as 2, 1, 1 and 1.
    """
    job = make_job(tied=False, num_layers=num_layers, run=Execution(pipeline=schedule, num_microbatches=4))
    loss, _, grads = loss_and_gradients(job, mesh_of(mesh), pad=("layers/",))
    expected_loss, _, expected = one_device(False, num_layers=num_layers)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves_with_path(expected), strict=True):
        assert not np.any(a[b.shape[0] :])  # the padding
        np.testing.assert_allclose(
            a[: b.shape[0]], b, rtol=0, atol=4e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_evaluation_of_stages_that_do_not_divide_the_layers(schedule):
    job = make_job(tied=False, num_layers=6, run=Execution(pipeline=schedule, num_microbatches=4))
    layout = state_layout(job, optax.sgd(0.1), mesh_of("pp:4"), pad=("layers/",))
    state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    loss = float(make_eval_step(job, layout)(state, job.make_batch(0))["loss"])
    layout = state_layout(job, optax.sgd(0.1), mesh_of("dp:1"))
    state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
    assert loss == pytest.approx(float(make_eval_step(job, layout)(state, job.make_batch(0))["loss"]), rel=1e-5)


def test_statistics_of_embedding_and_head_are_split_over_stages():
    """As their parameters are; `zero_axis` splits those of the norm as well. Two steps equal those of one device."""
    optimizer, run = optax.sgd(0.1, momentum=0.9), Execution(pipeline="1f1b", num_microbatches=4)

    def train(mesh, zero_axis):
        job = make_job(tied=False, num_layers=2, run=run if zero_axis else None)
        layout = state_layout(job, optimizer, mesh_of(mesh), zero_axis=zero_axis)
        step = make_train_step(job, optimizer, layout)
        state = init_state(job, optimizer, layout, jax.random.key(0))
        for number in range(2):
            state, _ = step(state, job.make_batch(number))
        return layout, jax.device_get(state.params)

    layout, got = train("pp:2", "pp")
    table, head = (layout[f"opt_state/0/trace/{name}"] for name in ("embed/table", "head/kernel"))
    assert all(2 * leaf.bytes_per_device == leaf.bytes_total for leaf in (table, head))
    _, expected = train("dp:1", None)
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


def test_adapters_and_evaluation():
    """Only adapters have gradients; evaluation runs forward only, and its loss is that of one device."""
    run = Execution(pipeline="zb-v", num_microbatches=4)
    adapted = [lora(make_job(tied=False, num_layers=4, run=run), rank=2, targets="attn/q|head") for run in (run, None)]
    got, expected = (
        loss_and_gradients(job, mesh_of(mesh)) for job, mesh in zip(adapted, ("pp:2", "dp:1"), strict=True)
    )
    for a, b in zip(jax.tree.leaves(got[2]), jax.tree.leaves(expected[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-9)
    losses = []
    for job, mesh in zip(adapted, ("pp:2", "dp:1"), strict=True):
        layout = state_layout(job, optax.sgd(0.1), mesh_of(mesh))
        state = init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        losses.append(float(make_eval_step(job, layout)(state, job.make_batch(0))["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bad_inputs():
    with pytest.raises(mw.MeshwrightError, match="unknown pipeline schedule 'zbv'"):
        Execution(pipeline="zbv")
    with pytest.raises(mw.MeshwrightError, match="'1f1b' has 1 virtual stage per device; got 2"):
        Execution(pipeline="1f1b", pipeline_rounds=2)
    for wrong in (0, -1, 2.5, True, "4"):
        with pytest.raises(
            mw.MeshwrightError, match=f"num_microbatches must be a whole number of at least 1; got {wrong!r}"
        ):
            Execution(num_microbatches=wrong)
        with pytest.raises(mw.MeshwrightError, match=f"cannot have {wrong!r} rounds"):
            Execution(pipeline="circular", pipeline_rounds=wrong)

    def shapes(job, **options):
        layout = state_layout(job, optax.sgd(0.1), mesh_of("pp:4"))
        gradients = jax.jit(make_gradients(job, layout, **options))
        return gradients.eval_shape(jax.eval_shape(job.init, jax.random.key(0)), job.batch, None)

    with pytest.raises(mw.LayoutError, match="4 layers cannot be cut into 4 x 2 pipeline stages of at least one"):
        shapes(make_job(tied=True, num_layers=4, run=Execution(pipeline="zb-v")))
    with pytest.raises(mw.MeshwrightError, match='remat="offload" does not work with a pipeline schedule'):
        shapes(make_job(tied=True, run=Execution(pipeline="zb-v")), remat="offload")


def test_a_job_with_its_own_loss_keeps_its_execution():
    from meshwright.train.jobs.language_job import with_execution

    job = mw.Job(init=lambda key: {"w": jnp.zeros(1)}, rules=[], loss=lambda params, batch, rng: (params["w"], {}))
    with pytest.raises(mw.MeshwrightError, match="sets its own execution options, so pipeline cannot be changed"):
        with_execution(job, pipeline="zb-v")
