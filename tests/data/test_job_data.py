"""All forms of data that a job may hold: the same rows, an exact position, and errors that name the problem."""

import json

import grain
import jax
import numpy as np
import pytest

from meshwright.data import Batches, IteratedRows, iterated_batches, open_rows
from meshwright.errors import DataError

NUM_ROWS = 20
X = np.arange(3 * NUM_ROWS, dtype=np.float32).reshape(NUM_ROWS, 3)
Y = np.arange(NUM_ROWS, dtype=np.int32)
BATCH = {"x": jax.ShapeDtypeStruct((8, 3), np.float32), "y": jax.ShapeDtypeStruct((8,), np.int32)}


def row(i):
    return {"x": X[i], "y": Y[i]}


class Source:
    def __repr__(self):
        return "Source"  # a DataLoader compares it with the one in its saved position

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return row(index)


class Counter:
    """An iterator over rows with a `state`, as a user might write it."""

    def __init__(self, seed, num_rows=NUM_ROWS):
        self.order, self.state = np.random.default_rng(seed).permutation(num_rows), [0]

    def __next__(self):
        if self.state[0] == len(self.order):
            raise StopIteration
        self.state = [self.state[0] + 1]
        return row(self.order[self.state[0] - 1])


def npz_file(folder):
    np.savez(folder / "data.npz", x=X, y=Y)
    return folder / "data.npz"


def npz_folder(folder):
    np.savez(folder / "0.npz", x=X[:7], y=Y[:7])
    np.savez(folder / "1.npz", x=X[7:], y=Y[7:])
    return str(folder)


def npy_folder(folder):
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return folder


DATASET = grain.MapDataset.range(NUM_ROWS).map(row)
BY_NUMBER = {
    "arrays": lambda folder: {"x": X, "y": Y},
    "JAX arrays": lambda folder: {"x": jax.numpy.asarray(X), "y": jax.numpy.asarray(Y)},
    "npz file": npz_file,
    "npz folder": npz_folder,
    "npy folder": npy_folder,
    "MapDataset": lambda folder: DATASET,
    "source": lambda folder: Source(),
    "list of rows": lambda folder: [row(i) for i in range(NUM_ROWS)],
}
ITERATED = {
    "IterDataset": lambda folder: DATASET.shuffle(seed=3).to_iter_dataset(),
    "batched IterDataset": lambda folder: DATASET.to_iter_dataset().batch(8, drop_remainder=True),
    "DataLoader": lambda folder: grain.DataLoader(
        data_source=Source(),
        sampler=grain.samplers.IndexSampler(NUM_ROWS, grain.sharding.NoSharding(), shuffle=True, seed=1, num_epochs=1),
        worker_count=0,
    ),
    "make(seed) of Grain": lambda folder: lambda seed: iter(DATASET.shuffle(seed=seed).to_iter_dataset()),
    "make(seed) with a state": lambda folder: Counter,
}
FORMS = BY_NUMBER | ITERATED


def stream(rows, desk, mesh="dp:8", *, batch_size=8, seed=5, **options):
    make = iterated_batches if isinstance(rows, IteratedRows) else Batches
    return make(rows, batch_size=batch_size, shardings=desk.meshes[mesh], seed=seed, **options)


def take(batches, count=None):
    """Returns the y of each batch, after checking that its x belongs to it."""
    found = []
    while count is None or len(found) < count:
        batch = next(batches, None)
        if batch is None:
            break
        y = np.asarray(batch.arrays["y"])
        np.testing.assert_array_equal(np.asarray(batch.arrays["x"]), X[y])
        found.append(y.tolist())
    return found


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_each_row_once_and_resumes_at_the_exact_row(desk, tmp_path, form):
    data = FORMS[form](tmp_path)
    rows = open_rows(data, BATCH, seed=5)
    whole = form != "batched IterDataset"
    with stream(rows, desk, epochs=2) as batches:
        all_batches = take(batches)
    assert len(all_batches) == (5 if whole else 4)
    seen = [y for batch in all_batches for y in batch]
    if whole:
        assert sorted(seen[:NUM_ROWS]) == sorted(seen[NUM_ROWS:]) == list(range(NUM_ROWS))
    # The position of batch 2, as a checkpoint holds it, on another mesh; batch 3 spans two epochs.
    with stream(rows, desk, epochs=2) as batches:
        take(batches, 2)
        state = json.loads(json.dumps(batches.state))
    assert state["next_row"] == 16
    again = open_rows(FORMS[form](tmp_path), BATCH, seed=5)
    with stream(again, desk, "dp:2,tp:4", epochs=2, state=state) as batches:
        assert take(batches) == all_batches[2:]
    if whole:  # with another batch size too
        with stream(again, desk, "dp:2,tp:4", epochs=2, state=state, batch_size=4) as batches:
            assert [y for batch in take(batches) for y in batch] == seen[16:]
    with stream(again, desk, epochs=None, prefetch=0) as batches:
        assert take(batches, 4)[: len(all_batches)] == all_batches[:4]


