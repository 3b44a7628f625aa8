"""The token cache: built once, never partial, rebuilt when damaged, in constant memory."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest

from meshwright.data import load_tokenizer, open_documents, prepare_tokens
from meshwright.errors import DataError


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a.txt": "one", "b.txt": "", "c.txt": "three"}.items():
        (folder / name).write_text(text)
    return folder


def prepare(texts, cache, told=None, tokenizer="bytes"):
    tell = None if told is None else told.append
    return prepare_tokens(open_documents(str(texts)), load_tokenizer(tokenizer), folder=cache, tell=tell)


def ids_of(tokens):
    return tokens.read(0, tokens.num_tokens)[0].tolist()


def made(cache):
    """The folders of tokens in a cache."""
    return [path for path in cache.iterdir() if path.is_dir()]


def test_tokens_of_documents(texts, tmp_path):
    told = []
    tokens = prepare(texts, tmp_path / "cache", told)
    assert ids_of(tokens) == [*b"one", 0, *b"three", 0]
    assert tokens.read(0, 10)[1].tolist() == [0] * 4 + [1] * 6
    assert (tokens.num_documents, tokens.num_tokens, tokens.largest, tokens.vocab_size) == (2, 10, ord("t"), 256)
    assert len(told) == 1
    assert "tokenized 2 documents: 10 tokens" in told[0]
    assert "skipped 1 empty documents" in told[0]


def test_a_cache_is_built_only_once(texts, tmp_path):
    cache = tmp_path / "cache"
    first, told = prepare(texts, cache), []
    second = prepare(texts, cache, told)
    assert (second.fingerprint, ids_of(second), told) == (first.fingerprint, ids_of(first), [])
    # Only the contents count, not the names.
    texts.rename(tmp_path / "moved")
    assert prepare(tmp_path / "moved", cache, told).fingerprint == first.fingerprint
    assert told == []


def test_changed_texts_are_noticed_at_once(texts, tmp_path):
    cache = tmp_path / "cache"
    prepare(texts, cache)
    stamp = (texts / "a.txt").stat()
    # Same size and same time: a write so soon after the last that the clock did not advance.
    (texts / "a.txt").write_text("two")
    os.utime(texts / "a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert ids_of(prepare(texts, cache))[:3] == list(b"two")


def test_unchanged_texts_are_not_read_again(texts, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    for path in texts.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))
    prepare(texts, cache)
    documents = open_documents(str(texts))
    monkeypatch.setattr(type(documents), "fingerprint", property(lambda self: pytest.fail("read again")))
    assert prepare_tokens(documents, load_tokenizer("bytes"), folder=cache).num_tokens == 10


@pytest.mark.parametrize("name", ["tokens.bin", "bounds.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_cache_is_reported_and_rebuilt(texts, tmp_path, name, damage):
    cache = tmp_path / "cache"
    expected = ids_of(prepare(texts, cache))
    (folder,) = made(cache)
    content = bytearray((folder / name).read_bytes())
    if damage == "remove":
        (folder / name).unlink()
    else:
        # Change a digit of a hash in meta.json.
        middle = content.index(b"sha256") + 12 if name == "meta.json" else len(content) // 2
        content[middle] ^= 1
        (folder / name).write_bytes(content if damage == "flip" else content[:middle])
    told = []
    assert ids_of(prepare(texts, cache, told)) == expected
    assert "is damaged" in told[0]
    assert "rebuilding it" in told[0]
    assert "tokenized 2 documents" in told[1]
    told.clear()
    prepare(texts, cache, told)
    assert told == []


def test_a_partial_cache_is_never_visible(texts, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.data.cache_folder.HashedFile.facts", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(texts, cache)
    assert made(cache) == []


def test_files_of_dead_processes_are_removed_and_those_of_live_ones_kept(texts, tmp_path):
    cache = tmp_path / "cache"
    prepare(texts, cache)
    (folder,) = made(cache)
    dead, alive = (cache / f"{folder.name}.making-{name}" for name in ("dead", "alive"))
    for path in (dead, alive):
        path.mkdir()
        (path / "tokens.bin").write_bytes(b"half")
    for path in (dead / "tokens.bin", dead):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    (folder / "meta.json").unlink()
    prepare(texts, cache)
    assert sorted(made(cache)) == sorted([folder, alive])


def test_processes_that_start_at_once(texts, tmp_path):
    (texts / "large.txt").write_bytes(b"line of text\n" * 400_000)
    cache = tmp_path / "cache"
    code = (
        "import sys; from meshwright.data import *; told = []; documents = open_documents(sys.argv[1]);"
        "t = prepare_tokens(documents, load_tokenizer('bytes'), folder=sys.argv[2], tell=told.append);"
        "print(t.num_tokens, t.fingerprint, sum('tokenized' in line for line in told))"
    )
    command = [sys.executable, "-c", code, str(texts), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    results = [process.communicate(timeout=120)[0].split() for process in processes]
    assert {tuple(result[:2]) for result in results} == {
        (str(10 + 13 * 400_000 + 1), prepare(texts, cache).fingerprint)
    }
    assert sum(int(result[2]) for result in results) == 1, "more than one process has tokenized"


def test_a_process_waits_for_another_that_is_tokenizing(texts, tmp_path):
    cache, other, told = tmp_path / "cache", tmp_path / "other", []
    prepare(texts, other)
    (theirs,) = made(other)
    cache.mkdir()
    results = []
    with (cache / f"{theirs.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: results.append(prepare(texts, cache, told)))
        thread.start()
        ends = time.monotonic() + 20
        while not told and time.monotonic() < ends:
            time.sleep(0.01)
        theirs.rename(cache / theirs.name)
    thread.join(20)
    assert told == ["another process is tokenizing the same data; waiting for it"]
    assert results[0].num_tokens == 10


def test_without_locks_the_first_process_to_finish_wins(texts, tmp_path, monkeypatch):
    # Without locks, the folder of another process appears during the write.
    from meshwright.data import token_cache

    cache, other = tmp_path / "cache", tmp_path / "other"
    prepare(texts, other)
    (theirs,) = made(other)
    inode = theirs.stat().st_ino
    write = token_cache.write_tokens

    def overtaken(*args, **kwargs):
        facts = write(*args, **kwargs)
        theirs.rename(cache / theirs.name)
        return facts

    monkeypatch.setattr(token_cache, "write_tokens", overtaken)
    assert ids_of(prepare(texts, cache)) == [*b"one", 0, *b"three", 0]
    (kept,) = made(cache)
    assert kept.stat().st_ino == inode


def test_memory_does_not_grow_with_the_data(tmp_path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        for _ in range(64):
            file.write(b"0123456789abcde\n" * 65536)
    documents = open_documents(str(path))
    tracemalloc.start()
    try:
        tokens = prepare_tokens(documents, load_tokenizer("bytes"), folder=tmp_path / "cache")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tokens.num_tokens == 64 * 2**20 + 1
    assert peak < 24 * 2**20
    assert tokens.read(2**26 - 2, 2**26 + 1)[0].tolist() == [*b"e\n", 0]


def test_large_caches_are_checked_by_size_only(texts, tmp_path, monkeypatch):
    # Hashing a terabyte at each start would be too slow.
    monkeypatch.setattr("meshwright.data.cache_folder.HASHED_BYTES", 3)
    cache, told = tmp_path / "cache", []
    prepare(texts, cache)
    (folder,) = made(cache)
    content = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(b"O" + content[1:])
    assert ids_of(prepare(texts, cache, told))[:3] == list(b"One")
    (folder / "tokens.bin").write_bytes(content[1:])
    assert ids_of(prepare(texts, cache, told))[:3] == list(b"one")
    assert "tokens.bin has 9 bytes instead of 10" in told[0]


def test_pieces_of_a_document_are_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.data.formats.part.BLOCK", 3)
    (tmp_path / "a.txt").write_text("abcdefgh")
    tokens = prepare(tmp_path / "a.txt", tmp_path / "cache")
    assert (ids_of(tokens), tokens.num_documents) == ([*b"abcdefgh", 0], 1)
    (tmp_path / "a.txt").write_bytes(b"abcd\0fgh")
    with pytest.raises(DataError, match=r"a.txt, after byte 3: byte 1 is 0"):
        prepare(tmp_path / "a.txt", tmp_path / "cache")


def test_ids_beyond_a_byte_and_groups_of_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.data.token_cache._GROUP_DOCUMENTS", 2)
    words = {f"w{number}": number for number in range(2, 400)} | {"<unk>": 0, "</s>": 1}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (tmp_path / "t.json").write_text(json.dumps(content))
    lines = [" ".join(f"w{n}" for n in range(start, start + 3)) for start in (2, 250, 300, 396, 50)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    tokens = prepare(tmp_path / "a.jsonl", tmp_path / "cache", tokenizer=str(tmp_path / "t.json"))
    assert tokens.values.dtype == np.uint16
    assert tokens.largest == 398
    assert ids_of(tokens) == [2, 3, 4, 1, 250, 251, 252, 1, 300, 301, 302, 1, 396, 397, 398, 1, 50, 51, 52, 1]


def test_errors_say_where(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "a\\u0000"}\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 2: byte 1 is 0"):
        prepare(tmp_path / "a.jsonl", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="the data is empty: 1 documents in 1 files have no text"):
        prepare(tmp_path / "a.jsonl", tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_an_error(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the token cache in '.*file/cache': Not a directory"):
        prepare(texts, tmp_path / "file" / "cache")


def test_the_whole_standard_library_is_tokenized(tmp_path):
    tokens = prepare_tokens(open_documents(), load_tokenizer("bytes"), folder=tmp_path)
    assert tokens.num_documents > 300
