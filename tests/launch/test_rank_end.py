"""How a rank ends when it loses another one, or fails while the other waits: one line and its exit code."""

import pytest

from meshwright.cli import train as command
from meshwright.loop import run as run_module
from meshwright.loop.fit import Result
from meshwright.loop.settings.config import TrainConfig


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def joined(monkeypatch):
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr("meshwright.distributed.join", lambda *_, **__: "rank 0 of 2")
    monkeypatch.setattr("os._exit", end)
    return codes


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            RuntimeError("INTERNAL: Gloo all-reduce failed: [pair.cc:553]\nConnection closed by peer"),
            76,
            "rank 0 stopped: it lost another rank (Gloo all-reduce failed: [pair.cc:553] Connection closed by peer)\n",
        ),
        (ValueError("a mistake"), 1, "ValueError: a mistake\n"),
    ],
)
def test_a_rank_that_lost_another_prints_one_line(joined, monkeypatch, capsys, error, code, said):
    def train(config, **_):
        raise error

    monkeypatch.setattr(run_module, "train", train)
    with pytest.raises(Ended):
        command.run(TrainConfig())
    assert joined == [code]
    printed = capsys.readouterr().err.partition("rank 0 of 2\n")[2]
    assert printed.endswith(said)
    assert ("Traceback" in printed) == (code == 1)


def test_a_rank_that_failed_does_not_wait_for_the_others_at_its_exit(joined, monkeypatch):
    monkeypatch.setattr(run_module, "train", lambda config, **_: Result(None, 3, "finished", {}, saved=False))
    waited = []
    monkeypatch.setattr(
        command.threading, "Thread", lambda target, **_: type("Now", (), {"start": staticmethod(target)})
    )
    monkeypatch.setattr(command, "time", type("Time", (), {"sleep": staticmethod(waited.append)}))
    with pytest.raises(Ended):
        command.run(TrainConfig())
    assert (joined, waited) == ([1], [2.0])
