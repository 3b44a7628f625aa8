"""Ctrl-C in a process of the command: exit code 130 and one line, whatever the process is doing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from meshwright import interrupts
from meshwright.interrupts import GRACE, EarlySignals, Interrupted, InterruptWatch
from meshwright.loop.safety.preemption import Preemption

LOADS = "import sys, meshwright.__main__; print(sorted({'jax', 'numpy', 'typing', 'signal'} & set(sys.modules)))"


def test_nothing_heavy_is_imported_before_the_guard(run_python):
    assert run_python(LOADS).stdout.splitlines() == ["[]"]


# The process announces itself, then does something that a Ctrl-C cannot simply interrupt.
GUARDED = """
import hashlib, os, signal, sys, time
from meshwright import interrupts
interrupts.guard_process({arguments!r})
with interrupts.EarlySignals():
    os.write(1, b"ready\\n")
    {body}
"""
SWALLOWS = """
    signal.signal(signal.SIGINT, lambda *_: None)  # a library that takes over the signal and forgets it
    while True:
        time.sleep(0.1)
"""
CLEANS = """
    with interrupts.at_end(lambda: os.write(2, b"clean\\n")):
        time.sleep(9)
"""
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # C code, which runs no handler, as a compiler does
FORKED = """
    if os.fork():
        os.wait()
        raise SystemExit(5)  # a signal to the child is not one to the parent
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
"""


@pytest.mark.parametrize(
    ("body", "number", "arguments", "code", "line"),
    [
        (SWALLOWS, signal.SIGINT, ["rules"], 130, "interrupted\n"),
        (BUSY, signal.SIGINT, ["rules"], 130, "interrupted\n"),
        (BUSY, signal.SIGTERM, ["train"], 75, "stopped by SIGTERM before training started\n"),
        (BUSY, signal.SIGTERM, ["rules"], 143, "stopped by SIGTERM\n"),
        (CLEANS, signal.SIGINT, ["rules"], 130, "interrupted\nclean\n"),
        (FORKED, None, ["rules"], 5, ""),
    ],
)
def test_the_process_ends_even_if_no_handler_can_run(body, number, arguments, code, line):
    program = GUARDED.format(body=body.strip(), arguments=arguments)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.05)
    if number is not None:
        process.send_signal(number)
    _, error = process.communicate(timeout=30)  # the busy ones would take minutes
    assert (process.returncode, error.decode()) == (code, line)


def test_a_parent_that_blocks_ctrl_c_hands_it_over():
    """`dev.py` does this, so that no Ctrl-C meets Python while it starts."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # inherited; no fork of a process with threads
    try:
        started = subprocess.Popen([sys.executable, "-m", "meshwright", "doctor"], stderr=subprocess.PIPE)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    started.send_signal(signal.SIGINT)  # before its first line
    _, error = started.communicate(timeout=30)
    assert (started.returncode, error) == (130, b"interrupted\n")


@pytest.mark.parametrize("delay", [0.15, 0.4, 0.8])
def test_an_early_interrupt_of_a_command(tmp_path, delay):
    """`benchmarks/interrupts.py` is the large version."""
    command = [sys.executable, "-m", "meshwright", "train", "--run", str(tmp_path / "run"), "--sample-tokens", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=30)
    # Python itself can take that long to start on a busy machine; it then ends by the signal, before our first line.
    by_python = process.returncode == -signal.SIGINT or b"KeyboardInterrupt" in error
    too_early = by_python and (b"runpy" in error or b"meshwright" not in error)
    assert (process.returncode, out, error) == (130, b"", b"interrupted\n") or (out == b"" and too_early)


# --- The watch ---


@pytest.fixture
def follow(monkeypatch):
    """Feeds signals to a watch, and returns those that end the process."""
    monkeypatch.setattr(interrupts, "GRACE", 0.01)

    def run(*groups, can_save=False, excuse=()):
        watch, ended = InterruptWatch(trains=True), []
        watch.end = ended.append
        watch.can_save = can_save
        reads, writes = os.pipe()
        thread = threading.Thread(target=watch._follow, args=(reads,))
        thread.start()
        for number, group in enumerate(groups):
            watch.excused += excuse[number] if excuse else 0
            os.write(writes, bytes(group))
            time.sleep(0.1)
        os.close(writes)
        thread.join()
        os.close(reads)
        return ended

    return run


def test_the_watch_waits_only_for_a_run_that_saves(follow):
    ctrl_c, term = signal.SIGINT, signal.SIGTERM
    assert follow([ctrl_c]) == [ctrl_c]
    assert follow([term]) == [term]
    assert follow([signal.SIGUSR1]) == []
    assert follow([ctrl_c], can_save=True) == []  # the handler may wait for the current step
    assert follow([term], can_save=True) == []
    assert follow([ctrl_c], [ctrl_c], can_save=True, excuse=[1, 0]) == [ctrl_c]
    assert follow([ctrl_c, ctrl_c], can_save=True) == [ctrl_c]


def test_the_line_is_said_once(capfd):
    watch = InterruptWatch(trains=False)
    watch.say("interrupted")
    watch.say("interrupted")
    assert capfd.readouterr().err == "interrupted\n"
    assert GRACE < 1.0


# --- Before and after the first step ---


@pytest.mark.usefixtures("usual_signals")
def test_a_run_saves_only_after_its_first_step(capfd):
    with EarlySignals():
        with Preemption() as preemption, pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        assert preemption.reason is None
    with EarlySignals(), Preemption() as preemption:
        preemption.on_metrics(None, None)
        signal.raise_signal(signal.SIGINT)
        assert preemption.reason == "SIGINT"
        assert "Press Ctrl-C again" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
