"""A run folder that is deleted, moved or replaced during training ends the run with an error."""

import shutil

import pytest

from meshwright.errors import TrainingError
from meshwright.loop.safety.folder_check import FolderCheck


def test_a_moved_or_replaced_folder_is_noticed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    check = FolderCheck(folder)
    check.check()
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(TrainingError, match="run was deleted or moved during training"):
        check.on_end(None, "finished")
    folder.mkdir()  # another folder of the same name
    with pytest.raises(TrainingError, match="resume the run where its folder is now"):
        check.after_step(None)


def test_a_file_system_that_fails_for_a_moment_is_no_reason(tmp_path, monkeypatch):
    check = FolderCheck(tmp_path)

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.stat", fails)
    check.check()


def test_a_run_whose_folder_disappears_is_not_a_success(desk):
    folder = desk.folder()

    def say(text):
        if text.startswith("training from step"):
            shutil.rmtree(folder)

    with pytest.raises(TrainingError, match="was deleted or moved"):
        desk.run("arrays", steps=4, checkpoint_every=2, report=False, say=say)
    assert not (folder / "checkpoints").exists()  # nothing pretends to be a run
