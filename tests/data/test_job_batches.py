"""Batches drawn by a job."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.data import Ledger, check_ledger, job_batches
from meshwright.errors import DataError


def make_batch(seed):
    return {"x": np.random.default_rng(seed).random((8, 3), np.float32), "scale": np.float32(2)}


JOB = mw.Job(init=lambda key: {}, rules=[], make_batch=make_batch)


def shardings(mesh):
    mesh = mw.create_mesh(mesh)
    return lambda batch: jax.tree.map(lambda leaf: NamedSharding(mesh, P("dp") if leaf.ndim else P()), batch)


def take(num_batches, *, mesh="dp:8", **options):
    with job_batches(JOB, shardings=shardings(mesh), **({"seed": 1} | options)) as batches:
        return [np.asarray(next(batches).arrays["x"]) for _ in range(num_batches)], batches.state


def test_batches_depend_on_the_seed_and_their_number():
    first, state = take(4)
    assert state["next_row"] == 32
    assert len({batch.tobytes() for batch in first}) == 4
    np.testing.assert_array_equal(first, take(4, mesh="dp:2,tp:4")[0])
    assert not np.array_equal(first, take(4, seed=2)[0])
    np.testing.assert_array_equal(first[2:], take(2, state=take(2)[1])[0])
    np.testing.assert_array_equal(first[3:], take(1, start_row=24, batch_size=8)[0])


def test_scalars_are_the_same_everywhere(assert_placed):
    with job_batches(JOB, shardings=shardings("dp:8"), seed=0) as batches:
        batch = next(batches)
    assert_placed(batch.arrays["scale"], mw.create_mesh("dp:8"), P(), np.float32(2))
    assert batch.row_ids.tolist() == list(range(8))


def test_a_ledger_of_drawn_batches(tmp_path):
    for first_step, num_steps in ((1, 4), (3, 3)):
        with (
            Ledger(tmp_path) as ledger,
            job_batches(
                JOB, shardings=shardings("dp:8"), seed=0, start_row=8 * (first_step - 1), first_step=first_step,
                ledger=ledger,
            ) as batches,
        ):  # fmt: skip
            for _ in range(num_steps):
                next(batches)
    report = check_ledger(tmp_path).require()
    assert (report.num_steps, report.num_rows, report.num_redone, report.epochs) == (5, 40, 2, [])


def test_errors():
    with pytest.raises(DataError, match=r"the job has no make_batch.*\nhint: set Job\(make_batch="):
        job_batches(mw.Job(init=None, rules=[]), shardings=shardings("dp:8"), seed=0)
    with pytest.raises(DataError, match=r"batches have 8 rows, not 16.\nhint: use 8 rows"):
        take(1, batch_size=16)
    with pytest.raises(DataError, match="row 12 is inside a batch of 8 rows"):
        take(1, start_row=12)
    with pytest.raises(DataError, match="saved with seed 1, but this run has seed 2"):
        take(1, state=take(1)[1], seed=2)
    ragged = mw.Job(init=None, rules=[], make_batch=lambda seed: {"x": np.zeros(8), "y": np.zeros(4)})
    with pytest.raises(DataError, match=r"batches have \[4, 8\] rows"):
        job_batches(ragged, shardings=shardings("dp:8"), seed=0)
