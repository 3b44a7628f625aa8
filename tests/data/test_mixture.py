"""Mixtures: exact proportions in every prefix, and every row of every source once per epoch over kills and changes."""

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import Batches, Ledger, MixedBatches, Rows, Tokens, check_ledger, local_rows, mixture_weights
from meshwright.data.mixture.quota_schedule import QuotaSchedule
from meshwright.errors import DataError

SIZES = {"code": 31, "math": 7, "web": 53}
WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}


def sources_of(desk, sizes=SIZES):
    return {name: desk.CountedRows(size, fingerprint=name) for name, size in sizes.items()}


def open_mixture(desk, weights=WEIGHTS, sizes=SIZES, *, mesh="dp:1", **options):
    options = {"batch_size": 8, "seed": 3, "shardings": desk.meshes[mesh]} | options
    return MixedBatches(sources_of(desk, sizes), weights, **options)


def take(desk, num_batches, *args, **options):
    """Returns (source, position, row) of some batches in one list, and the state after them."""
    with open_mixture(desk, *args, **options) as batches:
        found = []
        for _ in range(num_batches):
            batch = next(batches)
            assert desk.rows_of(batch) == batch.row_ids.tolist()
            found += zip(batch.sources.tolist(), batch.source_positions.tolist(), batch.row_ids.tolist(), strict=True)
        return found, json.loads(json.dumps(batches.state))


# --- Proportions ---


@settings(max_examples=40)
@given(
    weights=st.lists(st.one_of(st.integers(1, 30), st.integers(1, 10**9)), min_size=1, max_size=9),
    start=st.integers(0, 10**12),
)
def test_every_prefix_has_the_right_proportions(weights, start):
    taken = [start + number for number in range(len(weights))]
    sources, positions, after = QuotaSchedule(weights, start=start, taken=taken).slots(start, 200)
    counts = np.zeros(len(weights), int)
    for length, (source, position) in enumerate(zip(sources, positions, strict=True), 1):
        assert position == taken[source] + counts[source]
        counts[source] += 1
        for weight, count in zip(weights, counts, strict=True):
            assert abs(count - Fraction(weight * length, sum(weights))) < 1
    assert after.tolist() == (counts + taken).tolist()


def test_a_schedule_can_be_read_in_any_order_and_forgets_old_slots(monkeypatch):
    monkeypatch.setattr("meshwright.data.mixture.quota_schedule._KEPT", 50)
    expected = QuotaSchedule([5, 3, 1], start=0, taken=[0, 0, 0]).slots(0, 5000)
    schedule = QuotaSchedule([5, 3, 1], start=0, taken=[0, 0, 0])
    for first in (0, 40, 20, 4000, 3990, 0, 2500):
        sources, positions, taken = schedule.slots(first, 20)
        assert sources.tolist() == expected[0][first : first + 20].tolist()
        assert positions.tolist() == expected[1][first : first + 20].tolist()
        assert taken.tolist() == np.bincount(expected[0][: first + 20], minlength=3).tolist()
    assert len(schedule._sources) < 4000


def test_weights_from_sizes():
    sizes = {"a": 100, "b": 10_000}
    assert mixture_weights(sizes) == {"a": 1, "b": 100}
    for temperature in (0.5, 2.0, 5.0):
        weights = mixture_weights(sizes, temperature=temperature)
        assert math.isclose(weights["b"] / weights["a"], 100 ** (1 / temperature), rel_tol=1e-6)
    assert mixture_weights({"a": 1, "b": 10**12}, temperature=0.1)["a"] >= 1
    assert mixture_weights(sizes, {"a": "1/3", "b": 2}) == {"a": 1, "b": 6}


@pytest.mark.parametrize("weight", [0, 0.0, -1, math.nan, math.inf, "nan", "much", None, 1e-40])
def test_a_weight_that_is_no_share(desk, weight):
    with pytest.raises(DataError, match=r"the weight of the source `web` is .*\nhint: use a finite number above 0"):
        open_mixture(desk, {"web": weight, "code": 1, "math": 1})


