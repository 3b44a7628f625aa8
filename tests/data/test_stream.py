"""Prefetching: batches are read ahead, errors surface at their batch, threads end."""

import gc
import threading
import time

import pytest

from meshwright.data import Batches
from meshwright.errors import DataError


def wait_until(condition, seconds=20):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def no_threads_of_other_tests():
    # The iterator of a Grain DataLoader has no close(): its threads end when it is collected.
    gc.collect()
    wait_until(lambda: not reading_threads())


def reading_threads():
    return [thread for thread in threading.enumerate() if "grain-prefetch" in thread.name]


def make(desk, rows, **options):
    return Batches(rows, **({"batch_size": 4, "shardings": desk.meshes["dp:1"], "seed": 0} | options))


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_batches_are_read_ahead(desk, prefetch):
    rows = desk.CountedRows(40)
    with make(desk, rows, prefetch=prefetch) as batches:
        # Exactly `prefetch` batches are read before the first call of next().
        wait_until(lambda: len(rows.reads) == 1 + 4 * prefetch)
        next(batches)
        wait_until(lambda: len(rows.reads) == 1 + 4 * prefetch + 4)
        time.sleep(0.05)
        assert len(rows.reads) == 1 + 4 * prefetch + 4


def test_reading_overlaps_with_a_step(desk):
    """Batch n + 1 is read while batch n is in use; otherwise reader and user would wait for each other forever."""
    in_use, read = threading.Event(), threading.Event()

    class Slow(desk.CountedRows):
        def __getitem__(self, index):
            if len(self.reads) > 8:
                assert in_use.wait(20)
                read.set()
            return super().__getitem__(index)

    with make(desk, Slow(40), prefetch=1) as batches:
        next(batches)
        next(batches)
        in_use.set()
        assert read.wait(20)


def test_without_prefetch_nothing_is_read_ahead(desk):
    rows = desk.CountedRows(40)
    with make(desk, rows, prefetch=0) as batches:
        assert len(rows.reads) == 1
        next(batches)
        assert len(rows.reads) == 5
        assert not reading_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [OSError("the disk is gone"), DataError("no such row"), StopIteration("too early")])
def test_an_error_surfaces_at_its_batch_and_stays(desk, prefetch, error):
    class Broken(desk.CountedRows):
        def __getitem__(self, index):
            if index == bad:
                raise error
            return super().__getitem__(index)

    bad = -1
    with make(desk, Broken(40)) as batches:
        bad = [row for _ in range(4) for row in desk.rows_of(next(batches))][13]
    expected = (DataError, "raised StopIteration") if isinstance(error, StopIteration) else (type(error), str(error))
    batches = make(desk, Broken(40), prefetch=prefetch)
    for _ in range(3):
        next(batches)
    for _ in range(2):  # the batch that failed is not skipped
        with pytest.raises(expected[0], match=expected[1]):
            next(batches)
    assert batches.state["next_row"] == 12
    wait_until(lambda: not reading_threads())


def test_close_ends_threads(desk):
    wait_until(lambda: not reading_threads())
    batches = make(desk, desk.CountedRows(40), prefetch=3)
    next(batches)
    assert reading_threads()
    batches.close()
    wait_until(lambda: not reading_threads())
    with pytest.raises(DataError, match="this batch stream is closed"):
        next(batches)
    batches.close()


def test_close_waits_for_reads_in_progress(desk):
    hold, entered = threading.Event(), threading.Event()

    class Held(desk.CountedRows):
        def __getitem__(self, index):
            if self.reads:
                entered.set()
                hold.wait(20)
            return super().__getitem__(index)

    rows = Held(40)
    batches = make(desk, rows, prefetch=2)
    assert entered.wait(20)
    threading.Timer(0.1, hold.set).start()
    batches.close()
    assert hold.is_set()
    number = len(rows.reads)
    time.sleep(0.05)
    assert len(rows.reads) == number, "still reading after close()"


def test_leaving_an_evaluation_early_ends_threads(desk):
    from meshwright.data import eval_batches

    batches = eval_batches(desk.CountedRows(40), 4, desk.meshes["dp:1"])
    next(batches)
    batches.close()
    wait_until(lambda: not reading_threads())


def test_grain_is_needed_only_for_batches(run_python):
    result = run_python(
        """
        import sys
        sys.modules["grain"] = None
        import meshwright.data as data
        rows = data.Rows(data.Tokens.of([[1, 2, 3]]), 2)
        try:
            data.Batches(rows, batch_size=1, shardings=None, seed=0)
        except ModuleNotFoundError as error:
            print(error.name)
        """
    )
    assert result.stdout == "grain\n", result.stderr
