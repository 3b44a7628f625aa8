"""Training with fp8 projections, emulated on CPUs: on meshes against one device, and the scaling state.

A sum in another order differs in its last bit, and that bit can flip the rounding of a value to fp8 by one part in 8.
Later matmuls amplify a flip, so in the worst case two steps differ like two draws of fp8's rounding errors: by sqrt(2)
times the difference of fp8 from float32, which the tests compute. A missing or repeated sum differs by much more.
`tests/parallel/fp8/test_products.py` compares single products bit for bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.parallel import Amaxes
from meshwright.train import (
    Fp8,
    NonFiniteGuard,
    Precision,
    init_state,
    language_job,
    make_eval_step,
    make_gradients,
    make_train_step,
    state_layout,
)

DECODER = Decoder(vocab_size=64, num_layers=2, d_model=32, num_heads=8, d_ff=64)
MODELS = {
    "decoder": DECODER,
    "xlstm": XLSTM(vocab_size=64, num_layers=2, d_model=64, num_heads=8, d_ff=64, qk_factor=1.0, chunk_size=8),
}
FP8 = Fp8(least_dim=16, history=3)
PRECISIONS = {scaling: Precision(fp8=dataclasses.replace(FP8, scaling=scaling)) for scaling in ("delayed", "current")}
PRECISIONS[None] = Precision()
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@functools.cache
def job_of(model="decoder", **options):
    return language_job(MODELS[model], batch_size=16, num_tokens=16, run=Execution(**options))


def start(job, mesh, precision):
    layout = state_layout(job, OPTIMIZER, mesh, precision=precision)
    return layout, init_state(job, OPTIMIZER, layout, jax.random.key(0), precision=precision)


@functools.cache
def warmed(model, scaling):
    """Returns parameters and amaxes after two steps on one device, so that scales come from a history."""
    job, precision = job_of(model), PRECISIONS[scaling]
    layout, state = start(job, mw.create_mesh("dp:1", devices=1), precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision)
    for seed in range(2):
        state, _ = step(state, job.make_batch(seed))
    return jax.device_get((state.params, state.fp8))


def measure(model, scaling, mesh, *, devices=8, view="local", num_minibatches=1, **options):
    """Returns loss, gradients and amaxes of the third step; with scaling None, in float32."""
    job, precision = job_of(model, **options.pop("run", {})), PRECISIONS[scaling]
    mesh = mw.create_mesh(mesh, devices=devices)
    layout = state_layout(job, OPTIMIZER, mesh, precision=precision)
    gradients = make_gradients(job, layout, view=view, num_minibatches=num_minibatches, precision=precision, **options)
    params, fp8 = warmed(model, scaling or "delayed")

    @jax.jit
    def run(params, fp8, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            result, _ = gradients(params, batch, None, None, fp8)
        return result.loss, result.grads, None if result.fp8 is None else result.fp8.tree

    placed = jax.device_put(params, layout.shardings.params)
    return jax.device_get(run(placed, fp8, job.make_batch(2)))


@functools.cache
def on_one_device(model, scaling):
    return measure(model, scaling, "dp:1", devices=1)


def compare(got, model, scaling):
    (loss, grads, amaxes), (loss_1, grads_1, amaxes_1) = got, on_one_device(model, scaling)
    _, exact, _ = on_one_device(model, None)
    np.testing.assert_allclose(loss, loss_1, rtol=1e-2)
    for (path, leaf), leaf_1, leaf_32 in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(grads_1), jax.tree.leaves(exact), strict=True
    ):
        bound = 2**0.5 * np.linalg.norm(leaf_1 - leaf_32)
        assert bound < 0.6 * np.linalg.norm(leaf_32), "too loose to notice a wrong sum"
        assert np.linalg.norm(leaf - leaf_1) <= bound, jax.tree_util.keystr(path)
    # Amaxes of eight devices would add up to several times the largest.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.5), amaxes, amaxes_1)


LOCAL = [
    ("decoder", "dp:8", "delayed", {}),
    ("decoder", "dp:8", "current", {}),
    ("decoder", "fsdp:8", "delayed", {}),
    ("decoder", "fsdp:8", "delayed", {"sync": "once"}),
    ("decoder", "fsdp:8", "delayed", {"remat": "dots"}),
    ("decoder", "tp:8", "delayed", {}),
    ("decoder", "dp:2,fsdp:2,tp:2", "delayed", {}),
    ("decoder", "dp:2,fsdp:2,tp:2", "current", {}),
    ("decoder", "dp:2,fsdp:2,tp:2", "delayed", {"run": {"sequence_parallel": False}}),
    ("xlstm", "dp:2,fsdp:2,tp:2", "delayed", {}),
]


@pytest.mark.slow  # ten programs with all collectives
@pytest.mark.parametrize(("model", "mesh", "scaling", "options"), LOCAL, ids=lambda value: str(value))
def test_the_local_view_equals_one_device(model, mesh, scaling, options):
    compare(measure(model, scaling, mesh, **options), model, scaling)


@pytest.mark.parametrize(
    ("model", "mesh"), [("decoder", "dp:8"), ("decoder", "dp:2,fsdp:2,tp:2"), ("xlstm", "fsdp:2,tp:4")]
)
def test_the_global_view_equals_one_device(model, mesh):
    compare(measure(model, "delayed", mesh, view="global"), model, "delayed")


@pytest.mark.parametrize(
    ("mesh", "devices", "view"), [("dp:1", 1, "local"), ("dp:2,fsdp:2", 4, "local"), ("dp:2,fsdp:2", 4, "global")]
)
def test_minibatches_equal_one_batch(mesh, devices, view):
    """Delayed scales are the same for all minibatches, and their amaxes are combined by maximum."""
    got = measure("decoder", "delayed", mesh, devices=devices, view=view, num_minibatches=4)
    compare(got, "decoder", "delayed")


@pytest.mark.parametrize(
    "options", [{"remat": jax.checkpoint_policies.everything_saveable}, {"run": {"prefetch": False}}]
)
def test_saved_activations_keep_large_fp8_values(options):
    """JAX's rounding of saved residuals would turn values of e4m3fn above 240 into infinities."""
    compare(measure("decoder", "delayed", "fsdp:2", devices=2, **options), "decoder", "delayed")


