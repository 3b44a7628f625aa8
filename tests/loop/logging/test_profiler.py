"""The profiler traces only the chosen steps."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.run import train


@pytest.fixture
def calls(monkeypatch):
    found = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: found.append(("start", folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: found.append(("stop",)))
    return found


def test_a_range_is_that_of_a_slice(calls, tmp_path):
    profile, told = StepProfiler("3:5", tmp_path), {}
    for step in range(1, 8):
        with profile.annotate(step):
            told[step] = profile.step(step)
    assert calls == [("start", str(tmp_path)), ("stop",)]
    assert told[3] == f"tracing steps 3 to 4 into {tmp_path}"
    assert told[5] == f"trace saved in {tmp_path}; view it with: xprof --logdir {tmp_path}"
    assert [step for step, text in told.items() if text] == [3, 5]
    assert profile.close() is None


def test_a_run_that_resumes_inside_the_range_traces_the_rest(calls, tmp_path):
    profile = StepProfiler("3:8", tmp_path)
    assert profile.step(6) == f"tracing steps 6 to 7 into {tmp_path}"
    assert "trace saved in" in profile.close()
    assert calls == [("start", str(tmp_path)), ("stop",)]


@pytest.mark.parametrize("steps", [None, "10:12"])
def test_nothing_is_traced_outside(calls, tmp_path, steps):
    profile = StepProfiler(steps, tmp_path / "profile")
    assert [profile.step(step) for step in (0, 1, 12, 13)] == [None] * 4
    assert calls == []
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("steps", ["10", "5:5", "7:3", "a:b", "-1:3", ""])
def test_an_invalid_range_is_rejected(steps, tmp_path):
    with pytest.raises(mw.MeshwrightError, match="is not a range of steps"):
        StepProfiler(steps, tmp_path)


def test_a_real_trace_holds_its_steps_and_no_other_can_start(tmp_path):
    profile, double = StepProfiler("1:3", tmp_path), jax.jit(lambda x: x * 2)
    x = jnp.ones(8)
    for step in range(4):
        profile.step(step, x)
        if step == 1:
            with pytest.raises(mw.MeshwrightError, match="cannot start the profiler"):
                StepProfiler("0:9", tmp_path).step(1)
        with profile.annotate(step):
            x = double(x)
    profile.close()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    found = jax.profiler.ProfileData.from_file(str(trace))
    names = [event.name for plane in found.planes for line in plane.lines for event in line.events]
    assert names.count("train") == 2


def test_a_run_marks_its_steps_in_the_trace(make_config, read_run, tmp_path):
    config = make_config(steps=5, profile="2:4", checkpoint_every=0, eval_every=0)
    train(config, say=lambda text: None)
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    marks = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
    assert [dict(event.stats)["step_num"] for event in marks] == [2, 3]
    _, _, events = read_run(tmp_path / "run")
    assert [(event["step"], event["text"].split()[0]) for event in events if event["kind"] == "profile"] == [
        (2, "tracing"),
        (4, "trace"),
    ]
