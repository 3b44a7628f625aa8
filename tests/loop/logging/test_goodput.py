"""Goodput: the categories tile the wall time of a run, over kills, restarts and rollbacks."""

import json
import random
import sys
import types
from types import MappingProxyType

import numpy as np
import pytest

from meshwright.loop.callbacks import Callback
from meshwright.loop.fit import Loop, fit
from meshwright.loop.logging import run_log
from meshwright.loop.logging.goodput import (
    CATEGORIES,
    Goodput,
    RunningGoodput,
    count_goodput,
    lost_steps,
    read_goodput,
)
from meshwright.loop.logging.run_log import RunLog
from meshwright.loop.logging.step_log import StepLog
from meshwright.loop.report import build_report

# --- A run with a fake clock ---


class Clock:
    """Stands for the module `time`."""

    def __init__(self):
        self.now = 1e9

    def time(self):
        return self.now

    perf_counter = monotonic = time

    def spend(self, seconds):
        self.now += seconds


class Killed(BaseException):
    pass


class Saving(Callback):
    def __init__(self, clock, every):
        self.clock, self.every, self.saved = clock, every, 0

    def after_step(self, loop):
        if loop.number % self.every == 0:
            with loop.timed("checkpoint"):
                self.clock.spend(0.5)
            self.saved = loop.number
        return False

    def is_due(self, loop):
        return loop.number % self.every == 0


class Evaluating(Callback):
    def __init__(self, clock):
        self.clock = clock

    def after_step(self, loop):
        if loop.number % 20 == 0:
            with loop.timed("eval"):
                self.clock.spend(2.0)
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("fit", "logging.run_log", "callbacks"):
        monkeypatch.setattr(sys.modules[f"meshwright.loop.{module}"], "time", clock)
    return clock


def attempt(folder, clock, start, *, kill_at=None, kind="resume"):
    """Trains from step `start` to 100, unless it is killed; returns the last saved step."""
    began = clock.now
    clock.spend(7.0)  # imports, data, restoring
    log = RunLog(folder, tensorboard=False)
    facts = {"began": began}
    if kind == "resume":
        facts["lost"] = log.lost_after(start)
        log.rewind(start)
    log.event(kind, start, "begins", **facts)
    clock.spend(1.0)

    class Batches:
        state = MappingProxyType({})

        def __next__(self):
            clock.spend(0.1)
            return types.SimpleNamespace(arrays={}, first_row=0)

        def close(self):
            pass

    def step(state, batch):
        clock.spend(1.0)
        if state.step + 1 == kill_at:
            log.writes = False  # a killed process writes nothing more
            raise Killed
        return types.SimpleNamespace(step=state.step + 1, skipped=0), {"loss": np.float32(1.0)}

    saving = Saving(clock, 10)
    saving.saved = start
    goodput = RunningGoodput(read_goodput(folder), began)
    loop = Loop(step, 100, log, [StepLog(goodput=goodput), Evaluating(clock), saving])
    try:
        fit(loop, types.SimpleNamespace(step=start, skipped=0), Batches())
        clock.spend(3.0)
        log.event("finish", 100, "finished", seconds=loop.tail())
    except Killed:
        pass
    log._metrics._waiting.clear()
    log.writes = True
    log.close()
    return saving.saved


