"""Plans of custom jobs with an axis pp: with stages of their own, and with parameters that are only stored along it."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.errors import ConfigError, LayoutError, MeshError, MeshwrightError
from meshwright.models import Decoder, Execution
from meshwright.parallel import pipeline
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.plan import make_plan
from meshwright.plan.search import search
from meshwright.plan.step_setup import Setup
from meshwright.train import init_state, language_job, state_layout
from meshwright.train.gradients import make_gradients


def run_blocks(blocks, h, num_layers=None):
    def one(h, row):
        w, place = row
        made = jnp.tanh(h @ w)
        return (made if num_layers is None else jnp.where(place < num_layers, made, h)), None

    return jax.lax.scan(one, h, (blocks, jnp.arange(len(blocks))))[0]


def errors(out, h, y):
    return jnp.square(h @ out - y).sum()


def plain_loss(params, batch, rng):
    """The count is a number of Python's."""
    return (errors(params["out"], run_blocks(params["blocks"], batch["x"]), batch["y"]), batch["y"].size), {}


def staged_loss(params, batch, rng, num_layers=8):
    if "pp" not in jax.sharding.get_abstract_mesh().manual_axes:
        return plain_loss(params, batch, rng)
    total = pipeline(
        run_blocks, params["blocks"], batch["x"], axis="pp", num_microbatches=4, last=errors,
        last_params=params["out"], targets=batch["y"], combine="sum", num_layers=num_layers,
    )  # fmt: skip
    is_last = jax.lax.axis_index("pp") == jax.lax.axis_size("pp") - 1
    return (total, jnp.where(is_last, batch["y"].size, 0)), {}


def make_job(num_layers=8, **options):
    batch = {"x": jnp.linspace(-1, 1, 256).reshape(16, 16), "y": jnp.ones((16, 4))}

    def init(key):
        keys = jax.random.split(key)
        return {
            "blocks": jax.random.normal(keys[0], (num_layers, 16, 16)) / 4,
            "out": jax.random.normal(keys[1], (16, 4)),
        }

    return mw.Job(
        init=init,
        rules=mw.Rules([("blocks", P("pp")), (".*", P())], optional_axes=("pp",)),
        batch=batch,
        make_batch=lambda step: batch,
        **options,
    )


PLAIN, STAGED = make_job(loss=plain_loss), make_job(loss=staged_loss, local_axes=("pp",))
SIX = make_job(loss=functools.partial(staged_loss, num_layers=6), local_axes=("pp",), num_layers=6)


def plans_of(job, view=None):
    """Returns the plans on a mesh with two devices along pp, and on one without."""
    meshes = ("pp:2,dp:2", "dp:4")
    return [make_plan(job, "v5e:2x2", Setup(mesh=mesh, optimizer="sgd", view=view)) for mesh in meshes]


def test_stages_of_its_own_are_never_idle():
    plan, alone = plans_of(STAGED)
    assert (plan.view.view, plan.time.bubble.value) == ("local", 0)
    assert plan.flops == alone.flops
    # Twice the rows, and half of the layers.
    assert part(plan, "activations") == pytest.approx(part(alone, "activations")) != 0
    assert any("its stages along pp are assumed to be always busy" in note for note in plan.notes)


def part(plan, name):
    return sum(part.bytes for part in plan.memory.parts if part.name == name)


@pytest.mark.parametrize(("job", "view"), [(PLAIN, None), (STAGED, "global")])
def test_without_stages_every_device_computes_all_layers(job, view):
    plan, alone = plans_of(job, view)
    assert plan.flops.matmul == 2 * alone.flops.matmul > 0
    assert plan.flops.model == alone.flops.model
    assert plan.time.matmul.value == pytest.approx(2 * alone.time.matmul.value)
    assert part(plan, "activations") == pytest.approx(2 * part(alone, "activations"))
    assert any("runs no stages along pp in the global view" in note for note in plan.notes)


def test_offloaded_activations_are_split_like_the_others():
    setups = [Setup(mesh=mesh, optimizer="sgd", remat="offload") for mesh in ("pp:2,dp:2", "dp:4")]
    for job, factor in ((PLAIN, 2), (STAGED, 1)):
        piped, alone = (
            [one.wire_bytes for one in make_plan(job, "v5e:2x2", setup).sent if one.axis == "host"] for setup in setups
        )
        assert piped == [factor * one for one in alone]


def test_a_built_in_model_has_no_pipeline_in_the_global_view():
    """XLA stores layers along pp, and every device computes all of them."""
    job = language_job(Decoder.named("tiny", num_layers=4), batch_size=16, num_tokens=32)
    plan, alone = (
        make_plan(job, "v5e:2x2", Setup(mesh=mesh, optimizer="sgd", view="global", precision="float32"))
        for mesh in ("pp:2,dp:2", "dp:4")
    )
    assert (plan.stages.count, plan.time.bubble.value) == (1, 0)
    assert plan.flops.matmul == 2 * alone.flops.matmul
    assert part(plan, "activations") == pytest.approx(2 * part(alone, "activations"), rel=0.02)
    shapes = jax.eval_shape(job.init, jax.random.key(0))
    layers = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers"]))
    ends = sum(leaf.size for leaf in jax.tree.leaves((shapes["embed"], shapes["head"])))
    # Each device receives the other half, of layers in the forward pass and in the backward pass.
    sent = [one.wire_bytes for one in plan.sent if (one.axis, one.kind) == ("pp", "all-gather")]
    assert sent == [4 * (layers + ends / 2)]
    assert not [one for one in plan.sent if one.axis == "pp" and one.kind != "all-gather"]


