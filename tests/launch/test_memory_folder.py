"""The folder of snapshots: this user's alone, in memory, gone with its launcher, and searched for whole snapshots."""

import json
import os
import random
import shutil

import pytest

from meshwright.errors import ConfigError
from meshwright.launch import memory_folder
from meshwright.launch.launch_options import LaunchOptions
from meshwright.launch.memory_folder import (
    FOLDER,
    hash_table,
    hold_folder,
    newest_snapshot,
    open_folder,
    read_table,
    snapshot_variables,
)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(memory_folder, "is_memory", lambda folder: folder == tmp_path)
    return tmp_path


def test_it_is_private_and_removed_at_the_end_with_those_that_killed_launchers_left(memory):
    mine, other, left = (snapshot_variables(3) for _ in range(3))
    open_folder(left[FOLDER])
    (memory / "meshwright-snapshots-another-host-1").mkdir()
    with hold_folder(other):
        with hold_folder(mine):
            names = {path.name for path in memory.iterdir()}
            assert names == {os.path.basename(mine[FOLDER]), os.path.basename(other[FOLDER]), *ANOTHER}
            assert os.stat(mine[FOLDER]).st_mode & 0o777 == 0o700
        assert os.path.basename(other[FOLDER]) in {path.name for path in memory.iterdir()}
    assert [path.name for path in memory.iterdir()] == ANOTHER


ANOTHER = ["meshwright-snapshots-another-host-1"]


def test_a_folder_that_others_can_read_or_that_is_not_in_memory_is_refused(memory, monkeypatch):
    folder = memory / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match=r"is not a folder of this user alone \(mode 700\)"):
        open_folder(folder)
    (memory / "link").symlink_to(memory)
    with pytest.raises(ConfigError, match="is not a folder of this user alone"):
        open_folder(memory / "link")
    folder.chmod(0o700)
    real, user = os.lstat, os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert real(folder).st_uid == user
    with pytest.raises(ConfigError, match="is not a folder of this user alone"):
        open_folder(folder)
    with pytest.raises(ConfigError, match=r"snapshots need .* in memory, and this host has none"):
        open_folder(memory / "deep" / "folder")


def test_only_a_snapshot_of_all_ranks_counts(tmp_path):
    for step in (5, 10):
        for rank in range(2):
            write(tmp_path / str(step), step, rank)
    assert newest_snapshot(tmp_path) == 10
    (tmp_path / "10" / "rank-1.data").write_bytes(b"12")
    assert newest_snapshot(tmp_path) == 5
    write(tmp_path / "10", 10, 1)
    assert newest_snapshot(tmp_path) == 10
    write(tmp_path / "10", 10, 0, course="b")
    assert newest_snapshot(tmp_path) == 5
    (tmp_path / "10" / "rank-0.json").unlink()
    assert newest_snapshot(tmp_path) == 5
    shutil.rmtree(tmp_path / "5")
    assert newest_snapshot(tmp_path) is None


def test_no_changed_table_is_accepted(tmp_path):
    write(tmp_path / "5", 5, 0)
    path, rng = tmp_path / "5" / "rank-0.json", random.Random(0)
    data = path.read_bytes()
    before = read_table(path)
    for _ in range(300):
        place = rng.randrange(len(data))
        change = rng.choice(
            [data[:place], data[:place] + bytes([rng.randrange(256)]) + data[place + rng.randrange(3) :]]
        )
        path.write_bytes(change)
        assert read_table(path) in (None, before)
    path.unlink()
    os.mkfifo(path)
    assert read_table(path) is None  # without waiting for a writer
    assert newest_snapshot(tmp_path) is None


def write(place, step, rank, course="a"):
    place.mkdir(exist_ok=True)
    (place / f"rank-{rank}.data").write_bytes(b"1234")
    body = {"step": step, "course": course, "rank": rank, "num_ranks": 2, "bytes": 4, "shards": [], "facts": {}}
    (place / f"rank-{rank}.json").write_text(json.dumps(body | {"sha256": hash_table(body)}))


def test_backends_without_the_supervisor_refuse_them():
    with pytest.raises(ConfigError, match="--snapshot-every needs Meshwright's supervisor, which the slurm backend"):
        LaunchOptions(backend="slurm", snapshot_every=5)
    with pytest.raises(ConfigError, match="snapshot_every=0 is out of range"):
        LaunchOptions(snapshot_every=0)
