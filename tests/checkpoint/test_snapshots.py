"""Snapshots in host memory: the newest complete one is restored bit for bit, and no other."""

import os

import pytest

from meshwright.checkpoint.snapshot import Snapshots, snapshots
from meshwright.errors import ConfigError

from .test_processes import run_processes


@pytest.fixture
def taken(tmp_path, first):
    layout, state = first
    said = []
    taking = Snapshots(tmp_path, tell=said.append)
    for step in (4, 8):
        taking.take(state, step=step, layout=layout, facts={"step": step})
    taking.wait()
    return taking, said


def test_the_newest_is_restored_and_one_before_it_is_kept(taken, lab, first, tmp_path):
    layout, state = first
    taking, said = taken
    restored, notes = Snapshots(tmp_path).restore(layout, after=-1)
    assert (restored.step, restored.facts, notes) == (8, {"step": 8}, [])
    assert lab.bits(restored.state) == lab.bits(state)
    assert Snapshots(tmp_path).restore(layout, after=8) == (None, [])
    assert Snapshots(tmp_path).restore(lab.start(init=lambda key: lab.init(key, 64))[0], after=-1)[0] is None
    taking.take(state, step=12, layout=layout, facts={})  # 8 is complete, so 4 is no longer needed
    taking.wait()
    assert sorted(os.listdir(tmp_path)) == ["12", "8"]
    assert (tmp_path / "12" / "rank-0.data").stat().st_mode & 0o777 == 0o600
    again = Snapshots(tmp_path)
    assert again.restore(layout, after=8)[0].step == 12
    again.begin()
    assert (os.listdir(tmp_path), said) == (["12"], [])
    assert Snapshots(tmp_path).restore(layout, after=8)[0].step == 12
    again.forget()
    assert os.listdir(tmp_path) == []


def test_a_changed_byte_or_a_missing_table_leaves_the_one_before(taken, lab, first, tmp_path):
    layout, state = first
    lab.flip(tmp_path / "8" / "rank-0.data", 100)
    restored, notes = Snapshots(tmp_path).restore(layout, after=-1)
    assert (restored.step, restored.facts) == (4, {"step": 4})
    assert lab.bits(restored.state) == lab.bits(state)
    assert len(notes) == 1
    assert "skipped the snapshot of step 8 in host memory: the hosts that are left do not hold all of `" in notes[0]
    assert "of rank-0 is damaged" in notes[0]
    lab.flip(tmp_path / "4" / "rank-0.json", 30)
    restored, notes = Snapshots(tmp_path).restore(layout, after=-1)
    assert restored is None
    assert "the table of rank-0 is damaged" in notes[1]


def test_a_full_memory_is_reported_once_and_the_last_one_stays(taken, first, tmp_path, monkeypatch):
    layout, state = first
    taking, said = taken

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    for step in (12, 16, 20):
        taking.take(state, step=step, layout=layout, facts={})
    taking.wait()
    assert len(said) == 1
    assert said[0].startswith(
        "no snapshot of step 12 (rank 0: the memory is full ([Errno 28] No space left on device))"
    )
    assert Snapshots(tmp_path).restore(layout, after=-1)[0].step == 8


def test_without_the_memory_they_are_refused(first, tmp_path, monkeypatch):
    assert "3 copies at most" in Snapshots(tmp_path).require_memory(first[0])
    monkeypatch.setattr(snapshots, "_available", lambda: 10000)
    text = r"snapshots take 36.4 KiB on \S+ \(3 copies of the state of 1 rank\), but only 9.8 KiB of memory can be used"
    with pytest.raises(ConfigError, match=text):
        Snapshots(tmp_path).require_memory(first[0])


TWO_HOSTS = """
import shutil
from pathlib import Path
from meshwright.checkpoint.snapshot import Snapshots

home = Path(folder) / f"host-{rank}"  # as if each process had the memory of its own host
home.mkdir(mode=0o700)
away = Path(folder) / f"away-{rank}"
split = mw.make_layout(mw.Rules([("w", mw.P("dp")), ("b|rng|n", mw.P())]), tree, mesh)
snapshots, out = Snapshots(home), {}
snapshots.take(state(60), step=6, layout=layout, facts={"from": rank})
snapshots.wait()
shutil.copytree(home, away)
snapshots.forget()  # a rollback
snapshots.take(state(3), step=3, layout=layout, facts={"from": rank})
snapshots.take(state(6), step=6, layout=layout, facts={"from": rank, "again": True})
snapshots.wait()
multihost_utils.sync_global_devices("taken")
if rank == 1:  # this host comes back with what it had before the rollback
    shutil.rmtree(home)
    shutil.copytree(away, home)
restored, notes = Snapshots(home).restore(layout, after=0)
out |= {"step": restored.step, "facts": dict(restored.facts), "same": same(restored), "notes": notes}
restored, notes = Snapshots(home).restore(split, after=0)  # rank 0 never had these halves of w in the last course
out |= {"lost": restored is None, "why": notes}
multihost_utils.sync_global_devices("restored")
Snapshots(home).forget()
out["left"] = os.listdir(home)
print(json.dumps(out), flush=True)
"""


def test_the_shards_of_a_lost_host_come_from_its_replica_and_not_from_another_course(tmp_path):
    outs = run_processes(2, TWO_HOSTS, tmp_path, "dp:2,fsdp:2,tp:2")
    for out in outs:
        assert (out["step"], out["same"], out["notes"]) == (6, True, [])
        assert out["facts"] == {"from": 0, "again": True}
        assert out["lost"]
        assert "do not hold all of `w`" in out["why"][0]
        assert out["left"] == []
