"""Asked to end: at the next step, once, and with the signals given back. Several processes: tests/launch."""

import os
import signal
import threading

import pytest

from meshwright.loop.safety.preemption import EXIT_PREEMPTED, EarlySignals, Interrupted, Preemption, check_early

pytestmark = pytest.mark.usefixtures("usual_signals")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_requests_a_stop_and_its_handler_is_restored(number, capfd):
    before = signal.getsignal(number)
    with Preemption() as preemption:
        assert not preemption.requested(1)
        os.kill(os.getpid(), number)
        assert preemption.requested(2)
        assert preemption.requested(3)
        assert preemption.reason == signal.Signals(number).name
    assert signal.getsignal(number) is before
    assert ("Press Ctrl-C again to stop at once" in capfd.readouterr().err) == (number == signal.SIGINT)


def test_the_second_interrupt_interrupts():
    with Preemption() as preemption:
        signal.raise_signal(signal.SIGINT)
        assert preemption.requested(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_schedulers_may_repeat_the_signal():
    with Preemption() as preemption:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert preemption.requested(1)


def test_handlers_are_restored_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), Preemption():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_leave_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with Preemption() as preemption:
            seen.append((signal.getsignal(signal.SIGTERM) is before, preemption.requested(1)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def test_an_ignored_hangup_stays_ignored():
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with EarlySignals(), Preemption() as preemption:
            signal.raise_signal(signal.SIGHUP)
            assert not preemption.requested(1)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_request_works_with_a_closed_stderr(monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    with Preemption() as preemption:
        monkeypatch.setattr(os, "write", broken)
        signal.raise_signal(signal.SIGINT)
        assert preemption.requested(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_dropped_early_signal_is_raised_again(number, capfd):
    before = signal.getsignal(number)
    with EarlySignals():
        check_early()

        class Swallows:
            def __del__(self):
                signal.raise_signal(number)

        Swallows()  # Python drops exceptions of finalizers
        for act in (check_early, Preemption().__enter__):
            with pytest.raises(Interrupted, match=signal.Signals(number).name):
                act()
    assert signal.getsignal(number) is before
    check_early()
    assert capfd.readouterr().err == ""


def test_the_exit_code_is_the_documented_one():
    assert EXIT_PREEMPTED == os.EX_TEMPFAIL == 75
