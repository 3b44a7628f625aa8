"""Meshes that a job cannot run on: plans and steps reject the same meshes, and unused axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, MeshwrightError, PlacementError
from meshwright.models import XLSTM, Decoder, Execution
from meshwright.plan.output.commands import PlannedJob, train_command
from meshwright.plan.output.summary import plan_summary
from meshwright.plan.plan import make_plan
from meshwright.plan.search import largest_batch, search
from meshwright.plan.step_setup import Setup, build_step
from meshwright.train.job import check_axes, unused_axes
from meshwright.train.jobs.language_job import language_job


def decoder(tokens=64, run=None, **options):
    return language_job(Decoder.named("tiny", **options), batch_size=8, num_tokens=tokens, run=run)


def own_job(mesh=None, rules=(("w", P("fsdp", "tp")),), **options):
    return mw.Job(
        init=lambda key: {"w": jax.random.normal(key, (16, 32))},
        rules=rules,
        loss=lambda params, batch, rng: (jnp.mean((batch["x"] @ params["w"]) ** 2), {}),
        batch={"x": jax.ShapeDtypeStruct((8, 16), "float32")},
        mesh=mesh,
        **options,
    )


WHOLE = Execution(tensor_axis=None)
REFUSED = {
    "heads": (lambda: decoder(num_heads=4), Setup(mesh="tp:8"), "tp=8 does not divide 4 heads.*\nhint: set tp to 1, 2"),
    "shared heads": (
        lambda: decoder(tokens=96, num_heads=12, num_kv_heads=3, head_dim=8),
        Setup(mesh="dp:2,tp:4"),
        "tp=4 is not a factor or multiple of 3 key/value heads.*\nhint: set tp to 1.$",
    ),
    "tokens": (
        lambda: decoder(tokens=60),
        Setup(mesh="tp:8"),
        "tp=8 does not divide 60 tokens.*\nhint: set tp to 1, 2",
    ),
    "tokens, global view": (lambda: decoder(tokens=60), Setup(mesh="tp:8", view="global"), "does not divide 60 tokens"),
    "heads of an xLSTM": (
        lambda: language_job(XLSTM.named("tiny", num_heads=4), batch_size=8, num_tokens=64),
        Setup(mesh="tp:8"),
        "tp=8 does not divide 4 heads",
    ),
    "view": (
        own_job,
        Setup(mesh="fsdp:2,tp:4", view="local"),
        r"does not communicate over mesh axis 'tp' \(4 devices\).*\nhint: use view=\"global\"",
    ),
    "unused axis": (own_job, Setup(mesh="fsdp:2,tp:2,sp:2"), "does not use mesh axis 'sp'"),
    "layers": (lambda: decoder(), Setup(mesh="dp:2,pp:4"), "pp=4 does not divide 2 layers.*\nhint: set pp to 1 or 2"),
}
TAKEN = {
    "heads": (lambda: decoder(num_heads=4), Setup(mesh="dp:2,tp:4")),
    "shared heads": (lambda: decoder(num_heads=8, num_kv_heads=2), Setup(mesh="tp:8")),
    "tokens that are not split": (
        lambda: decoder(tokens=60, run=Execution(sequence_parallel=False)),
        Setup(mesh="tp:8"),
    ),
    "left to XLA": (lambda: decoder(tokens=60, num_heads=4, run=WHOLE), Setup(mesh="tp:8")),
    "a custom job": (own_job, Setup(mesh="fsdp:2,tp:4")),
    "an axis of optimizer state": (own_job, Setup(mesh="fsdp:2,tp:2,zero:2", zero_axis="zero")),
}


def lower(job, setup):
    step, batch = build_step(job, mw.create_mesh(setup.mesh), setup)
    return step.lower(batch)


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_rejects_the_same_meshes_as_a_step(name):
    make, setup, says = REFUSED[name]
    job = make()
    with pytest.raises(MeshError, match=says):
        make_plan(job, "cpu:8", setup)
    with pytest.raises(MeshwrightError):
        lower(job, setup)


@pytest.mark.parametrize("name", TAKEN)
def test_a_plan_accepts_the_same_meshes_as_a_step(name):
    make, setup = TAKEN[name]
    job = make()
    assert make_plan(job, "cpu:8", setup).memory.total > 0
    lower(job, setup)


def test_unused_axes():
    job = decoder()
    assert unused_axes(job, {"fdsp": 4, "tpp": 2, "spare": 1, "pp": 2}) == ["fdsp", "tpp"]
    with pytest.raises(
        MeshError, match=r"does not use mesh axis 'fdsp'.\nhint: did you mean 'fsdp'\? use dp, fsdp, pp, tp"
    ):
        make_plan(job, "h200:1x8", Setup(mesh="fdsp:8"))
    with pytest.raises(MeshError, match=r"does not use mesh axes 'q', 'zz'.\nhint: use dp, fsdp, pp, tp"):
        check_axes(job, {"q": 2, "zz": 4})
    with pytest.raises(MeshError, match="does not use mesh axis 'fdsp'"):
        largest_batch(job, "h200:1x8", Setup(mesh="fdsp:8"))
    assert make_plan(job, "h200:1x8", Setup(mesh="fsdp:8,spare:1")).rows == 8


def test_a_custom_job_uses_the_axes_of_its_rules_and_those_it_declares():
    assert unused_axes(own_job(), {"dp": 2, "fsdp": 2, "tp": 2}) == []
    for job in (own_job(), own_job(mesh="fsdp:2,sp:4")):
        with pytest.raises(MeshError, match=r"does not use mesh axis 'sp'[\s\S]*declare it: Job\(..., local_axes="):
            check_axes(job, {"sp": 8})
    assert unused_axes(own_job(local_axes=("sp",)), {"sp": 8}) == []
    assert unused_axes(own_job(), {"data": 8, "dp": 2}, data_axes="data") == ["dp"]
    assert unused_axes(language_job(Decoder.named("tiny"), batch_size=8, num_tokens=8, mesh="sp:8"), {"sp": 8}) == [
        "sp"
    ]


def test_a_search_rejects_unused_axes():
    job = own_job(rules=[("w", P("fsdp"))])
    batch = {"inputs": jnp.zeros((8, 16)), "targets": jnp.zeros((8, 16))}

    def loss(params, batch, rng):
        return jnp.mean((batch["inputs"] @ params["w"]) ** 2), {}

    job = mw.Job(init=job.init, rules=mw.Rules(job.rules, optional_axes=("fsdp",)), loss=loss, batch=batch)
    found = search(job, "h200:1x8", constraints="pp=1, minibatches=1")
    assert {plan.setup.mesh for plan in found.ranked} == {"fsdp:8", "dp:2,fsdp:4", "dp:4,fsdp:2", "dp:8"}
    details = {item.detail for item in found.rejected if item.reason == "unused axis"}
    assert details == {"the job splits nothing over tp"}


def test_a_search_keeps_tp_for_a_loss_that_does_not_know_it_and_every_plan_runs():
    job = own_job(rules=mw.Rules([("w", P("fsdp", "tp"))], optional_axes=("fsdp", "tp")))
    found = search(job, "h200:1x8", constraints="minibatches<=2, remat=none")
    views = {plan.setup.mesh: plan.view.view for plan in found.ranked}
    assert views["tp:8"] == views["fsdp:4,tp:2"] == "global"
    assert views["fsdp:8"] == views["dp:2,fsdp:4"] == "local"
    subject = PlannedJob(job="train.py:job")
    for plan in found.ranked:
        assert plan.memory.fits
        assert ("view=global" in str(plan_summary(plan, subject))) == (plan.view.view == "global")
        assert "--view" not in train_command(plan, subject)  # `train` chooses the same view
        assert plan.setup.sync is None or plan.view.view == "local"
    for mesh in ("tp:8", "dp:2,fsdp:2,tp:2"):
        for plan in (plan for plan in found.ranked if plan.setup.mesh == mesh):
            assert lower(job, plan.setup)
    # Without an assumption about its communication, tp would always look best.
    sent = {item.axis: item for item in next(p for p in found.ranked if p.setup.mesh == "tp:8").sent}
    assert sent["tp"].wire_bytes > 0
    assert sent["tp"].basis == "assumed"
    only = search(job, "h200:1x8", constraints="minibatches=2, remat=none, sync=once, tp=8")
    assert not only.ranked
    assert "without sync modes" in only.rejected[0].detail


@pytest.mark.parametrize(
    ("rows", "parts", "name", "got"), [(0, 1, "rows", 0), (-8, 1, "rows", -8), (8, 0, "minibatches", 0)]
)
def test_an_empty_step_is_rejected(rows, parts, name, got):
    with pytest.raises(PlacementError, match=f"the number of {name} must be at least 1; got {got}"):
        make_plan(decoder(), "h200:1x8", Setup(mesh="fsdp:8", rows=rows, num_minibatches=parts))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"pipeline": "1f1b", "remat": "offload"},
            "remat=offload does not work with the pipeline schedule 1f1b.\nhint: use another",
        ),
    ],
)
def test_options_that_a_pipeline_does_not_take(options, says):
    with pytest.raises(MeshError, match=says):
        make_plan(language_job(Decoder.named("956m"), batch_size=16, num_tokens=64), "h200:1x8",
                  Setup(mesh="dp:4,pp:2", **options))  # fmt: skip