def test_layers_need_not_fit_stages_in_the_global_view():
    job = language_job(Decoder.named("tiny", num_layers=3), batch_size=16, num_tokens=32)
    setup = Setup(mesh="pp:4", optimizer="sgd", view="global", pad=("layers/",))
    assert make_plan(job, "v5e:2x2", setup).stages.count == 1
    with pytest.raises(MeshError, match="XLA runs no pipeline in the global view"):
        make_plan(job, "v5e:2x2", replace(setup, pipeline="1f1b"))


def test_a_search_gives_no_microbatches_to_the_global_view():
    run = Execution(tensor_axis=None, sequence_parallel=False)
    job = language_job(Decoder.named("tiny"), batch_size=16, num_tokens=32, run=run)
    with pytest.raises(ConfigError, match="microbatches would have no effect"):
        search(job, "v5e:2x2", constraints="pp=2, tp=2, microbatches=8, remat=none")
    found = search(job, "v5e:2x2", constraints="pp=2, tp=2, remat=none")
    assert {plan.view.view for plan in found.ranked} == {"global"}
    again = make_plan(job, "v5e:2x2", found.ranked[0].setup)
    assert again.time.step.value == found.ranked[0].time.step.value


# --- Padded layers ---


def test_padding_decides_about_stages():
    job = language_job(Decoder.named("tiny", num_layers=3), batch_size=16, num_tokens=32)
    setup = Setup(mesh="pp:4", optimizer="sgd", pad=("layers/",))
    with pytest.raises(MeshError, match="3 layers cannot be cut into 4 x 1 pipeline stages"):
        make_plan(job, "v5e:2x2", setup)
    with pytest.raises(MeshError, match="XLA runs no pipeline in the global view"):
        make_plan(job, "v5e:2x2", replace(setup, pipeline="1f1b", view="global"))


def test_a_language_model_padded_along_tp_is_an_error():
    job = language_job(Decoder.named("tiny", vocab_size=257), batch_size=16, num_tokens=32)
    setup = Setup(mesh="dp:2,tp:2", optimizer="sgd", pad=("embed", "head"))
    with pytest.raises(LayoutError, match=r"padded from \(257, 64\) to \(258, 64\) along 'tp'[\s\S]*choose a size"):
        make_plan(job, "v5e:2x2", setup)
    found = search(job, "v5e:2x2", constraints="tp=2, dp=2, remat=none", pad=setup.pad)
    assert {one.reason for one in found.rejected} == {"parameters do not fit"}
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("dp:2,tp:2", devices=4), pad=setup.pad)
    with pytest.raises(LayoutError, match="the model's matmuls need dims that this axis divides"):
        make_gradients(job, layout)


def test_verify_leaves_out_the_view_that_training_does_not_choose():
    report = mw.verify(replace(SIX, loss=staged_loss), meshes="pp:4", pad=("blocks",))  # does not ignore padding
    assert [(case.view, case.verdict) for case in report.cases] == [("global", "equal"), ("local", "skipped")]
    assert "`blocks` is padded" in report.cases[1].message


def test_padding_needs_a_loss_that_ignores_it():
    """Six layers on four devices; only a forced view says that the loss ignores padding."""
    setup = Setup(mesh="pp:4", optimizer="sgd", pad=("blocks",))
    plan = make_plan(SIX, "v5e:2x2", setup)
    assert plan.view.view == "global"
    assert "`blocks` is padded; if the stages of the loss ignore padding" in plan.view.reason
    assert make_plan(SIX, "v5e:2x2", replace(setup, view="local")).view.view == "local"
    with pytest.raises(LayoutError, match="its slices in the local view would contain padding"):
        make_plan(replace(SIX, local_axes=("tp",), rules=[("blocks", P("tp")), (".*", P())]), "v5e:2x2",
                  Setup(mesh="tp:4", optimizer="sgd", pad=("blocks",), view="local"))  # fmt: skip


def test_padded_stages_of_its_own_train_like_one_device():
    job, one = SIX, mw.create_mesh("dp:1", devices=1)
    found = []
    for mesh, view in ((mw.create_mesh("pp:4", devices=4), "local"), (one, None)):
        layout = state_layout(job, optax.sgd(0.1), mesh, pad=("blocks",))
        params = init_state(job, optax.sgd(0.1), layout, jax.random.key(0)).params
        result, _ = jax.jit(make_gradients(job, layout, view=view))(params, job.make_batch(0), None)
        found.append(jax.device_get((result.loss, result.grads["out"], result.grads["blocks"])))
    (loss, out, blocks), expected = found
    assert not blocks[6:].any()
    for got, true in zip((loss, out, blocks[:6]), expected, strict=True):
        np.testing.assert_allclose(got, true, rtol=0, atol=1e-5 * np.abs(true).max())


def test_compiled_transfers_belong_to_their_axes():
    """XLA lists the devices of the inner axis in another order than those of the mesh."""
    found = compile_step(f"{__file__}:PLAIN", "cpu:4", Setup(mesh="pp:2,dp:2", optimizer="sgd", precision="float32"))
    sent = {(one.kind, one.axes): one.wire_bytes for one in found.collectives if one.wire_bytes > 100}
    # Two devices send the gradient of a layer once, and half of the parameters in one gather.
    assert sent == {("all-reduce", ("dp",)): 16 * 16 * 4, ("all-gather", ("pp",)): 4 * 16 * 16 * 4}


def test_pipeline_options_need_a_built_in_model():
    with pytest.raises(MeshwrightError, match="sets its own execution options"):
        make_plan(STAGED, "v5e:2x2", Setup(mesh="pp:2,dp:2", pipeline="1f1b"))
