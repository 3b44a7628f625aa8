"""Run folders: which may hold a run, and errors for unwritable ones."""

import errno
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.loop.folder.run_dir import RunFolder
from meshwright.loop.settings.config import TrainConfig


def open_folder(path, **changes):
    folder = RunFolder.open(TrainConfig().changed({"run": str(path), **changes}), name="x")
    folder.close()
    return folder


def test_a_folder_of_other_files_is_rejected(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for changes in ({}, {"resume": True, "or_start": True}):
        with pytest.raises(ConfigError, match=r"holds other files but no run: notes.txt.\nhint: use a folder"):
            open_folder(tmp_path, **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", [None, "slurm-12.out", "lost+found", "metrics.jsonl", ".nfs0001"])
def test_an_empty_folder_and_leftovers_of_an_attempt_are_accepted(tmp_path, name):
    if name is not None:
        (tmp_path / name).touch()
    assert not open_folder(tmp_path).resumed


def test_a_file_in_place_of_the_folder_is_rejected(tmp_path):
    (tmp_path / "fox.txt").touch()
    for name in ("fox.txt", "fox.txt/run"):
        with pytest.raises(ConfigError, match=r"cannot write .*: .*\nhint: choose another --run: a file"):
            open_folder(tmp_path / name)
    with pytest.raises(ConfigError, match=r"File name too long.\nhint: use a shorter name"):
        open_folder(tmp_path / ("x" * 300))


def test_a_folder_without_write_permission_is_rejected(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"run: Permission denied.\nhint: use a folder with write permission"):
        open_folder(tmp_path / "run")
