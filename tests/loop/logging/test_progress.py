"""Progress output: plain lines to a pipe, a live line on a terminal, nothing on other ranks."""

import io
import os
import pty
import re
import threading

import numpy as np
import pytest

from meshwright.loop.logging.progress import Progress, let_go, steady


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("meshwright.loop.logging.progress.time", clock)
    return clock


def test_a_broken_stream_raises_nothing():
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as pipe:
        progress = Progress(2, stream=pipe)
        progress.say("a line")
        progress.update(2, {"loss": 1.0})
        progress.close()
        print("x" * 100_000, file=steady(pipe), flush=True)
        assert steady(steady(pipe)) is not pipe
        let_go(pipe)
        pipe.flush()  # as Python does at exit
    print("nothing", file=steady(pipe))  # closed
    print("nothing", file=steady(None))


def test_an_encoding_error_is_raised():
    with pytest.raises(UnicodeEncodeError):
        steady(io.TextIOWrapper(io.BytesIO(), "ascii")).write("\N{MIDDLE DOT}")


def test_plain_lines_come_periodically_and_at_the_end(clock):
    stream = io.StringIO()
    with Progress(100, tokens_per_step=1000, stream=stream, plain_seconds=10) as progress:
        for step in range(1, 101):
            clock.now += 1
            progress.update(step, {"loss": np.float32(5 - step / 100)})
        progress.say("done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/100  loss 4.990"
    assert lines[1] == "step 11/100  loss 4.890  1.00k tokens/s  ETA 1:29"
    assert [re.match(r"step (\d+)", line)[1] for line in lines[:-1]] == [
        *map(str, range(1, 100, 10)), "100",
    ]  # fmt: skip
    assert lines[-2:] == ["step 100/100  loss 4.000  1.00k tokens/s  ETA 0:00", "done"]


def test_the_remaining_time_excludes_compilation(clock):
    progress = Progress(11, stream=io.StringIO())
    clock.now += 500
    progress.update(1, {})
    clock.now += 2
    progress.update(2, {})
    assert progress.figures() == ["ETA 0:18"]


def test_given_figures_are_shown_as_given(clock):
    progress = Progress(10, tokens_per_step=7, stream=None)
    progress.update(1, {"loss": 1.0, "tokens_per_second": 1.5e6, "mfu": 0.5, "memory_bytes": 2**31})
    assert progress.figures() == ["loss 1.000", "1.50M tokens/s", "MFU 50.0%", "memory 2.0 GiB"]
    progress.phase("evaluating")
    assert progress.figures()[0] == "evaluating ..."
    progress.update(2, {"loss": float("nan"), "mfu": None})
    assert progress.figures()[0] == "loss nan"


def test_nothing_is_shown_without_a_stream(capsys):
    with Progress(10, stream=None) as progress:
        progress.update(1, {"loss": 1.0})
        progress.say("x")
    assert capsys.readouterr() == ("", "")


def shown_on_a_terminal(use):
    """Returns the output sent to a real terminal."""
    master, slave = pty.openpty()
    sent = []

    def read():
        while True:
            try:
                block = os.read(master, 4096)
            except OSError:
                return
            if not block:
                return
            sent.append(block)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as stream:
        use(stream)
    reader.join()
    os.close(master)
    return b"".join(sent).decode()


@pytest.mark.parametrize("columns", [120, 80, 40])
def test_a_terminal_gets_one_line_that_fits(columns, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks the standard streams, which are not terminals in tests

    def use(stream):
        with Progress(50, tokens_per_step=4096, stream=stream) as progress:
            for step in range(1, 51):
                progress.update(step, {"loss": 2.5, "mfu": 0.41, "memory_bytes": 3 * 2**30, "tokens_per_second": 9e4})
            progress.say("saved step 50 in [bold]runs/a[/bold]")

    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown_on_a_terminal(use))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert "saved step 50 in [bold]runs/a[/bold]" in lines
    assert lines[-1].startswith("✓")
    assert re.search(r"step 50/50  loss 2.500", lines[-1])
    assert all(len(line) <= columns for line in lines)
    assert ("memory 3.0 GiB" in lines[-1]) == (columns == 120)