def test_wrong_mixtures(desk):
    with pytest.raises(DataError, match=r"names `wbe`, which is not a source.\nhint: did you mean 'web'"):
        open_mixture(desk, {"wbe": 1, "code": 1, "math": 1})
    with pytest.raises(DataError, match="the source `math` has no weight"):
        open_mixture(desk, {"web": 1, "code": 1})
    with pytest.raises(DataError, match="the source `math` is empty"):
        open_mixture(desk, sizes={**SIZES, "math": 0})
    with pytest.raises(DataError, match="weights or a temperature"):
        open_mixture(desk, temperature=2.0)
    for temperature in (0, -1, math.nan, math.inf):
        with pytest.raises(DataError, match="temperature of a mixture must be finite"):
            open_mixture(desk, None, temperature=temperature)
    with pytest.raises(DataError, match="a source is called 'a/b'"):
        open_mixture(desk, None, {"a/b": 3})
    with pytest.raises(DataError, match="no sources"):
        open_mixture(desk, None, {})
    rows = {"a": desk.CountedRows(9), "b": Rows(Tokens.of([[*range(1, 99), 0]]), 4)}
    with pytest.raises(DataError, match="rows of the sources `a` and `b` differ"):
        MixedBatches(rows, batch_size=2, shardings=desk.meshes["dp:1"], seed=0)


# --- Order and epochs ---


@pytest.mark.parametrize("mesh", ["dp:8", "dp:2,tp:4"])
def test_the_order_is_the_same_on_every_mesh_and_batch_size(desk, mesh):
    expected, _ = take(desk, 20)
    assert take(desk, 10, mesh=mesh, batch_size=16)[0] == expected
    # Sources come in the order of their names, whatever the order of the options.
    assert take(desk, 20, dict(reversed(WEIGHTS.items())), dict(reversed(SIZES.items())))[0] == expected


def test_each_source_runs_through_its_own_epochs(desk):
    found, state = take(desk, 60)
    assert state["mixture"]["taken"] == {"code": 144, "math": 48, "web": 288}
    for source, (name, size) in enumerate(sorted(SIZES.items())):
        rows = [row for which, _, row in found if which == source]
        epochs = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs), name
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs) > 2


def test_sources_of_equal_length_have_different_orders(desk):
    found, _ = take(desk, 8, {"a": 1, "b": 1}, {"a": 32, "b": 32})
    assert [row for source, _, row in found if source] != [row for source, _, row in found if not source]


def test_the_order_does_not_change_between_versions(desk):
    # Hard-coded, since a run must resume in the same order after an update.
    found, _ = take(desk, 1, {"a": 3, "b": 1}, {"a": 16, "b": 16})
    assert [(source, row) for source, _, row in found] == ORDER


def test_epochs_end_before_a_source_repeats_once_more(desk):
    with open_mixture(desk, {"a": 3, "b": 1}, {"a": 24, "b": 24}, epochs=2) as batches:
        assert sum(1 for _ in batches) == 8  # 64 rows: 48 of `a`, which are its two epochs
        assert batches.state["mixture"]["taken"] == {"a": 48, "b": 16}


def test_devices_hold_disjoint_rows_and_processes_read_only_theirs(desk):
    """Each half of the devices stands for a process."""
    sources, reads = sources_of(desk), []
    options = {"batch_size": 8, "seed": 3, "shardings": desk.meshes["dp:8"], "prefetch": 0}
    with MixedBatches(sources, WEIGHTS, **options) as batches:
        for rows in sources.values():
            rows.reads.clear()
        batch = next(batches)
        reads = sum(len(rows.reads) for rows in sources.values())
    assert reads == 8 == len(set(zip(batch.sources.tolist(), batch.row_ids.tolist(), strict=True)))
    leaf = batch.arrays["inputs"]
    devices = sorted(leaf.sharding.device_set, key=lambda device: device.id)
    halves = [local_rows(leaf, leaf.sharding, devices=devices[half : half + 4]).tolist() for half in (0, 4)]
    assert sorted(halves[0] + halves[1]) == list(range(8))


