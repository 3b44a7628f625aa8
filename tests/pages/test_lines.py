import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from meshwright.pages import smooth, thin


@given(st.integers(min_value=0, max_value=800), st.integers(min_value=8, max_value=100), st.integers())
def test_thin_keeps_ends_and_extremes(count, limit, seed):
    rng = random.Random(seed)
    xs, ys = list(range(count)), [rng.gauss(0, 1) for _ in range(count)]
    kept_xs, kept_ys = thin(xs, ys, limit=limit)
    assert len(kept_xs) <= limit
    assert all(a < b for a, b in itertools.pairwise(kept_xs))
    assert all(ys[x] == y for x, y in zip(kept_xs, kept_ys, strict=True))
    if count:
        assert (kept_xs[0], kept_xs[-1]) == (0, count - 1)
        assert (min(kept_ys), max(kept_ys)) == (min(ys), max(ys))


def test_one_spike_and_one_gap_in_a_million_survive():
    ys = [1.0] * 1_000_000
    ys[123_456], ys[654_321] = 99.0, math.nan
    xs, kept = thin(range(len(ys)), ys)
    assert len(xs) < 2100
    assert 99.0 in kept
    assert 654_321 in xs
    assert math.isnan(kept[xs.index(654_321)])


def test_smoothing_keeps_a_straight_line():
    ys = [10 - 0.5 * i for i in range(50)]
    assert all(math.isclose(a, b) for a, b in zip(smooth(ys, window=11), ys, strict=True))


def test_noise_is_averaged():
    rng = random.Random(0)
    rough = [rng.gauss(0, 1) for _ in range(2000)]
    even = smooth(rough, window=101)[100:-100]
    assert max(map(abs, even)) < 0.5


def test_gaps_stay_gaps_and_do_not_spread():
    found = smooth([2.0, 2.0, math.nan, 4.0, 4.0], window=3)
    assert math.isnan(found[2])
    assert [found[i] for i in (0, 1, 3, 4)] == [2.0, 2.0, 4.0, 4.0]
