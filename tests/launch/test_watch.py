"""The launcher with real processes that do not import JAX: they die, freeze, finish, and are started again."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from meshwright.launch.backends import local
from meshwright.launch.backends.local import LocalRanks
from meshwright.launch.supervisor import Policy, Supervisor
from meshwright.launch.watch import Watch

FAKE = Path(__file__).parent / "fake_rank.py"


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Runs two ranks as a plan says, by attempt and rank; returns the exit code, the output and each rank's words."""

    def run(plan, *, sizes=(2,), meanwhile=None, silent_seconds=60.0, **policy):
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"folder": str(tmp_path), "else": 0} | plan))
        monkeypatch.setattr(local, "program", lambda: [sys.executable, str(FAKE), str(script)])
        monkeypatch.setenv("PYTHONPATH", str(Path(local.__file__).parents[3]))
        for name in ("beats", "logs"):
            (tmp_path / name).mkdir()
        said, shown = [], []
        ranks = LocalRanks(["train"], logs=tmp_path / "logs", beats=tmp_path / "beats", show=shown.append, devices=2)
        supervisor = Supervisor(["slot 0", "slot 1"], list(sizes), policy=Policy(**{"backoff": 0.0} | policy))
        watch = Watch(supervisor, ranks, ["slot 0", "slot 1"], said.append, silent_seconds=silent_seconds)
        if meanwhile is not None:
            threading.Thread(target=meanwhile, args=(tmp_path,), daemon=True).start()
        before = signal.getsignal(signal.SIGTERM)
        code = watch()
        assert signal.getsignal(signal.SIGTERM) is before
        words = {
            path.name.removeprefix("attempt-"): json.loads(path.read_text()) for path in tmp_path.glob("attempt-*")
        }
        return code, said, shown, words

    return run


def test_a_killed_rank_restarts_the_run_from_its_folder(launch, tmp_path):
    code, said, shown, words = launch({"1-0": "wait", "1-1": "kill"})
    assert code == 0
    assert len(said) == 1
    assert "rank 1 on slot 1 was killed (SIGKILL) at step 7; the other rank was stopped." in said[0]
    assert 'Its last message: "rank 1 runs". No checkpoint is finished yet' in said[0]
    assert set(shown) == {"rank 0 runs"}
    assert sorted(words) == ["1-0", "1-1", "2-0", "2-1"]
    coordinator = words["1-0"].index("--coordinator")
    assert words["1-0"][:3] == ["train", "--devices", "2"]
    assert words["1-0"][coordinator + 2 :] == ["--num-processes", "2", "--process-id", "0"]
    assert words["2-1"][:5] == ["train", "--run", str(tmp_path / "run"), "--resume", "--or-start"]
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "rank 0 runs\n" * 2


def test_a_frozen_rank_is_found_and_the_run_may_shrink(launch):
    code, said, _, words = launch(
        {"1-0": "wait", "1-1": "freeze"}, sizes=(2, 1), silent_seconds=1.5, quarantine_after=1
    )
    assert code == 0
    assert "rank 1 on slot 1 has given no sign of life" in said[0]
    assert "restarts on 1 rank instead of 2" in said[0]
    assert sorted(words) == ["1-0", "1-1", "2-0"]
    assert words["2-0"][5:] == ["--mesh", "dp:1,fsdp:2", "--minibatches", "2", "--devices", "2"]


def test_the_children_of_a_killed_rank_go_with_it(launch, tmp_path):
    began = time.monotonic()
    code, said, _, _ = launch({"1-0": "wait", "1-1": "leave a child"})
    assert code == 0
    child = int((tmp_path / "child").read_text())
    assert not Path(f"/proc/{child}").exists() or "(zombie)" in Path(f"/proc/{child}/status").read_text()
    assert "rank 1 on slot 1 was killed (SIGKILL)" in said[0]
    assert time.monotonic() - began < 50  # the child would keep the output open for a minute


def test_a_traceback_becomes_one_line(launch):
    code, said, shown, _ = launch({"else": "traceback"}, max_failures=1)
    assert code == 1
    assert len([line for line in shown if "ValueError: no such thing (traceback in " in line]) >= 1
    assert not any("Traceback" in line or "File" in line for line in [*shown, *said])
    assert 'Its last message: "ValueError: no such thing"' in said[0]
    assert "not restarted: this was failure 2 without a new checkpoint" in said[1]


def test_sigterm_to_the_launcher_stops_all_ranks_and_exits_with_75(launch):
    def terminate(folder):
        while len(list(folder.glob("attempt-*"))) < 2:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    code, said, _, words = launch({"else": "wait"}, meanwhile=terminate)
    assert code == 75
    assert "the ranks finish their step and save" in said[0]
    assert "stopped on request at step 7" in said[1]
    assert len(words) == 2