def test_current_scales_are_those_of_each_minibatch():
    """Scales differ from those of the whole batch; amaxes are still the largest of all minibatches."""
    compare(measure("decoder", "current", "dp:1", devices=1, num_minibatches=4), "decoder", "current")


PIPELINES = [
    ("decoder", "dp:4,pp:2", "delayed", {}),
    ("decoder", "dp:2,fsdp:2,pp:2", "delayed", {"run": {"pipeline": "zb-h1"}, "remat": "full"}),
    ("decoder", "fsdp:2,pp:2,tp:2", "current", {"run": {"pipeline": "1f1b"}}),
    ("xlstm", "dp:2,pp:2", "delayed", {"run": {"pipeline": "1f1b"}, "num_minibatches": 2, "devices": 4}),
]


@pytest.mark.slow  # four pipelines
@pytest.mark.parametrize(("model", "mesh", "scaling", "options"), PIPELINES, ids=lambda value: str(value))
def test_pipelines_equal_one_device(model, mesh, scaling, options):
    """Amaxes of microbatches are combined by maximum, whoever computes the gradients: JAX or the schedule."""
    compare(measure(model, scaling, mesh, **options), model, scaling)


def test_a_pipeline_of_padded_layers_has_amaxes_of_the_others():
    """Three layers are stored as four; one step with a history equals that of one device."""

    def step(mesh, **options):
        model, precision = dataclasses.replace(DECODER, num_layers=3), PRECISIONS["delayed"]
        job = language_job(model, batch_size=8, num_tokens=16, run=Execution(pipeline="1f1b", num_microbatches=2))
        layout = state_layout(job, OPTIMIZER, mesh, precision=precision, **options)
        state = init_state(job, OPTIMIZER, layout, jax.random.key(0), precision=precision)
        state, metrics = make_train_step(job, OPTIMIZER, layout, precision=precision)(state, job.make_batch(0))
        return jax.device_get((state.fp8, metrics["loss"]))

    got, loss = step(mw.create_mesh("pp:2", devices=2), pad=("layers/",))
    expected, expected_loss = step(mw.create_mesh("dp:1", devices=1))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.5), got, expected)


# --- The state ---