def test_the_categories_of_a_run_killed_three_times_sum_to_its_wall_time(tmp_path, clock):
    began, saved, kind = clock.now, 0, "start"
    for kill_at in (26, 48, 49, None):  # the third comes before the next checkpoint
        saved = attempt(tmp_path, clock, saved, kill_at=kill_at, kind=kind)
        wall, kind = clock.now - began, "resume"
        clock.spend(30.0)  # nothing runs
    found = read_goodput(tmp_path)
    seconds = found.seconds
    assert sum(seconds.values()) == pytest.approx(wall, rel=1e-9) == found.wall
    assert len(found.attempts) == 4
    # Steps 21-24, 41-46 and 41-47 were in the log when their processes died. The metrics of a step arrive after the
    # next one, whose time is known with them.
    assert seconds["compute"] == pytest.approx(100.0)
    assert seconds["recomputed"] == pytest.approx(1.1 * (5 + 7 + 8))
    assert seconds["input wait"] == pytest.approx(0.1 * 100)
    assert seconds["save"] == pytest.approx(0.5 * 10)
    assert seconds["evaluation"] == pytest.approx(2.0 * 5)
    assert (seconds["startup"], seconds["restart"]) == (8.0, 24.0)
    # Each kill: 30 s, and the step that was running; at the end 3 s about which nothing is known.
    assert seconds["idle"] == pytest.approx(3 * (30.0 + 1.1) + 3.0)
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["goodput"] == pytest.approx(100.0 / (last["time"] - began))
    page = build_report(tmp_path).read_text()
    assert "Goodput" in page
    assert "attempt 4" in page
    assert f"{found.share:.1%}" in str(found)


def test_steps_that_a_rollback_drops_are_recomputed():
    events = [
        {"kind": "start", "time": 10.0, "began": 0.0},
        {"kind": "rollback", "time": 16.0, "lost": [{"from": 12, "until": 15, "seconds": {"step": 2.0, "compile": 1}}]},
        {"kind": "finish", "time": 20.0, "seconds": {"checkpoint": 1.0}},
    ]  # fmt: skip
    lines = [{"time": 12.0, "seconds": {"step": 2.0}}, {"time": 19.0, "seconds": {"step": 3.0, "restart": 1.0}}]
    seconds = count_goodput(events, lines).seconds
    known = {"compute": 5.0, "recomputed": 2.0, "compile": 1.0, "save": 1.0, "startup": 10.0, "restart": 1.0}
    assert seconds == dict.fromkeys(CATEGORIES, 0.0) | known


def test_a_group_that_two_attempts_report_counts_once():
    lost = [{"from": 2.0, "until": 5.0, "seconds": {"step": 3.0}}]
    events = [{"kind": "start", "time": 2.0, "began": 0.0}]
    events += [{"kind": "resume", "time": at, "began": at - 1, "lost": lost} for at in (8.0, 11.0)]
    assert count_goodput(events, []).seconds["recomputed"] == 3.0


def test_lost_steps_of_two_attempts_stay_apart():
    lines = [{"step": n, "time": 10.0 + n, "seconds": {"step": 1.0}} for n in (1, 2, 3)]
    lines += [{"step": n, "time": 50.0 + n, "seconds": {"step": 1.0}} for n in (4, 5)]
    assert [(group["from"], group["until"], group["steps"]) for group in lost_steps(lines, 1)] == [
        (11.0, 13.0, 2),
        (53.0, 55.0, 2),
    ]


def test_damaged_lines_are_harmless():
    """Random values in all fields: no exception, no negative time, and never more than the wall time."""
    rng = random.Random(0)
    odd = [None, "x", float("nan"), -1.0, 1e300, [], {}, True, 5]

    def value():
        return rng.choice(odd) if rng.random() < 0.4 else rng.uniform(0, 100)

    for _ in range(300):
        events = [
            {"kind": rng.choice(["start", "resume", "finish", 3]), "time": value(), "began": value(),
             "seconds": rng.choice([{"step": value()}, value()]),
             "lost": rng.choice([None, [value()], [{"from": value(), "until": value(), "seconds": {"step": value()}}]])}
            for _ in range(6)
        ]  # fmt: skip
        lines = [{"step": value(), "time": value(), "seconds": {"step": value(), "data": value()}} for _ in range(6)]
        found = count_goodput(events, lines)
        assert all(seconds >= 0 for seconds in found.seconds.values())
        lost_steps(lines, 3)
        str(found)


def test_a_run_without_times():
    assert str(Goodput([])) == "goodput is unknown: no time is recorded"
    assert count_goodput([{"kind": "eval", "time": 1.0}], []).wall == 0.0
    assert run_log.EVENTS == "events.jsonl"
