"""kill -9 during a save, while writing a manifest, during a removal: no finished step is lost or wrong."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import meshwright as mw
from meshwright.checkpoint import Checkpoints, Keep, verify_step

TREE = {"w": np.zeros((64, 64), np.float32)}

CHILD = """
import os, shutil, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import meshwright as mw
from meshwright.checkpoint import Checkpoints, Keep, arrays, peers, retention

folder, point = sys.argv[1:]
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def when(module, name, *, after):
    plain = getattr(module, name)
    def patched(*args, **options):
        if armed and not after:
            die()
        result = plain(*args, **options)
        if armed:
            die()
        return result
    setattr(module, name, patched)

armed = False
POINTS = {
    "arrays are being written": lambda: when(arrays, "finish_writing", after=False),
    "arrays are written": lambda: when(arrays, "finish_writing", after=True),
    "files are hashed": lambda: when(peers, "hash_files", after=True),
    "the manifest has a temporary name": lambda: when(os, "replace", after=False),
    "the manifest is there": lambda: when(peers, "write_manifest", after=True),
    "an old step has no manifest": lambda: when(retention, "sync_folder", after=True),
    "an old step is half gone": lambda: when(os, "rmdir", after=True),
    "a random moment": lambda: None,
}
POINTS[point]()
mesh = mw.create_mesh("dp:8")
layout = mw.make_layout([("w", mw.P("dp"))], {"w": np.zeros((64, 64), np.float32)}, mesh)
checkpoints = Checkpoints(folder, keep=Keep(last=2))
start = (checkpoints.latest() or 0) + 1
for step in range(start, start + 1000):
    armed = step == 3
    checkpoints.save(layout.shard({"w": np.full((64, 64), step, np.float32)}), step=step, layout=layout, facts={})
    if point == "a random moment":
        print(f"saving {step}", flush=True)
    checkpoints.wait()
    print(f"finished {step}", flush=True)
"""


def run_until_killed(folder, point, *, after=None):
    """Runs a program that saves step after step until it is killed; returns the steps that it reported as finished."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(folder), point]
    # The pipe holds its few lines of output after it dies.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        lines = []
        if after is not None:
            number, seconds = after
            for line in child.stdout:
                lines.append(line)
                if line.startswith(f"saving {number}"):
                    break
            time.sleep(seconds)
            child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        assert child.wait(timeout=60) == -signal.SIGKILL
    return [int(line.split()[1]) for line in lines if line.startswith("finished")]


def check(folder, finished):
    """Checks that the killed program left the steps it reported, and that a new run can resume from them."""
    layout = mw.make_layout([("w", mw.P("dp"))], TREE, mw.create_mesh("dp:8"))
    checkpoints = Checkpoints(folder, keep=Keep(last=2))
    there = checkpoints.steps()
    # One more step may have finished after the last line, which removes the oldest.
    wanted = [step for step in (*finished[-2:], checkpoints.latest()) if step > checkpoints.latest() - 2]
    assert set(wanted) <= set(there), "a finished step was lost"
    assert checkpoints.latest() in (finished[-1], finished[-1] + 1)
    for step in there:
        assert verify_step(folder / str(step)) == []
        restored = checkpoints.restore(layout, step=step)
        np.testing.assert_array_equal(restored.state["w"], np.full((64, 64), step))
    latest = checkpoints.latest()
    Checkpoints(folder).clean()
    assert sorted(os.listdir(folder), key=int) == [str(step) for step in there]
    return latest


@pytest.mark.parametrize(("point", "latest", "kept"), [
    ("arrays are being written", 2, [1, 2]),
    ("arrays are written", 2, [1, 2]),
    ("files are hashed", 2, [1, 2]),
    ("the manifest has a temporary name", 2, [1, 2]),
    ("the manifest is there", 3, [1, 2, 3]),
    ("an old step has no manifest", 3, [2, 3]),
    ("an old step is half gone", 3, [2, 3]),
])  # fmt: skip
def test_killed_at_a_given_point(tmp_path, point, latest, kept):
    finished = run_until_killed(tmp_path, point)
    assert finished == [1, 2]
    assert Checkpoints(tmp_path).steps() == kept
    assert check(tmp_path, finished) == latest


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """Four times in one folder; each run resumes where the last one was killed."""
    rng = np.random.default_rng(0)
    latest = 0
    for _ in range(4):
        finished = run_until_killed(
            tmp_path, "a random moment", after=(latest + int(rng.integers(2, 5)), float(rng.uniform(0, 0.1)))
        )
        assert finished[0] == latest + 1
        latest = check(tmp_path, finished)
