"""Attributes of jobs, and the shapes of their parameters."""

import pickle
import types

import jax
import pytest

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.train import language_job
from meshwright.train.job import execution_of, model_of


@pytest.mark.parametrize("run", [None, Execution(layers="scan", num_microbatches=3)])
def test_a_language_job_carries_its_model_and_execution(run):
    model = Decoder.named("tiny")
    job = pickle.loads(pickle.dumps(language_job(model, batch_size=8, num_tokens=16, run=run)))
    assert model_of(job) == job.model == model
    assert execution_of(job) == job.execution == (run or Execution())


def test_model_and_execution_attributes_of_other_types_are_ignored():
    """A custom job may use these names for something else."""
    for job in (
        mw.Job(init=None, rules=[]),
        types.SimpleNamespace(),
        types.SimpleNamespace(model=len, execution="now"),
    ):
        assert model_of(job) is None
        assert execution_of(job) is None


def test_abstract_init_allocates_nothing():
    def init(key):
        return {"w": jax.random.normal(key, (1 << 20, 1 << 20))}

    struct = mw.abstract_init(init)["w"]
    assert isinstance(struct, jax.ShapeDtypeStruct)
    assert struct.shape == (1 << 20, 1 << 20)