@pytest.mark.parametrize("form", BY_NUMBER)
def test_rows_with_numbers_are_shuffled_by_seed_and_epoch(desk, tmp_path, form):
    rows = open_rows(BY_NUMBER[form](tmp_path), BATCH)
    orders = {}
    for seed in (0, 1):
        with stream(rows, desk, "dp:2,tp:4", seed=seed, epochs=2, batch_size=4) as batches:
            orders[seed] = [y for batch in take(batches) for y in batch]
    assert len({tuple(order[start : start + NUM_ROWS]) for order in orders.values() for start in (0, NUM_ROWS)}) == 4
    # All forms have the same order, so a run may change from one to another.
    arrays = open_rows({"x": X, "y": Y}, BATCH)
    with stream(arrays, desk, "dp:2,tp:4", seed=1, epochs=2, batch_size=4) as batches:
        assert [y for batch in take(batches) for y in batch] == orders[1]


def test_random_transformations_draw_new_values_in_every_epoch(desk):
    noisy = grain.MapDataset.range(8).seed(1).random_map(lambda i, rng: {"z": np.float32(i + rng.random())})
    rows = open_rows(noisy, {"z": np.zeros(8, np.float32)})
    with stream(rows, desk, epochs=3) as batches:
        epochs = [np.sort(np.asarray(batch.arrays["z"])) for batch in batches]
    assert [np.floor(z).tolist() for z in epochs] == [list(range(8))] * 3
    assert len({z.tobytes() for z in epochs}) == 3
    with stream(rows, desk, epochs=3, start_row=16) as batches:
        np.testing.assert_array_equal(np.sort(np.asarray(next(batches).arrays["z"])), epochs[2])


def test_other_data_is_noticed_on_resume(desk):
    with stream(open_rows({"x": X, "y": Y}, BATCH), desk) as batches:
        state = batches.state
    with pytest.raises(DataError, match="the data changed since the state was saved"):
        stream(open_rows({"x": X + 1, "y": Y}, BATCH), desk, state=state)
    with stream(open_rows(Counter, BATCH, seed=5), desk) as batches:
        state = batches.state
    with pytest.raises(DataError, match="the data changed since the state was saved"):
        stream(open_rows(lambda seed: Counter(seed + 1), BATCH, seed=5), desk, state=state)


class Unsteady(Source):
    def __getitem__(self, index):
        return {"x": np.random.random(3).astype(np.float32), "y": Y[index]}


class NoPosition:
    def __next__(self):
        return row(0)


class OddPosition(Counter):
    def get_state(self):
        return {1: (2, 3)}

    def set_state(self, state):
        pass


def empty_folder(folder):
    (folder / "notes.txt").write_text("no arrays")
    return folder


ERRORS = {
    "another dtype": ({"x": X.astype(np.float64), "y": Y}, r"a row of `x` is float64\[3\].*has float32\[3\]"),
    "another shape": ({"x": X[:, :2], "y": Y}, r"a row of `x` is float32\[2\]"),
    "a missing array": ({"x": X}, "it has no `y`"),
    "one more array": ({"x": X, "y": Y, "z": Y}, "it has `z`, which the batch has not"),
    "unequal lengths": ({"x": X, "y": Y[:5]}, "its arrays differ in rows: `x` has 20, `y` has 5"),
    "a scalar": ({"x": X, "y": np.int32(1)}, "`y` is a scalar"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, "its arrays have 0 rows"),
    "whole batches by number": (DATASET.batch(8), r"one element is a whole batch(.|\n)*hint: remove .batch"),
    "an endless dataset": (DATASET.repeat(), r"repeats forever(.|\n)*hint: remove .repeat\(\)"),
    "a filter": (DATASET.filter(lambda r: r["y"] > 2), "has no row 0: a filter removed it"),
    "unsteady rows": (Unsteady(), "gives other values when a row is read again"),
    "an iterator": (iter([row(0)]), r"cannot start again(.|\n)*hint: give a function make\(seed\)"),
    "no position": (lambda seed: NoPosition(), "makes a NoPosition, which cannot save its position"),
    "an empty iterator": (lambda seed: Counter(seed, 0), "its iterator ends at once"),
    "wrong elements": (lambda seed: iter(DATASET.map(lambda r: r["x"]).to_iter_dataset()), "its rows differ"),
    "no data at all": (3, r"data is a int, which holds no rows.\nhint: give arrays, a path"),
    "a missing path": ("nowhere/data.npz", "does not exist"),
    "a folder without arrays": (empty_folder, "holds no .npy or .npz files"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_problem(tmp_path, case):
    data, message = ERRORS[case]
    with pytest.raises(DataError, match=message):
        open_rows(data(tmp_path) if data is empty_folder else data, BATCH)


def test_errors_while_reading(desk):
    ragged = DATASET.to_iter_dataset().batch(8)  # the last batch has 4 rows
    with stream(open_rows(ragged, BATCH, seed=5), desk) as batches:
        assert len(take(batches, 2)) == 2
        with pytest.raises(DataError, match=r"`x` is float32\[4, 3\], but .* float32\[8, 3\]"):
            next(batches)
    with pytest.raises(DataError, match=r"gives batches of 8 rows, not 16"):
        stream(open_rows(ragged, BATCH, seed=5), desk, batch_size=16)
    with pytest.raises(DataError, match=r"the position of data is not JSON: \{1: \(2, 3\)\}"):
        stream(open_rows(OddPosition, BATCH, seed=5), desk)
