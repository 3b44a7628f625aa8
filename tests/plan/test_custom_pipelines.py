"""Plans of custom jobs with an axis pp: with stages of their own, and with parameters that are only stored along it."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import P
from meshwright.errors import MeshwrightError
from meshwright.parallel import pipeline
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup


def run_blocks(blocks, h):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, blocks)[0]


def errors(out, h, y):
    return jnp.square(h @ out - y).sum()


def plain_loss(params, batch, rng):
    """The count is a number of Python's."""
    return (errors(params["out"], run_blocks(params["blocks"], batch["x"]), batch["y"]), batch["y"].size), {}


def staged_loss(params, batch, rng):
    if "pp" not in jax.sharding.get_abstract_mesh().manual_axes:
        return plain_loss(params, batch, rng)
    total = pipeline(
        run_blocks, params["blocks"], batch["x"], axis="pp", num_microbatches=4, last=errors,
        last_params=params["out"], targets=batch["y"], combine="sum",
    )  # fmt: skip
    is_last = jax.lax.axis_index("pp") == jax.lax.axis_size("pp") - 1
    return (total, jnp.where(is_last, batch["y"].size, 0)), {}


def make_job(**options):
    batch = {"x": jnp.ones((16, 16)), "y": jnp.ones((16, 4))}
    return mw.Job(
        init=lambda key: {"blocks": jnp.ones((8, 16, 16)), "out": jnp.ones((16, 4))},
        rules=mw.Rules([("blocks", P("pp")), (".*", P())], optional_axes=("pp",)),
        batch=batch,
        make_batch=lambda step: batch,
        **options,
    )


PLAIN, STAGED = make_job(loss=plain_loss), make_job(loss=staged_loss, local_axes=("pp",))


def plans_of(job, view=None):
    """Returns the plans on a mesh with two devices along pp, and on one without."""
    meshes = ("pp:2,dp:2", "dp:4")
    return [make_plan(job, "v5e:2x2", Setup(mesh=mesh, optimizer="sgd", view=view)) for mesh in meshes]


def test_stages_of_its_own_are_never_idle():
    plan, alone = plans_of(STAGED)
    assert (plan.view.view, plan.time.bubble.value) == ("local", 0)
    assert plan.flops == alone.flops
    assert "custom model: its stages along pp are assumed to be always busy" in plan.notes


@pytest.mark.parametrize(("job", "view"), [(PLAIN, None), (STAGED, "global")])
def test_without_stages_every_device_computes_all_layers(job, view):
    plan, alone = plans_of(job, view)
    assert plan.flops.matmul == 2 * alone.flops.matmul > 0
    assert plan.flops.model == alone.flops.model
    assert plan.time.matmul.value == pytest.approx(2 * alone.time.matmul.value)
    assert any("runs no stages along pp in the global view" in note for note in plan.notes)


def test_compiled_transfers_belong_to_their_axes():
    """XLA lists the devices of the inner axis in another order than those of the mesh."""
    found = compile_step(f"{__file__}:PLAIN", "cpu:4", Setup(mesh="pp:2,dp:2", optimizer="sgd", precision="float32"))
    sent = {(one.kind, one.axes): one.wire_bytes for one in found.collectives if one.wire_bytes > 100}
    # Two devices send the gradient of a layer once, and half of the parameters in one gather.
    assert sent == {("all-reduce", ("dp",)): 16 * 16 * 4, ("all-gather", ("pp",)): 4 * 16 * 16 * 4}


def test_pipeline_options_need_a_built_in_model():
    with pytest.raises(MeshwrightError, match="sets its own execution options"):
        make_plan(STAGED, "v5e:2x2", Setup(mesh="pp:2,dp:2", pipeline="1f1b"))
