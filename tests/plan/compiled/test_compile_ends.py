"""The compiling process of a plan ends with the process that waits for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright

# A stand-in for the compiler that says who it is and then hangs.
CHILD = "import os, sys, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(60)"
COMMAND = """
import sys
from pathlib import Path
from meshwright import interrupts
interrupts.guard_process(["plan"])
from meshwright.plan.compiled import compile
folder = Path("work")
folder.mkdir()
with interrupts.EarlySignals():
    compile._run([sys.executable, "-c", {child!r}], folder / "errors.txt", 50.0)
"""
ORPHAN = """
import os, time
from meshwright.plan.compiled.compile_child import _watch_parent
print(os.getpid(), file=open('pid', 'w'), flush=True)
_watch_parent(os.environ["WHO"], seconds=0.05)
time.sleep(60)
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(meshwright.__file__).parents[1])}


def wait_for(folder):
    path = folder / "pid"
    for _ in range(1200):
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError("the child did not start")


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(process):
    return any(not is_alive(process) or time.sleep(0.05) for _ in range(400))


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGTERM, 143, "stopped by SIGTERM\n"), (signal.SIGINT, 130, "interrupted\n")]
)
def test_a_signal_ends_the_child_and_removes_its_folder(tmp_path, number, code, line):
    command = [sys.executable, "-c", COMMAND.format(child=CHILD)]
    parent = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    child = wait_for(tmp_path)
    parent.send_signal(number)
    _, said = parent.communicate(timeout=30)
    assert (parent.returncode, said.decode()) == (code, line)
    assert ends(child)
    assert not (tmp_path / "work").exists()


def test_an_orphan_ends(tmp_path):
    """After SIGKILL, the parent cannot clean up."""
    who = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {ORPHAN!r}], env=os.environ | "
    parent = subprocess.Popen([sys.executable, "-c", who + "{'WHO': str(os.getpid())})"], cwd=tmp_path, env=ENVIRONMENT)
    child = wait_for(tmp_path)
    assert is_alive(child)
    parent.kill()
    parent.wait()
    assert ends(child)
    os.unlink(tmp_path / "pid")
