"""Memory of plans with tensor parallelism on GPUs, against programs compiled by benchmarks/plan_tp.py."""

import functools

import pytest

from meshwright.models import Decoder
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.language_job import language_job

# Mesh, rows of 2048 tokens, minibatches, sync, remat, and the peak in GiB on h200:1x8.
COMPILED = [
    ("fsdp:4,tp:2", 16, 4, "once", "none", 10.07),
    ("fsdp:2,tp:4", 16, 4, "once", "none", 6.56),
    ("tp:8", 16, 4, "once", "none", 5.29),
    ("dp:4,tp:2", 16, 4, "once", "none", 17.95),
    ("fsdp:4,tp:2", 32, 4, "every", "none", 7.99),
    ("fsdp:4,tp:2", 32, 1, "hybrid", "none", 14.22),
    ("fsdp:4,tp:2", 32, 1, "once", "none", 14.81),
    ("fsdp:4,tp:2", 32, 4, "once", "none", 10.56),
    ("fsdp:4,tp:2", 32, 1, "hybrid", "full", 6.75),
    ("fsdp:4,tp:2", 32, 4, "hybrid", "full", 6.13),
    ("fsdp:4,tp:2", 32, 1, "once", "full", 6.77),
    ("fsdp:4,tp:2", 32, 4, "once", "full", 10.29),
    ("fsdp:2,tp:4", 32, 4, "once", "full", 6.67),
    ("fsdp:2,tp:4", 32, 1, "once", "full", 6.39),
    ("tp:8", 16, 1, "hybrid", "none", 8.32),
    ("dp:4,tp:2", 16, 1, "hybrid", "full", 14.60),
    ("fsdp:8", 32, 4, "once", "none", 16.37),
    ("dp:8", 32, 4, "once", "none", 34.76),
]
LAYERS, WIDTH, HIDDEN, TOKENS = 8, 4096, 11008, 2048
MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN  # elements of one layer


@functools.cache
def job_and_profile():
    job = language_job(Decoder.named("7b", num_layers=LAYERS), batch_size=16, num_tokens=TOKENS)
    return job, profile_job(job, platform="gpu", remats=("none", "full"))


def memory(mesh, rows, num_minibatches, sync, remat):
    job, profile = job_and_profile()
    setup = Setup(mesh=mesh, rows=rows, num_minibatches=num_minibatches, sync=sync, remat=remat)
    return make_plan(job, "h200:1x8", setup, profile=profile).memory


@pytest.mark.parametrize(("mesh", "rows", "num_minibatches", "sync", "remat", "gib"), COMPILED)
def test_computed_peaks_are_those_of_compiled_programs(mesh, rows, num_minibatches, sync, remat, gib):
    found = memory(mesh, rows, num_minibatches, sync, remat)
    assert found.total / 2**30 == pytest.approx(gib, rel=0.05)
    assert sum(part.bytes for part in found.parts) == pytest.approx(found.total)


def temporaries(rows, mesh):
    parts = memory(mesh, rows, 4, "hybrid", "full").parts
    return next(part.bytes for part in parts if part.name == "temporaries")


def test_gathered_rows_and_their_sums_are_not_split_over_tp():
    """The backward pass of one layer, counted by hand: what it recomputes is split, its gathered rows are not."""
    rows = 4096  # so many that it takes more than the loss, whose chunks have a limit
    split, whole = temporaries(rows, "fsdp:4,tp:2"), rows / 4 / 4 * TOKENS * WIDTH * (2 + 4)
    assert temporaries(rows, "fsdp:8") == pytest.approx(split - whole)  # half of the rows, twice the features


def test_slices_of_gathered_layers_are_freed_as_gradients_come():
    """With one minibatch and few rows, by hand: gradients take the place of the layers, which no loop needs again."""
    ends = 2 * 32000 * WIDTH * 2 / 2
    parts = {part.name: part.bytes for part in memory("fsdp:4,tp:2", 4, 1, "once", "full").parts}
    looped = {part.name: part.bytes for part in memory("fsdp:4,tp:2", 16, 4, "once", "full").parts}
    layers = LAYERS * MATRICES * 2 / 2
    assert looped["gathered weights"] == pytest.approx(layers + ends, rel=1e-3)
    assert ends <= parts["gathered weights"] < ends + 0.2 * layers
