"""Memory of accumulated gradients: the sums, and beside them the gradients of the current minibatch."""

import pytest

from meshwright.models import Decoder
from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.compiled.topology import can_compile_for
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job
from meshwright.train.jobs.job_loading import load_job

NUM_LAYERS, WIDTH, HIDDEN = 4, 1024, 4096
WEIGHTS = NUM_LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)  # nearly all parameters


@pytest.fixture
def wide_job(tmp_path):
    """A reference to a decoder that is nearly all weights."""
    path = tmp_path / "wide_job.py"
    path.write_text(
        "from meshwright.models import Decoder\nfrom meshwright.train import language_job\n"
        f"model = Decoder.named('tiny', num_layers={NUM_LAYERS}, d_model={WIDTH}, d_ff={HIDDEN}, num_heads=8)\n"
        "job = language_job(model, batch_size=16, num_tokens=64)\n"
    )
    return f"{path}:job"


@pytest.mark.parametrize(("mesh", "sync"), [("dp:4", "hybrid"), ("fsdp:4", "once")])
def test_gradients_of_a_minibatch_are_held_beside_their_sums(mesh, sync, wide_job):
    """Compiled for TPUs: the peak is that of the parts."""
    setup = Setup(mesh=mesh, num_minibatches=4, sync=sync, optimizer="sgd")
    plan = make_plan(load_job(wide_job), "v5p:2x2x1", setup)
    compiled = compile_step(wide_job, "v5p:2x2x1", setup)
    assert plan.memory.total == pytest.approx(compiled.peak_bytes, rel=0.1)


@pytest.mark.parametrize(("mesh", "stored"), [("dp:2,tp:2", 2), ("fsdp:2,tp:2", 4)])
def test_gpus_hold_weights_and_gradients_once_each(mesh, stored, wide_job):
    """Counted by hand, computed, and compiled for H200s: no second copy of sliced weights, no zeros of a `where`."""
    setup = Setup(mesh=mesh, num_minibatches=4, sync="once", optimizer="sgd")
    # Parameters; without fsdp, half of these on each device: narrow weights, sums, and gradients of a minibatch.
    by_hand = WEIGHTS * (4 / stored + (2 + 4 + 2) / 2)
    assert make_plan(load_job(wide_job), "h200:1x4", setup).memory.total == pytest.approx(by_hand, rel=0.05)
    if not can_compile_for("h200:1x4"):
        pytest.skip("the compiler for h200 is not installed")
    assert compile_step(wide_job, "h200:1x4", setup).peak_bytes == pytest.approx(by_hand, rel=0.1)


@pytest.mark.parametrize(
    ("target", "mesh", "sync", "copies", "gathered"),
    [
        ("h200:1x1", "dp:1", "hybrid", 2, 0),  # with the transpose
        ("v5p:2x2x1", "dp:4", "hybrid", 1, 0),
        ("h200:1x4", "fsdp:4", "every", 1 / 4, 2 / NUM_LAYERS),  # two layers, gathered in fp8
        ("h200:1x4", "fsdp:4", "once", 0, 1),
    ],
)
def test_weights_cast_once_live_over_the_step(target, mesh, sync, copies, gathered):
    """Bytes per element of the weights in fp8, in place of copies in bfloat16."""
    model = Decoder.named("tiny", num_layers=NUM_LAYERS, d_model=256, d_ff=512, num_heads=4)
    job = language_job(model, batch_size=16, num_tokens=64)
    found = {}
    for precision in ("mixed", "fp8"):
        for count in (1, 4):
            setup = Setup(mesh=mesh, num_minibatches=count, sync=sync, optimizer="sgd", precision=precision)
            plan = make_plan(job, target, setup)
            found[precision, count] = {part.name: part.bytes for part in plan.memory.parts}
    size = NUM_LAYERS * (4 * 256 * 256 + 3 * 256 * 512)
    assert found["fp8", 4].get("fp8 weights", 0) == copies * size
    in_bfloat16 = found["mixed", 4]
    saved = {
        name: in_bfloat16.get(name, 0) - found["fp8", 4].get(name, 0) for name in ("gathered weights", "narrow weights")
    }
    assert saved == {"gathered weights": gathered * size, "narrow weights": 0 if gathered else 2 * size}
    assert "fp8 weights" not in found["fp8", 1] | in_bfloat16
