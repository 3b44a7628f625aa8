"""Data at URLs: fetched once, verified, and read like local files."""

import json

import numpy as np
import pytest

from meshwright.data import fetch_data
from meshwright.data.documents import find_files, open_documents
from meshwright.errors import ConfigError, DataError, StoreError
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.text_source import fetched, make_text_source

LINES = [{"text": f"document {number} " * 8} for number in range(30)]


@pytest.fixture
def texts(store):
    """Files of several formats in a store."""
    store.put("web/a.jsonl", "".join(json.dumps(line) + "\n" for line in LINES).encode())
    store.put("web/deep/b.txt", b"plain text " * 40)
    store.put("web/.hidden", b"no")
    store.put("packed/tokens.bin", np.arange(600, dtype=np.uint16).tobytes())
    sidecar = {"dtype": "uint16", "num_tokens": 600}
    store.put("packed/tokens.bin.json", json.dumps(sidecar).encode())
    return store


def test_files_folders_and_globs(texts, tmp_path):
    url, told = texts.url, []

    def files(path):
        found = fetch_data(f"{url}/{path}", tmp_path / "fetched", tell=told.append)
        return [found.shown(file).removeprefix(f"{url}/") for file in find_files(found.path)]

    assert files("web") == ["web/a.jsonl", "web/deep/b.txt"]
    assert files("web/") == files("web")
    assert files("web/a.jsonl") == ["web/a.jsonl"]
    assert files("web/*.jsonl") == ["web/a.jsonl"]
    assert files("web/**/*.txt") == ["web/deep/b.txt"]
    assert files("packed/tokens.bin") == ["packed/tokens.bin"]
    count = len(told)
    assert files("web") == ["web/a.jsonl", "web/deep/b.txt"]
    assert len(told) == count  # from the cache
    assert len(open_documents(fetch_data(f"{url}/web/a.jsonl", tmp_path / "fetched").path)) == 30
    with pytest.raises(DataError, match=r"nothing.* names no object"):
        files("nothing")
    assert fetch_data("a/path", tmp_path).path == "a/path"


def test_the_sidecar_of_packed_tokens_comes_along(texts, tmp_path):
    for path in ("packed/tokens.bin", "packed/*.bin", "packed"):
        (file,) = find_files(fetch_data(f"{texts.url}/{path}", tmp_path / "fetched").path)
        assert file.with_name("tokens.bin.json").is_file()


def test_changed_objects_and_damaged_copies_are_fetched_again(texts, tmp_path):
    def read():
        found = fetch_data(f"{texts.url}/web/deep/b.txt", tmp_path / "fetched", tell=told.append)
        (file,) = find_files(found.path)
        return file, file.read_bytes()

    told = []
    file, data = read()
    file.write_bytes(b"X" + data[1:])
    assert read() == (file, data)
    assert any("is damaged" in line for line in told)
    texts.put("web/deep/b.txt", b"other text")
    other, data = read()
    assert data == b"other text"
    assert other != file


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_a_run_reads_the_same_rows_from_a_url(texts, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(texts.read("web/a.jsonl"))

    def rows(data):
        config = TrainConfig().changed({"data": data, "data_cache": str(tmp_path / "cache"), "num_tokens": 16})
        return make_text_source(config.data, tell=lambda text: None, batch_size=4)

    local, remote = rows(str(tmp_path / "a.jsonl")), rows(f"{texts.url}/web/*.jsonl")
    assert local.fingerprint == remote.fingerprint
    mixed = rows((f"web={texts.url}/web/a.jsonl", f"text={texts.url}/web/deep"))
    assert mixed.sources.keys() == {"web", "text"}


def test_data_that_cannot_be_fetched_is_refused(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="the scheme s4:// is unknown"):
        TrainConfig().changed({"data": "s4://bucket/x"})
    with pytest.raises(ConfigError, match="data is empty"):
        TrainConfig().changed({"data": " "})
    from meshwright.remote import open_store

    open_store("memory://bucket/large").put("x.txt", b"text")
    monkeypatch.setattr("shutil.disk_usage", lambda path: __import__("types").SimpleNamespace(free=1))
    with pytest.raises(DataError, match=r"its 1 files take 4 bytes, but only 1 are free"):
        fetched("memory://bucket/large/x.txt", TrainConfig().data, lambda text: None)
