"""Plans of padded parameters: the memory and the layout of the step that `train --pad` runs."""

import pytest

import meshwright as mw
from meshwright.models import Decoder
from meshwright.plan.output.commands import setup_arguments
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup, build_step, named_optimizer
from meshwright.plan.target import parse_target
from meshwright.train import language_job, state_layout

JOB = language_job(Decoder(vocab_size=61, num_layers=1, d_model=16, num_heads=2, d_ff=16), batch_size=8, num_tokens=8)
SETUP = Setup(mesh="fsdp:4", precision="float32", pad=("head/kernel", "embed/table"), view="global")


@pytest.mark.filterwarnings("ignore::meshwright.errors.MeshwrightWarning")
def test_a_plan_counts_padded_parameters():
    job = mw.Job(**{**vars(JOB), "rules": [("embed/table|head/kernel", mw.P("fsdp")), (".*", mw.P())]})
    target, plain = parse_target("cpu:4"), Setup(**{**vars(SETUP), "pad": ()})
    with pytest.raises(mw.MeshwrightError, match=r"`params/embed/table` .* dim 0 has size 61; `fsdp` has 4 devices"):
        make_plan(job, target, plain)
    parts = {part.name: part.bytes for part in make_plan(job, target, SETUP).memory.parts}
    layout = state_layout(job, named_optimizer("adamw"), mw.create_abstract_mesh("fsdp:4"), pad=SETUP.pad)
    assert [leaf.name for leaf in layout.leaves if leaf.is_padded and leaf.name.startswith("params/")] == [
        "params/embed/table"
    ]
    for name, start in (("parameters", "params/"), ("optimizer", "opt_state/")):
        assert parts[name] == sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.name.startswith(start))
    step, _ = build_step(job, mw.create_abstract_mesh("fsdp:4"), SETUP)
    assert [leaf.shard_shape for leaf in step.layout.leaves] == [leaf.shard_shape for leaf in layout.leaves]


def test_padding_is_part_of_a_setup():
    assert Setup.from_json(SETUP.to_json()) == SETUP
    assert SETUP.to_json()["pad"] == ["head/kernel", "embed/table"]
    assert setup_arguments(SETUP)[-3:] == ["--pad", "head/kernel", "embed/table"]
