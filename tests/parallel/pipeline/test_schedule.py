"""Pipeline schedules: built-in tables are valid, and wrong tables raise."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.parallel.pipeline.schedule import Schedule, circular_schedule, gpipe_schedule


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 7, 8, 16])
def test_schedules_are_valid_with_the_expected_bubble(num_stages, num_microbatches):
    gpipe = gpipe_schedule(num_stages, num_microbatches)
    assert gpipe.num_ticks == num_microbatches + num_stages - 1
    assert gpipe.bubble_fraction == pytest.approx((num_stages - 1) / gpipe.num_ticks)
    for num_rounds in (1, 2, 3):
        table = circular_schedule(num_stages, num_rounds, num_microbatches)
        assert (table.num_stages, table.num_rounds, table.num_microbatches) == (
            num_stages, num_rounds, num_microbatches,
        )  # fmt: skip
        if num_microbatches % num_stages == 0:
            assert table.num_ticks == num_microbatches * num_rounds + num_stages - 1


@pytest.mark.parametrize(
    ("stages", "microbatches", "message"),
    [
        ([[0, -1], [-1, 1]], [[0, -1], [-1, -1]], "needs a stage and a microbatch, or -1 in both"),
        ([[1, 0]], [[0, 0]], "tick 0, device 0: stage 1 of microbatch 0 is on the wrong device; it must run on 1"),
        ([[0, -1], [0, 1]], [[0, -1], [0, 0]], "already ran at tick 0"),
        ([[0, -1], [-1, -1], [-1, 1]], [[0, -1], [-1, -1], [-1, 0]], "from tick 1, but that stage ran at tick 0"),
        ([[0, -1], [0, 1]], [[0, -1], [1, 0]], "missing 1 cells, e.g. stage 1 of microbatch 1"),
        ([[0, -1, -1], [-1, 1, -1]], [[0, -1, -1], [-1, 0, -1]], "2 virtual stages on 3 devices"),
        ([0, 1], [0, 0], "two tables of ticks x devices"),
    ],
)
def test_wrong_tables_raise(stages, microbatches, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        Schedule(np.array(stages), np.array(microbatches))
