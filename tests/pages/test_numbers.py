import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.pages.numbers import compact, duration, log_ticks, number, percent, ticks, time_levels, time_ticks

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


@given(FINITE, st.floats(min_value=1e-6, max_value=1e12), st.integers(min_value=2, max_value=10))
def test_ticks_are_few_rising_and_inside(low, length, count):
    high = low + length
    if high - low < 1e-9 * max(abs(low), 1):  # closer than float precision
        return
    found = ticks(low, high, count=count)
    assert len(found) <= 2 * count + 2
    assert all(a < b for a, b in itertools.pairwise(found))
    slack = 1e-6 * max(abs(low), abs(high), length)
    assert all(low - slack <= tick <= high + slack for tick in found)


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_time_ticks_start_at_0(seconds):
    found = time_ticks(seconds)
    assert found[0] == 0
    assert found[-1] <= seconds * (1 + 1e-9)
    assert 1 <= len(found) <= 16


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1e-4, 2e-3), (0.4, 11), (3, 25), (900, 5400), (60, 7300), (4000, 4e5)])
def test_times_on_an_axis_are_round(low, high, log):
    found = time_levels(low, high, log=log)
    assert 1 < len(found) <= 9
    assert all(low * 0.99 <= level <= high * 1.01 for level in found)
    for level in found:
        if level >= 600:
            assert re.fullmatch(r"\d+ (d|h|min)|\d+ h (15|20|30|45) min|\d+ d (6|12|18) h", duration(level)), duration(
                level
            )


@pytest.mark.parametrize(("low", "high"), [(1e-3, 800), (0.5, 0.9), (1, 1e12), (3, 3.0001)])
def test_log_ticks_are_few(low, high):
    found = log_ticks(low, high)
    assert len(found) <= 7
    assert all(low * 0.99 <= tick <= high * 1.01 for tick in found)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_is_formatted(value):
    for show in (number, compact, percent, duration):
        if not math.isfinite(value) and show is percent:
            continue
        assert show(abs(value))


@pytest.mark.parametrize(
    ("value", "shown"), [(999.96, "1k"), (999_999, "1M"), (0, "0"), (1.0, "1"), (0.25, "0.25"), (123.4, "123.4")]
)
def test_compact_rounds_up_to_the_next_unit(value, shown):
    assert compact(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.9996, "1 s"), (59.97, "1 min"), (3599.8, "1 h"), (60, "1 min"), (0, "0 s")]
)
def test_duration_rounds_up_to_the_next_unit(seconds, shown):
    assert duration(seconds) == shown