def test_targets_are_counted_without_reading_them(desk):
    generator = np.random.default_rng(0)
    documents = [[*generator.integers(1, 9, size), 0] for size in generator.integers(1, 40, 60)]
    rows = Rows(Tokens.of(documents), 16)
    for number in range(len(rows)):
        assert rows.num_targets(number) == int(rows[number]["weights"].sum())
    shardings = desk.meshes["dp:1"]
    with MixedBatches({"a": rows, "b": rows}, {"a": 3, "b": 1}, batch_size=8, shardings=shardings, seed=0) as batches:
        total = {"a": 0, "b": 0}
        for batch in itertools.islice(batches, 5):
            weights = np.asarray(batch.arrays["weights"]).sum(1)
            for source, weight in zip(batch.sources, weights, strict=True):
                total["ab"[source]] += int(weight)
            assert sum(batch.tokens.values()) == weights.sum()
        assert batches.state["mixture"]["tokens"] == total


# --- Resuming ---


@settings(max_examples=6)
@given(data=st.data())
def test_a_state_resumes_with_another_batch_size_and_mesh(desk, data):
    expected, _ = take(desk, 12, batch_size=24)
    found, state = [], None
    while len(found) < 200:
        size = data.draw(st.sampled_from([8, 16, 24]))
        mesh = data.draw(st.sampled_from(["dp:1", "dp:8"]))
        more, state = take(desk, data.draw(st.integers(1, 3)), mesh=mesh, batch_size=size, state=state)
        found += more
    assert found == expected[: len(found)]


def test_new_weights_count_from_the_row_at_which_they_began(desk):
    found, state = take(desk, 5)
    new = {"web": 1, "code": 1, "math": 2}
    more, state = take(desk, 10, new, state=state)
    assert state["mixture"]["since"] == 40
    counts = np.zeros(3)
    for length, (source, _, _) in enumerate(more, 1):
        counts[source] += 1
        assert (abs(counts - length * np.array([1, 2, 1]) / 4) < 1).all()
    for source in range(3):
        assert [place for which, place, _ in found + more if which == source] == list(
            range(sum(which == source for which, _, _ in found + more))
        )


def test_sources_come_and_go_and_keep_their_positions(desk):
    _, state = take(desk, 5)
    left = {name: SIZES[name] for name in ("web", "code")}
    _, state = take(desk, 5, {"web": 1, "code": 1}, left, state=state)
    assert state["mixture"]["taken"]["math"] == 4
    found, state = take(desk, 5, {"web": 1, "math": 1, "new": 2}, {"web": 53, "math": 7, "new": 11}, state=state)
    assert [place for source, place, _ in found if source == 0][:2] == [4, 5]
    assert [place for source, place, _ in found if source == 1][:2] == [0, 1]


def test_changed_data_and_other_states_are_rejected(desk):
    _, state = take(desk, 2)
    with pytest.raises(DataError, match="data of the source `web` changed since the state was saved: 54 rows"):
        take(desk, 1, sizes={**SIZES, "web": 54}, state=state)
    with pytest.raises(DataError, match="saved with seed 3"):
        take(desk, 1, seed=4, state=state)
    with Batches(desk.CountedRows(20), batch_size=4, shardings=desk.meshes["dp:1"], seed=3) as batches:
        single = batches.state
    with pytest.raises(DataError, match="by a run with one source"):
        take(desk, 1, state=single)
    with pytest.raises(DataError, match="the data changed since"):
        Batches(desk.CountedRows(20), batch_size=4, shardings=desk.meshes["dp:1"], seed=3, state=state)


# --- The ledger ---


