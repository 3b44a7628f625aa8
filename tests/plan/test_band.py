"""Notes of plans on what the band of their step time does not cover, in text and JSON."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.models import XLSTM
from meshwright.models.decoder import Decoder
from meshwright.plan.output.commands import PlannedJob
from meshwright.plan.output.summary import plan_summary
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.job import Job
from meshwright.train.jobs.language_job import language_job

COMES = "the band comes from published runs on this chip, none with {}, whose time it does not cover"
MEASURED = (
    "shares of the peak were measured on one H200 SXM, those of other chips fitted to published runs, some of older "
    "software: differences from other chips within both bands say nothing"
)

ASSUMED = "the shares of the peak, and the band, are assumed: as on H100, for lack of published runs"


def plan_of(target, mesh, **options):
    model = Decoder.named("tiny", d_model=512, d_ff=1024)
    return make_plan(language_job(model, batch_size=64, num_tokens=64), target, Setup(mesh=mesh, **options))


@pytest.mark.parametrize(
    ("target", "mesh", "options", "said"),
    [
        ("h100:1x8", "dp:2,fsdp:4", {}, None),
        ("a100-40:1x8", "fsdp:8", {}, None),  # both sizes of an A100 share their runs
        ("v5p:2x2x2", "fsdp:4,tp:2", {}, None),
        ("cpu:8", "fsdp:4,tp:2", {}, None),
        ("h100:1x8", "pp:2,fsdp:4", {}, COMES.format("a pipeline")),
        ("h100:1x8", "fsdp:4,tp:2", {"precision": "fp8"}, COMES.format("tp or fp8")),
        ("v6e:2x4*2", "dp:2@dcn,fsdp:8", {"precision": "float32"}, COMES.format("several slices or float32 matmuls")),
        ("h200:1x8", "fsdp:8", {}, MEASURED),
        ("h200:1x8", "fsdp:4,tp:2", {}, f"{COMES.format('tp')}; {MEASURED}"),
        ("b200:1x8", "pp:2,fsdp:4", {}, ASSUMED),
    ],
)
def test_one_note_says_what_the_band_does_not_cover(target, mesh, options, said):
    plan = plan_of(target, mesh, **options)
    found = [note for note in plan.notes if "the band" in note or "shares of the peak" in note]
    assert found == ([said] if said else [])
    assert plan.to_json()["notes"] == list(plan.notes)
    assert not said or f"note: {said}" in str(plan_summary(plan, PlannedJob(model="tiny")))


def test_recurrent_models_and_adapters_are_not_covered():
    """All published runs train all parameters of a transformer."""
    xlstm = language_job(XLSTM.named("tiny"), batch_size=8, num_tokens=64)
    decoder = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=64)
    adapted = adapt_job(decoder, adapters="rank=4")
    for job, said in ((xlstm, "an xLSTM"), (adapted, "frozen parameters")):
        assert COMES.format(said) in make_plan(job, "h100:1x8", Setup(mesh="fsdp:8")).notes


def test_custom_models_are_not_covered():
    def loss(params, batch, key):
        return jnp.mean((batch["x"].astype(params["w"].dtype) @ params["w"]) ** 2), {}

    job = Job(
        init=lambda key: {"w": jnp.zeros((64, 64))},
        rules=[("w", P("fsdp", None))],
        loss=loss,
        batch={"x": jnp.zeros((64, 64))},
    )
    notes = make_plan(job, "h100:1x8", Setup(mesh="fsdp:8")).notes
    assert COMES.format("a custom model") in notes
