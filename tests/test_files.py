import contextlib
import errno
import os
import threading

import pytest

from meshwright.files import explain_failure, remove_folder, write_atomically


def test_a_file_is_complete_or_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, "old")
    written = []
    for name in ("fsync", "replace"):

        def fail(*args):
            written.append([entry.name for entry in tmp_path.iterdir() if entry != path])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space left"):
                write_atomically(path, b"new")
        assert os.listdir(tmp_path) == ["x"]
        assert path.read_text() == "old"
    # The temporary file has a name that starts with a dot, and is removed.
    assert [names[0].startswith(".x.") for names in written] == [True, True]


def test_contents_are_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        plain = getattr(os, name)

        def noted(*args, name=name, plain=plain):
            done.append(name)
            return plain(*args)

        monkeypatch.setattr(os, name, noted)
    write_atomically(tmp_path / "x", "new")
    assert done == ["fsync", "replace", "fsync"]


def test_several_writers_of_one_file(tmp_path):
    path = tmp_path / "x"
    texts = [str(number) * 5000 for number in range(8)]
    threads = [threading.Thread(target=write_atomically, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert os.listdir(tmp_path) == ["x"]


def test_other_users_may_read_the_file(tmp_path):
    (tmp_path / "plain").write_text("x")
    write_atomically(tmp_path / "x", "x")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_is_removed_while_another_thread_writes_to_it(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    writing = threading.Event()

    def write():
        with contextlib.suppress(FileNotFoundError):  # until it is removed
            for number in range(100_000):
                (folder / str(number)).touch()
                writing.set()

    thread = threading.Thread(target=write)
    thread.start()
    writing.wait()
    remove_folder(folder)
    thread.join()
    assert not folder.exists()
    remove_folder(folder)


def test_a_full_disk_is_recognized():
    assert explain_failure(OSError(errno.ENOSPC, "No space left on device")).startswith("the disk is full (")
    assert explain_failure(ValueError("RESOURCE_EXHAUSTED: x\n y")) == "the disk is full (RESOURCE_EXHAUSTED: x y)"
    assert explain_failure(ValueError("a\nb")) == "ValueError: a b"
