"""A time limit in seconds of running, on a machine that other programs keep busy."""

import signal
import subprocess
import sys
import time

import pytest

from meshwright.plan.compiled import busy_clock

BUSY = [sys.executable, "-c", "while True: pass"]


def test_a_process_without_a_core_has_more_time(monkeypatch):
    """The clock of the machine runs on; the process seems to run a tenth of that time."""
    begin = time.monotonic()
    monkeypatch.setattr(busy_clock, "cpu_seconds", lambda pid: 0.1 * (time.monotonic() - begin))
    process = subprocess.Popen(["sleep", "1"])
    assert busy_clock.wait_busy(process, 0.4) == 0


@pytest.mark.parametrize("command", [BUSY, ["sleep", "60"]], ids=["busy", "hangs"])
def test_busy_and_hanging_processes_reach_the_limit(command):
    process = subprocess.Popen(command)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            busy_clock.wait_busy(process, 0.5)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_seconds():
    process = subprocess.Popen(BUSY)
    try:
        for _ in range(400):
            used = busy_clock.cpu_seconds(process.pid)
            if used and used > 0.2:
                return
            time.sleep(0.05)
        raise AssertionError(used)
    finally:
        process.kill()
        process.wait()