def test_amaxes_of_the_last_steps_give_the_scales():
    params = {"layers": {"up": jnp.full((2, 16, 16), 0.5)}}
    state = FP8.init(params)
    assert state["layers"]["up"].shape == (2, 2, 3)
    for step in range(1, 5):
        found = Amaxes({"layers": {"up": jnp.array([[step, 0, 10 * step], [1, 0, 1 / step]])}})
        state = FP8.update(state, found)
    np.testing.assert_allclose(state["layers"]["up"][0], [[4, 3, 2], [40, 30, 20]])
    known = FP8.amaxes(params, state).tree["layers"]["up"]
    np.testing.assert_allclose(known[:, [0, 2]], [[4, 40], [1, 0.5]])
    assert bool((known[:, 1] >= 0.5).all())


def test_scaling_state_is_replicated_and_follows_the_parameters():
    job = job_of()
    layout, state = start(job, mw.create_mesh("dp:2,fsdp:2,tp:2"), PRECISIONS["delayed"])
    leaf = layout["fp8/layers/attn/q"]
    assert (leaf.spec, leaf.shape) == (P(), (2, 2, 3))
    assert sorted(state.fp8["layers"]["mlp"]) == ["down", "gate", "up"]
    assert start(job, mw.create_mesh("dp:8"), PRECISIONS["current"])[1].fp8 is None
    assert start(job, mw.create_mesh("dp:8"), "mixed")[1].fp8 is None


def test_a_step_that_is_not_finite_keeps_the_scaling_state():
    job, precision = job_of(), PRECISIONS["delayed"]
    layout, state = start(job, mw.create_mesh("dp:8"), precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision, donate=False)
    state, _ = step(state, job.make_batch(0))
    before = jax.device_get(state.fp8)
    broken = dataclasses.replace(
        state, params={**state.params, "final_norm": {"scale": state.params["final_norm"]["scale"] * jnp.nan}}
    )
    after, metrics = step(broken, job.make_batch(1))
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.fp8), before)


def test_an_infinite_input_of_a_matmul_skips_the_step():
    """A cast clips infinity to the largest fp8 value, so loss and gradients stay finite; the amax does not."""
    job, precision = job_of(), PRECISIONS["delayed"]
    layout, state = start(job, mw.create_mesh("dp:8"), precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision, donate=False)
    layers = state.params["layers"]
    broken = {**layers, "mlp_norm": layers["mlp_norm"].at[0, 0].set(jnp.inf)}
    _, metrics = step(dataclasses.replace(state, params={**state.params, "layers": broken}), job.make_batch(1))
    assert int(metrics["skipped"]) == 1


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_an_infinite_weight_skips_the_step(scaling):
    """The weight's cast clips infinity as well; its amax comes from the parameters, before the step."""
    job, precision = job_of(), PRECISIONS[scaling]
    layout, state = start(job, mw.create_mesh("dp:2,fsdp:2,tp:2"), precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision, donate=False)
    layers = state.params["layers"]
    broken = {**layers, "mlp": {**layers["mlp"], "up": layers["mlp"]["up"].at[0, 0, 0].set(jnp.inf)}}
    _, metrics = step(dataclasses.replace(state, params={**state.params, "layers": broken}), job.make_batch(1))
    assert int(metrics["skipped"]) == 1
    told = NonFiniteGuard.for_layout(layout).check(metrics, step=1)
    assert told == "step 1 was skipped: an input, weight or gradient of a matmul in fp8 is not finite"


def test_a_layout_without_the_history_of_the_step_is_refused():
    job, mesh, delayed = job_of(), mw.create_mesh("dp:8"), PRECISIONS["delayed"]
    without, fitting = (state_layout(job, OPTIMIZER, mesh, precision=one) for one in ("mixed", delayed))
    longer = state_layout(job, OPTIMIZER, mesh, precision=Precision(fp8=dataclasses.replace(FP8, history=5)))
    need = r"the step needs a history of amaxes for delayed scaling in fp8, but the layout"
    where = r"`fp8/layers/attn/k` is"
    for make in (make_eval_step, functools.partial(make_train_step, optimizer=OPTIMIZER)):
        with pytest.raises(
            MeshwrightError, match=rf"{need} has none: {where} nothing in the layout, \[2, 2, 3\] in the"
        ):
            make(job, layout=without, precision=delayed)
        with pytest.raises(MeshwrightError, match=rf"{need} has another one: {where} \[2, 2, 5\] in the layout"):
            make(job, layout=longer, precision=delayed)
    with pytest.raises(MeshwrightError, match=r"the step needs no history of amaxes, but the layout has one: .*"):
        make_train_step(job, OPTIMIZER, fitting, precision="mixed")
    make_eval_step(job, fitting, precision="mixed")
    make_train_step(job, OPTIMIZER, without, precision=PRECISIONS["current"])


