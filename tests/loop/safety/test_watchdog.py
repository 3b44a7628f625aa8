"""Hangs are reported once, with all stacks; long steps are not hangs."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

import meshwright as mw
from meshwright.loop.safety.watchdog import EXIT_HUNG, Watchdog


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def stuck_in_a_function_of_this_name(event):
    event.wait()


def test_a_hang_is_reported_once_with_all_stacks(tmp_path):
    told, event = [], threading.Event()
    thread = threading.Thread(target=stuck_in_a_function_of_this_name, args=(event,))
    thread.start()
    with Watchdog(0.1, tell=told.append, folder=tmp_path, first_seconds=0.1) as watchdog:
        watchdog.beat(41)
        watchdog.beat(42)
        assert until(lambda: told)
        time.sleep(0.4)
        assert len(told) == 1
        watchdog.beat(43)  # the run continued, and hangs again
        assert until(lambda: len(told) == 2)
    event.set()
    thread.join()
    assert str(tmp_path / "hang-42.txt") in told[0]
    assert "no progress since step 42, 0 s ago" in told[0]
    dump = (tmp_path / "hang-42.txt").read_text()
    assert "stuck_in_a_function_of_this_name" in dump
    assert "test_a_hang_is_reported_once_with_all_stacks" in dump
    assert (tmp_path / "hang-43.txt").exists()


def test_first_steps_and_allowed_phases_may_take_long(tmp_path):
    told = []
    with Watchdog(0.05, tell=told.append, folder=tmp_path, first_seconds=60) as watchdog:
        time.sleep(0.3)
        watchdog.beat(1)  # dispatched, but maybe still compiling
        time.sleep(0.3)
        watchdog.beat(2, allowance=60)
        time.sleep(0.3)
        assert not told
        watchdog.beat(3)
        assert until(lambda: told)
    assert "since step 3" in told[0]


def test_slow_steps_widen_the_limit(tmp_path, monkeypatch):
    with Watchdog(30, tell=print, folder=tmp_path, factor=10, first_seconds=1000) as watchdog:
        now = [time.monotonic()]
        monkeypatch.setattr("meshwright.loop.safety.watchdog.time.monotonic", lambda: now[0])
        assert watchdog.limit() == 1000
        watchdog.beat()
        watchdog.beat()
        assert watchdog.limit() == 30
        for seconds in (8, 9, 500, 9, 10):
            now[0] += seconds
            watchdog.beat()
        assert watchdog.limit() == pytest.approx(90)
        watchdog.beat(allowance=700)
        assert watchdog.limit() == 700


def test_time_in_which_the_process_was_suspended_does_not_count(tmp_path, monkeypatch):
    """As after Ctrl-Z, the clock jumps ahead between two checks."""
    told, ahead = [], [0.0]
    clock = time.monotonic
    with monkeypatch.context() as patch, Watchdog(1.0, tell=told.append, folder=tmp_path, first_seconds=1) as watchdog:
        patch.setattr("meshwright.loop.safety.watchdog.time.monotonic", lambda: clock() + ahead[0])
        watchdog.beat(1)
        watchdog.beat(2)
        ahead[0] = 3600.0
        time.sleep(0.6)
        assert not told
        assert until(lambda: told)  # and now it does hang
        assert "since step 2, 1 s ago" in told[0]


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    told = []
    with Watchdog(0.05, tell=told.append, folder=tmp_path / "file", first_seconds=0.05):
        assert until(lambda: told)
    assert "could not write the stacks" in told[0]


def test_other_ranks_write_separate_files(tmp_path):
    told = []
    with Watchdog(0.05, tell=told.append, folder=tmp_path, first_seconds=0.05, rank=3):
        assert until(lambda: told)
    assert [path.name for path in tmp_path.iterdir()] == ["hang-0-rank3.txt"]


def test_close_stops_the_thread(tmp_path):
    watchdog = Watchdog(0.05, tell=print, folder=tmp_path, first_seconds=60)
    mine = [thread for thread in threading.enumerate() if thread.name == "meshwright-watchdog"]
    assert mine
    watchdog.close()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(mw.MeshwrightError, match="cannot detect hangs"):
        Watchdog(0, tell=print, folder=tmp_path)


def test_it_ends_the_process_only_if_asked(tmp_path):
    code = """
        import sys, time
        from meshwright.loop.safety.watchdog import Watchdog
        Watchdog(0.1, tell=print, folder=sys.argv[1], first_seconds=0.1, ends_process=sys.argv[2] == "yes")
        time.sleep(1.5)
    """
    for asked, wanted in (("yes", EXIT_HUNG), ("no", 0)):
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path), asked], timeout=60)
        assert run.returncode == wanted
