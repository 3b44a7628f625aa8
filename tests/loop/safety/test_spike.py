"""Spike detection on synthetic loss curves."""

import math

import numpy as np
import pytest

import meshwright as mw
from meshwright.loop.safety.spike import SpikeGuard


def curve(seed, steps=1000, noise=0.05):
    """A loss that falls from 5.5 to about 1.5, with heavy-tailed noise."""
    rng = np.random.default_rng(seed)
    return 1.5 + 4 * np.exp(-np.arange(steps) / 100) + noise * rng.standard_t(6, steps)


def found(losses, **options):
    guard = SpikeGuard(**options)
    return [step for step, loss in enumerate(losses) if guard.check(loss)]


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_curve_has_no_spike(seed):
    assert found(curve(seed)) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("height", [1.5, 4.0, 1e6])
def test_a_jump_is_found_at_its_first_step(seed, height):
    losses = curve(seed)
    losses[700:720] += height * np.exp(-np.arange(20) / 5)
    spikes = found(losses)
    assert spikes[0] == 700
    assert all(700 <= step < 720 for step in spikes)


def test_a_slow_rise_is_found_too():
    losses = curve(0, noise=0.01)
    losses[600:] += 0.05 * np.arange(400)
    assert 600 < found(losses)[0] < 620


def test_non_finite_losses_are_ignored():
    losses = curve(3)
    losses[[0, 5, 100, 400, 401, 402]] = np.nan
    losses[[50, 450]] = np.inf
    losses[460] = -np.inf
    losses[700] += 3
    assert found(losses) == [700]


def test_a_flat_curve_has_no_spikes():
    guard = SpikeGuard(window=16)
    assert not any(guard.check(2.0 + 1e-4 * (step % 2)) for step in range(100))
    assert guard.check(2.1)


def test_negative_and_zero_losses_work_too():
    rng = np.random.default_rng(0)
    losses = -3 + 0.05 * rng.standard_normal(300)
    losses[200] = -1
    assert found(losses) == [200]
    assert found(np.where(np.arange(300) == 200, 1.0, 0.05 * rng.standard_normal(300))) == [200]


def test_spikes_do_not_enter_the_window():
    losses = np.concatenate([curve(1)[:500], np.full(200, 8.0)])
    assert found(losses) == list(range(500, 700))


def test_patience_waits_for_spikes_in_a_row():
    losses = curve(2)
    losses[600] += 5
    losses[700:704] += 5
    assert found(losses, patience=3) == [702, 703]


def test_detection_starts_late_and_again_after_a_reset():
    guard = SpikeGuard(window=32)
    assert not any(guard.check(loss) for loss in (1, 1, 1, 100, 1, 1, 1, 1))
    assert guard.limit() < math.inf
    guard.reset()
    assert guard.limit() == math.inf
    assert not guard.check(50.0)


@pytest.mark.parametrize("options", [{"window": 4}, {"factor": 0}, {"factor": math.nan}, {"patience": 0}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(mw.MeshwrightError, match="cannot detect spikes"):
        SpikeGuard(**options)