def test_a_checkpoint_says_that_its_precision_was_fp8(tmp_path):
    from meshwright.checkpoint import Checkpoints

    job, mesh = job_of(), mw.create_mesh("dp:8")
    layouts = {
        "fp8": state_layout(job, OPTIMIZER, mesh, precision=PRECISIONS["delayed"]),
        "mixed": state_layout(job, OPTIMIZER, mesh, precision="mixed"),
        "longer": state_layout(job, OPTIMIZER, mesh, precision=Precision(fp8=dataclasses.replace(FP8, history=5))),
    }
    for name, other, text in (
        ("fp8", "mixed", r"step 0 was saved with --precision fp8 and its delayed scaling, and this run has other"),
        ("mixed", "fp8", r"step 0 was not saved with --precision fp8 .*, and this run needs its history of amaxes"),
        ("fp8", "longer", r"step 0 was saved with other options for matmuls in fp8"),
    ):
        precision = PRECISIONS["delayed"] if name == "fp8" else "mixed"
        state = init_state(job, OPTIMIZER, layouts[name], jax.random.key(0), precision=precision)
        with Checkpoints(tmp_path / f"{name}-{other}") as checkpoints:
            checkpoints.save(state, step=0, layout=layouts[name], facts={})
            checkpoints.wait()
            with pytest.raises(MeshwrightError, match=text):
                checkpoints.restore(layouts[other])


def test_a_resumed_run_is_bit_identical(tmp_path):
    from meshwright.checkpoint import Checkpoints

    job, precision = job_of(), Precision(compute="bfloat16", fp8=FP8)
    layout, state = start(job, mw.create_mesh("dp:2,fsdp:2,tp:2"), precision)
    step = make_train_step(job, OPTIMIZER, layout, precision=precision, donate=False)
    batches = [job.make_batch(seed) for seed in range(4)]
    for batch in batches[:2]:
        state, _ = step(state, batch)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, step=2, layout=layout, facts={})
        checkpoints.wait()
        resumed = checkpoints.restore(layout).state
        other = state_layout(job, OPTIMIZER, mw.create_mesh("dp:4,tp:2"), precision=precision)
        elsewhere = checkpoints.restore(other).state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(elsewhere.fp8), jax.device_get(state.fp8))
    for batch in batches[2:]:
        state, _ = step(state, batch)
        resumed, _ = step(resumed, batch)
    for got, want in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        if not jnp.issubdtype(want.dtype, jax.dtypes.extended):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert float(state.fp8["layers"]["mlp"]["up"].min()) > 0


def test_it_learns_and_evaluates():
    job, precision = job_of(), Precision(compute="bfloat16", fp8=FP8)
    optimizer = optax.adam(3e-3)
    layout = state_layout(job, optimizer, mw.create_mesh("dp:8"), precision=precision)
    state = init_state(job, optimizer, layout, jax.random.key(0), precision=precision)
    step = make_train_step(job, optimizer, layout, precision=precision)
    evaluate = make_eval_step(job, layout, precision=precision)
    batch = job.make_batch(0)
    first = float(evaluate(state, batch)["loss"])
    for _ in range(30):
        state, metrics = step(state, batch)
    assert float(metrics["loss"]) < 0.8 * first
    assert float(evaluate(state, batch)["loss"]) < float(metrics["loss"]) + 0.1


def test_fsdp_gathers_travel_in_fp8():
    job, mesh = job_of(), mw.create_mesh("fsdp:8")
    sent = {}
    for name, precision in (("fp8", Precision(compute="bfloat16", fp8=FP8)), ("mixed", "mixed")):
        layout = state_layout(job, OPTIMIZER, mesh, precision=precision)
        text = make_train_step(job, OPTIMIZER, layout, precision=precision).lower(job.batch).as_text()
        sent[name] = [
            line.rpartition("->")[2].split("x")[-1].strip(" >") for line in text.splitlines() if "all_gather" in line
        ]
    assert sent["fp8"].count("ui8") == 3 * 7  # the first layer, the next ones, and again in the backward pass
    assert sent["mixed"].count("ui8") == 0
    assert sent["mixed"].count("bf16") - sent["fp8"].count("bf16") == 3 * 7


