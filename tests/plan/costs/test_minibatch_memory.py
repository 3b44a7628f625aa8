"""Memory of accumulated gradients: the sums, and beside them the gradients of the current minibatch."""

import pytest

from meshwright.plan.compiled.compile import compile_step
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.job_loading import load_job


@pytest.mark.parametrize(("mesh", "sync"), [("dp:4", "hybrid"), ("fsdp:4", "once")])
def test_gradients_of_a_minibatch_are_held_beside_their_sums(mesh, sync, tmp_path):
    """Compiled for TPUs: of a decoder that is nearly all weights, the peak is that of the parts."""
    path = tmp_path / "wide_job.py"
    path.write_text(
        "from meshwright.models import Decoder\nfrom meshwright.train import language_job\n"
        "model = Decoder.named('tiny', num_layers=4, d_model=1024, d_ff=4096, num_heads=8)\n"
        "job = language_job(model, batch_size=16, num_tokens=64)\n"
    )
    setup = Setup(mesh=mesh, num_minibatches=4, sync=sync, optimizer="sgd")
    plan = make_plan(load_job(f"{path}:job"), "v5p:2x2x1", setup)
    compiled = compile_step(f"{path}:job", "v5p:2x2x1", setup)
    assert plan.memory.total == pytest.approx(compiled.peak_bytes, rel=0.1)
