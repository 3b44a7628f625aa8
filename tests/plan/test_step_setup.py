"""Setups as data, optimizers by name, and batches of other sizes."""

import jax
import pytest

import meshwright as mw
from meshwright.errors import JobError, MeshwrightError
from meshwright.models import Decoder
from meshwright.plan.step_setup import Setup, batch_of, named_optimizer
from meshwright.train.jobs.language_job import language_job


def test_optimizers_by_name():
    assert named_optimizer("lion") is not None
    with pytest.raises(MeshwrightError, match="did you mean 'adamw'"):
        named_optimizer("adamww")
    for name in ("chain", "global_norm", "GradientTransformation"):  # of optax, but no optimizers
        with pytest.raises(MeshwrightError, match=f"optax has no optimizer '{name}'"):
            named_optimizer(name)


def test_setups_round_trip_through_json():
    setup = Setup(
        mesh="fsdp:8", precision={"compute": "bfloat16", "reduce": "bfloat16"}, num_minibatches=4, sync="once"
    )
    assert Setup.from_json(setup.to_json()) == setup
    assert str(setup.dtypes.reduce) == "bfloat16"
    assert str(Setup(mesh="dp:2", remat="full")) == "dp:2 remat=full"
    assert str(Setup(mesh="pp:2", pad=("layers/", "head"))) == "pp:2 pad=layers/,head"
    with pytest.raises(MeshwrightError, match=r"a setup has no field 'remt'[\s\S]*did you mean 'remat'"):
        Setup.from_json({"mesh": "dp:2", "remt": "full"})


def test_batches_of_another_size():
    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16, packed=True)
    assert {leaf.shape for leaf in jax.tree.leaves(batch_of(job, 24))} == {(24, 16)}
    assert {leaf.shape for leaf in jax.tree.leaves(batch_of(job, None))} == {(8, 16)}
    with pytest.raises(JobError, match="has no example batch"):
        batch_of(mw.Job(init=job.init, rules=job.rules, loss=job.loss), 8)