def run_with_kills(desk, folder, lives, *, ledger=Ledger):
    """Trains in several lives: each resumes at the last checkpoint (every 4 steps) and is killed later."""
    saved, step = None, 0
    for number, (weights, num_steps, size) in enumerate(lives, 1):
        with (
            ledger(folder, start=number) as book,
            open_mixture(desk, weights, batch_size=size, state=saved, first_step=step + 1, ledger=book) as batches,
        ):
            for count in range(1, num_steps + 1):
                next(batches)
                if count % 4 == 0:
                    saved, step = json.loads(json.dumps(batches.state)), step + 4
    return saved


LIVES = [
    (WEIGHTS, 11, 8),
    (WEIGHTS, 6, 8),
    ({"web": 0.2, "code": 0.3, "math": 0.5}, 9, 8),
    ({"web": 0.2, "code": 0.3, "math": 0.5}, 7, 16),
    ({"web": 3, "code": 5, "math": 1}, 13, 8),
    ({"web": 3, "code": 5, "math": 1}, 24, 4),
]


def test_three_sources_killed_five_times_with_weights_changed_twice(desk, tmp_path):
    state = run_with_kills(desk, tmp_path, LIVES)
    report = check_ledger(tmp_path).require()
    assert report.num_starts == 6
    assert report.num_redone > 0
    assert report.source_rows == SIZES
    assert {name: sum(counts) for name, counts in report.sources.items()} == state["mixture"]["taken"]
    for name, counts in report.sources.items():
        assert counts[:-1] == [SIZES[name]] * (len(counts) - 1), "an epoch lacks rows"
        assert len(counts) > 1
    assert "math, epoch 1: 7 of 7 rows, each once" in str(report)


def edit(folder, start, step, change):
    path = folder / f"start-{start:04}.rank-00000.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("step") == step:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_ledger_finds_lost_and_repeated_rows_of_a_source(desk, tmp_path):
    run_with_kills(desk, tmp_path, LIVES)

    def repeat(line):
        number = line["sources"].index(0)
        line["source_positions"][number] -= 1

    edit(tmp_path, 6, 40, repeat)
    problems = "\n".join(check_ledger(tmp_path).problems)
    assert "code: rows at positions" in problems
    assert "were lost" in problems
    assert "used more than once" in problems


def test_the_ledger_finds_a_source_that_began_again(desk, tmp_path):
    lives = [(WEIGHTS, 8, 8), (WEIGHTS, 8, 8)]
    state = run_with_kills(desk, tmp_path, lives[:1])
    state["mixture"]["taken"]["web"] = 0
    with Ledger(tmp_path) as book, open_mixture(desk, state=state, first_step=9, ledger=book) as batches:
        for _ in range(3):
            next(batches)
    assert any("web: rows at positions" in problem for problem in check_ledger(tmp_path).problems)


def test_rows_redone_with_the_same_weights_must_be_the_same(desk, tmp_path):
    run_with_kills(desk, tmp_path, LIVES)
    edit(tmp_path, 1, 10, lambda line: line["rows"].reverse())
    assert any("when it was redone" in problem for problem in check_ledger(tmp_path).problems)


def test_rows_skipped_on_purpose_are_not_lost(desk, tmp_path):
    run_with_kills(desk, tmp_path, [(WEIGHTS, 4, 8)])
    with open_mixture(desk, batch_size=8) as batches:
        states = [next(batches) and batches.state for _ in range(6)]
    before, after = states[3]["mixture"]["taken"], states[5]["mixture"]["taken"]
    with Ledger(tmp_path) as book:
        book.skip(32, 16, why="a spike", sources={name: (before[name], after[name] - before[name]) for name in before})
        with open_mixture(desk, state=states[5], first_step=5, ledger=book) as batches:
            next(batches)
    report = check_ledger(tmp_path).require()
    assert any("skipped 16 rows" in note for note in report.notes)


ORDER = [(0, 8), (0, 10), (0, 15), (1, 7), (0, 14), (0, 11), (0, 5), (1, 9)]