# --- Errors ---


def test_bad_requests_are_refused():
    job = job_of()
    mesh = mw.create_mesh("dp:8")
    with pytest.raises(MeshwrightError, match=r"no parameter is multiplied in fp8: `layers/attn/k` has dims below 256"):
        state_layout(job, OPTIMIZER, mesh, precision="fp8")
    with pytest.raises(MeshwrightError, match=r"'nothing' matches no matrix"):
        state_layout(job, OPTIMIZER, mesh, precision=Precision(fp8=Fp8(matmuls="nothing")))
    with pytest.raises(MeshwrightError, match=r"history must be a positive integer; got 0"):
        Fp8(history=0)
    with pytest.raises(MeshwrightError, match=r"fp8 must be an Fp8; got 'yes'"):
        Precision(fp8="yes")
    with pytest.raises(MeshwrightError, match=r"fp8: there is no field 'hist'.\nhint: did you mean 'history'"):
        Precision(fp8={"hist": 3})
    with pytest.raises(MeshwrightError, match=r"fp8: matmuls must be a regex; got 3"):
        Fp8(matmuls=3)
    with pytest.raises(MeshwrightError, match=r"least_dim must be a positive integer; got True"):
        Fp8(least_dim=True)
    with pytest.raises(
        MeshwrightError, match=r"fp8 does not work with compute=float16, .*\nhint: use compute='bfloat16'"
    ):
        Precision(compute="float16", fp8=Fp8())
    plain = mw.Job(init=lambda key: {"up": jnp.zeros((16, 16))}, rules=[("up", P())], loss=lambda p, b, r: (0.0, {}))
    layout = state_layout(plain, OPTIMIZER, mesh, precision=PRECISIONS["delayed"])
    with pytest.raises(MeshwrightError, match=r"needs a loss that takes fp8="):
        make_train_step(plain, OPTIMIZER, layout, precision=PRECISIONS["delayed"])
    head = Precision(fp8=Fp8(matmuls="kernel", least_dim=16))
    layout = state_layout(job, OPTIMIZER, mesh, precision=head)
    for refused, count in ((job, 1), (job_of(layers="unroll"), 2)):
        step = make_train_step(refused, OPTIMIZER, layout, precision=head, num_minibatches=count)
        with pytest.raises(MeshwrightError, match=r"multiplies only weights of its layers in fp8; got head"):
            step.lower(refused.batch)


@pytest.mark.parametrize("view", [None, "local"])
def test_pipelines_of_custom_losses_are_refused(view):
    def loss(params, batch, rng, *, fp8):
        return 0.0, {}

    init = lambda key: {"up": jnp.zeros((4, 16, 16))}  # noqa: E731
    job = mw.Job(init=init, rules=[("up", P("pp"))], loss=loss, local_axes=("pp",))
    layout = state_layout(job, OPTIMIZER, mw.create_mesh("dp:4,pp:2"), precision=PRECISIONS["delayed"])
    with pytest.raises(MeshwrightError, match=r"custom loss does not run in fp8 in a pipeline \(axis 'pp'\)"):
        make_gradients(job, layout, view=view, precision=PRECISIONS["delayed"])


def test_the_default_is_the_projections():
    params = jax.eval_shape(Decoder.named("956m").init, jax.random.key(0))
    assert Fp8().names(params) == tuple(
        f"layers/{name}" for name in ("attn/k", "attn/o", "attn/q", "attn/v", "mlp/down", "mlp/gate", "mlp/up")
    )
    params = jax.eval_shape(XLSTM.named("1b").init, jax.random.key(0))
    names = [name.removeprefix("layers/") for name in Fp8().names(params)]
    assert names == ["mlp/down", "mlp/gate", "mlp/up", *(f"mlstm/{name}" for name in ("k", "o_gate", "out", "q", "v"))]
    assert Precision.named("fp8").fp8 == Fp8()
