"""Training schedules: ticks and memory equal the closed formulas, and wrong tables raise."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.parallel.pipeline.named_schedules import SCHEDULE_NAMES, make_schedule, place_orders
from meshwright.parallel.pipeline.training_schedule import TrainingSchedule, Work

F, B, W = Work


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 16, 32])
def test_ticks_equal_the_formulas(n, m):
    """The constructor checks dependencies, so these tables are also complete and in a possible order."""
    for name in ("1f1b", "aligned-1f1b", "gpipe"):
        assert make_schedule(name, n, m).num_ticks == 2 * (m + n - 1)
    h1, v = make_schedule("zb-h1", n, m), make_schedule("zb-v", n, m)
    # With few microbatches, the weight gradients do not fill the ticks in which a device waits for both passes.
    assert h1.num_ticks == (3 * m + n - 1 if m >= n else 2 * (m + n) - 1)
    assert v.num_ticks == (6 * m + n - 1 if m >= 2 * n - 1 else 4 * (m + n) - 2)
    assert max(h1.peak_residuals) == min(m, n)
    assert max(v.peak_residuals) == 2 * min(m, n)
    assert make_schedule("1f1b", n, m).peak_residuals == tuple(min(n - d, m) for d in range(n))
    assert max(make_schedule("aligned-1f1b", n, m).peak_residuals) == min(2 * n - 1, m)
    assert make_schedule("gpipe", n, m).peak_microbatches == (m,) * n
    for rounds in (1, 2, 3):
        table = make_schedule("interleaved-1f1b", n, m, num_rounds=rounds)
        assert table.num_rounds == rounds
        if m % n == 0:
            assert table.num_ticks == 2 * (m * rounds + n - 1)
            assert max(table.peak_residuals) == min(2 * (n - 1) + (rounds - 1) * n + 1, m * rounds)


def test_zero_bubbles_at_four_stages_and_eight_microbatches():
    bubbles = {name: make_schedule(name, 4, 8).bubble_fraction for name in SCHEDULE_NAMES}
    assert bubbles["zb-v"] <= bubbles["1f1b"] / 3
    assert bubbles["zb-v"] < bubbles["zb-h1"] < bubbles["interleaved-1f1b"] < bubbles["1f1b"] == bubbles["gpipe"]


@pytest.mark.parametrize("name", ["1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_memory_does_not_grow_with_microbatches(name):
    peaks = {make_schedule(name, 4, m).peak_residuals for m in (8, 16, 64)}
    assert len(peaks) == 1


def test_v_comes_back_to_the_first_device():
    table = make_schedule("zb-v", 4, 8)
    assert table.devices == (0, 1, 2, 3, 3, 2, 1, 0)
    assert table.splits_backward
    cells = list(table.cells())
    assert len(cells) == 3 * 8 * 8
    assert str(cells[0]) == "F0:0"
    assert table.ticks[W].min() > table.ticks[F].min()


def test_times():
    """Without lockstep, the times are those of the papers; `start_times` ends with the end."""
    one, h1, v = (make_schedule(name, 4, 8) for name in ("1f1b", "zb-h1", "zb-v"))
    assert one.makespan(lockstep=False) == 3 * (8 + 3)
    assert one.makespan(forward=0, lockstep=False) == 2 * (8 + 3)
    # Equal times need no waiting, in lockstep or not.
    for lockstep in (True, False):
        assert h1.makespan(backward=1, lockstep=lockstep) == 27
        assert v.makespan(forward=0.5, backward=0.5, weights=0.5, lockstep=lockstep) == 25.5
    starts = one.start_times(lockstep=False)
    assert starts.shape == (one.num_ticks + 1, 4)
    assert starts[-1].max() == 33
    assert (np.diff(starts, axis=0) >= 0).all()
    assert one.makespan() >= 33  # a device that waits for its neighbors is never earlier


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 8), (4, 9), (3, 7), (8, 32)])
def test_aligned_schedules_never_wait(n, m, rounds):
    """Devices that wait for their neighbors after each tick are as fast as those that do not, and as a whole group."""
    table = make_schedule("interleaved-1f1b", n, m, num_rounds=rounds)
    works = [set(row[row != -1].tolist()) for row in table.work]
    assert all(len(kinds) == 1 for kinds in works)
    for times in ({"forward": 1, "backward": 2}, {"forward": 1, "backward": 3}):
        time = table.makespan(**times)
        if m % n == 0:
            assert time == table.makespan(**times, lockstep=False) == (m * rounds + n - 1) * sum(times.values())
        assert time <= make_schedule("1f1b", n, m).makespan(**times) * rounds
    if rounds == 1:
        aligned = make_schedule("aligned-1f1b", n, m)
        assert (aligned.stages == table.stages).all()
        assert (aligned.work == table.work).all()


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([[(F, 0, 0), (B, 0, 0)]], None),
        ([[(F, 0, 0), (B, 0, 0), (B, 0, 0)]], "B0:0 already ran at tick 1"),
        ([[(B, 0, 0), (F, 0, 0)]], "tick 0, device 0: B0:0 needs the result of F0:0, which has not run before"),
        ([[(F, 0, 0), (F, 0, 1), (B, 0, 0)]], "is missing 1 cells, e.g. B0:1"),
        ([[(F, 0, 0), (B, 0, 0), (W, 0, 0), (F, 0, 1), (B, 0, 1)]], "is missing 1 cells, e.g. W0:1"),
        ([[(F, 0, 0), (F, 1, 0), None], [None, None, (B, 1, 0)]], "tick 2, device 1: B1:0 is on the wrong device"),
        ([[(F, 0, 0)], [None]], "1 virtual stages on 2 devices"),
        ([[(F, 0, 0), (3, 0, 0)]], "needs a kind of work"),
    ],
)
def test_wrong_tables_raise(cells, message):
    rows = [[(-1, -1, -1) if cell is None else cell for cell in row] for row in cells]
    tables = np.array(rows).T  # kind, tick, device
    if message is None:
        assert TrainingSchedule(*tables).num_ticks == 2
        return
    with pytest.raises(mw.MeshwrightError, match=message):
        TrainingSchedule(*tables)


def test_wrong_arguments_raise():
    with pytest.raises(mw.MeshwrightError, match=r"unknown pipeline schedule 'zbv'(.|\n)*zb-v"):
        make_schedule("zbv", 2, 2)
    with pytest.raises(mw.MeshwrightError, match="'zb-v' has 2 virtual stages per device; got 3"):
        make_schedule("zb-v", 2, 2, num_rounds=3)
    with pytest.raises(mw.MeshwrightError, match="cannot have 0 microbatches"):
        make_schedule("1f1b", 2, 0)
    with pytest.raises(mw.MeshwrightError, match="wait for each other: F1:0 cannot run"):
        place_orders([[(F, 1, 0)]])
    with pytest.raises(mw.MeshwrightError, match="three tables"):
        TrainingSchedule(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros(2))
    rows = np.full((3, 8, 4), -1)
    for stage, device in enumerate((0, 2, 1, 3)):
        for tick, work in ((stage, F), (7 - stage, B)):
            rows[:, tick, device] = work, stage, 0
    with pytest.raises(mw.MeshwrightError, match="stage 0 is on device 0 and stage 1 on device 2"):
        TrainingSchedule(*rows)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("num_rounds", [2, 3])
def test_interleaved_schedules_take_any_number_of_microbatches(num_stages, num_rounds):
    for count in range(1, 3 * num_stages):
        schedule = make_schedule("interleaved-1f1b", num_stages, count, num_rounds=num_rounds)
        assert sum(1 for _ in schedule.cells()) == 2 * num_stages * num_rounds * count
