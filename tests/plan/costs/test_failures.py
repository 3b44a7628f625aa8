"""Goodput by formula against a seeded simulation, and the interval that makes it largest."""

import math

import pytest

from meshwright.plan.costs.failures import Failures, simulate

HOUR = 3600.0
# Rarely, several times a day, and so often that restarts fail too.
CASES = [Failures(1 / (30 * HOUR), 20.0, 300.0), Failures(1 / (3 * HOUR), 60.0, 600.0), Failures(1 / 900, 30.0, 400.0)]


@pytest.mark.parametrize("failures", CASES)
@pytest.mark.parametrize("share", [0.3, 1.0, 3.0])
def test_the_formula_equals_a_simulation(failures, share):
    interval = share * failures.best_interval
    # Enough stretches for 40,000 failures: their number has a standard error of 0.5%.
    stretches = round(40_000 / math.expm1(failures.rate * (interval + failures.save)))
    found, formula = simulate(failures, interval, stretches=stretches, seed=7), failures.goodput(interval)
    assert found == pytest.approx(formula, abs=4 * 0.01 * (1 - formula))


@pytest.mark.parametrize("failures", CASES)
def test_the_best_interval_is_the_best(failures):
    best = failures.best_interval
    assert failures.goodput(best) > max(failures.goodput(0.99 * best), failures.goodput(1.01 * best))
    assert (1 - failures.rate * best) * math.exp(failures.rate * (best + failures.save)) == pytest.approx(1)
    assert 0.7 < best / failures.young_daly < 1.01
    assert sum(failures.shares(best).values()) == pytest.approx(1)
    assert all(share > 0 for share in failures.shares(best).values())


def test_the_best_of_simulated_intervals():
    failures = CASES[1]
    tried = [0.25, 0.5, 1.0, 2.0, 4.0]
    found = [simulate(failures, share * failures.best_interval, stretches=20_000, seed=1) for share in tried]
    assert found.index(max(found)) == 2


def test_limits():
    rare = Failures(1e-12, 60.0, 300.0)
    assert rare.best_interval == pytest.approx(rare.young_daly, rel=1e-4)
    assert rare.goodput(rare.best_interval) == pytest.approx(1, abs=1e-4)
    for save in (1.0, 1e-3):  # almost no failures, and a tiny checkpoint
        almost_never = Failures(1e-13, save, 300.0)
        assert almost_never.best_interval == pytest.approx(almost_never.young_daly, rel=1e-4)
    hopeless = Failures(1.0, 1e4, 1e4)
    assert hopeless.goodput(100.0) == 0
    assert 0 < hopeless.best_interval <= 1.0
    assert hopeless.shares(100.0)["lost work"] == 1
