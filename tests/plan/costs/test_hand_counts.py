"""Bytes that plans compute for sixteen layouts on two TPU slices, against counts by hand.

`benchmarks/plan_layouts.py` has the counts, and compares them with programs compiled for these slices.
"""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("plan_layouts", BENCHMARKS / "plan_layouts.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


layouts = load()


@functools.cache
def known():
    job = layouts.job()
    return job, layouts.profile(job)


@pytest.mark.parametrize("target", layouts.TARGETS)
@pytest.mark.parametrize(("setup", "by_hand"), layouts.LAYOUTS, ids=lambda one: str(one) if one else "")
def test_computed_bytes_equal_the_count_by_hand(target, setup, by_hand):
    job, profile = known()
    assert layouts.computed(job, target, setup, profile) == pytest.approx(by_hand, rel=1e-9)


def test_the_counts_are_not_one_formula():
    """Twelve layouts at least, with different bytes."""
    assert len({round(by_hand) for _, by_hand in layouts.LAYOUTS}) >= 12
