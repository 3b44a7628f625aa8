"""Objects, refused stores, and one writer at a time."""

import json
import threading
import time

import pytest

from meshwright.errors import StoreError
from meshwright.remote import lease as leases
from meshwright.remote import open_store, take_lease
from meshwright.remote.object_store import ObjectStore
from meshwright.remote.transfer import download_files, hash_objects, upload_files


def test_objects_come_back_as_they_were_written(store, tmp_path):
    assert store.list() == {}
    assert store.read("a/x") is None
    store.put("a/x", b"one")
    store.put("a/x", b"two")
    (tmp_path / "empty").touch()
    store.upload(tmp_path / "empty", "a/b/empty")
    assert store.list() == {"a/b/empty": 0, "a/x": 3}
    assert store.below("a").list("b") == {"b/empty": 0}
    assert store.read("a/x") == b"two"
    assert store.put_new("a/x", b"three") is False
    assert store.put_new("a/y", b"four") is True
    assert (store.read("a/x"), store.read("a/y")) == (b"two", b"four")
    assert list(store.infos_of("a/*")) == ["a/x", "a/y"]
    store.remove(["a/x", "a/missing"])
    assert list(store.list()) == ["a/b/empty", "a/y"]


def test_files_are_transferred_in_blocks_with_their_hashes(store, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.remote.object_store.BLOCK_BYTES", 7)
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    contents = {f"{size}": bytes(range(size)) for size in (0, 1, 7, 8, 100)}
    for name, data in contents.items():
        (source / name).write_bytes(data)
    upload_files(store, source, contents)
    arrived = download_files(store, store.list(), target)
    assert {name: (target / name).read_bytes() for name in contents} == contents
    assert arrived == hash_objects(store, store.list())
    assert {name: item.num_bytes for name, item in arrived.items()} == {name: int(name) for name in contents}


@pytest.mark.parametrize(
    ("url", "writes", "match"),
    [
        ("s4://bucket/x", True, "a run cannot be in a store of the scheme s4://.\nhint: did you mean 's3'"),
        ("ftp://host/x", True, "a run cannot be in a store of the scheme ftp"),
        ("nowhere://bucket/x", False, "the scheme nowhere:// is unknown"),
        ("https://host/x", False, "web servers do not list files"),
        ("memory://", True, "names no bucket"),
    ],
)
def test_unknown_schemes_are_refused(url, writes, match):
    with pytest.raises(StoreError, match=match):
        open_store(url, writes=writes)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(StoreError, match=r"for gs:// is not installed.\nhint: pip install 'meshwright\[gcs"):
        open_store("gs://bucket/x")


def test_stores_that_cannot_be_used_are_refused_with_a_hint(s3, monkeypatch):
    with pytest.raises(StoreError, match=r"nobucket/x.*does not exist\nhint: create the bucket"):
        open_store("s3://nobucket/x")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match=r"Could not connect.*\nhint: check AWS_ENDPOINT_URL and the network"):
        open_store("s3://bucket/x")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(StoreError, match=r"NoCredentialsError.*\nhint: set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/x")


# --- One writer ---


def test_a_lease_has_one_holder_and_its_numbers_grow(store):
    first = take_lease(store)
    assert (first.number, first.before) == (1, 0)
    first.keep(seconds=0.02)
    with pytest.raises(StoreError, match=r"another process is training in .*: process \d+ on"):
        take_lease(store, seconds=5)
    first.check()
    first.release()
    second = take_lease(store, seconds=0)
    assert (second.number, second.before) == (2, 1)
    with pytest.raises(StoreError, match="was taken over by process"):
        first.check()


def test_of_many_processes_one_gets_the_lease(store):
    held, refused = [], []

    def take():
        try:
            held.append(take_lease(open_store(store.url, writes=True), seconds=0.3).number)
        except StoreError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Nobody renews here, so those that came late may have seen a dead holder and followed it, each with its own number.
    assert len(held) == len(set(held))
    assert held
    assert len(held) + len(refused) == 8
    assert all("another process is training" in text for text in refused)


def test_a_process_that_looked_too_early_is_refused(store, monkeypatch):
    winner = take_lease(store)
    real, looks = leases._newest, []

    def early(store):
        looks.append(None)
        return (0, {}) if len(looks) == 1 else real(store)

    with monkeypatch.context() as patch:
        patch.setattr(leases, "_newest", early)
        with pytest.raises(StoreError, match="another process is training"):
            take_lease(store)
    winner.check()


def test_a_dead_holder_is_followed_after_its_lease_and_notices(store):
    dead = take_lease(store)
    began, told = time.monotonic(), []
    live = take_lease(store, seconds=0.3, tell=told.append)
    assert live.number == 2
    assert time.monotonic() - began >= 0.3
    assert "watching for up to 0 s" in told[0]
    dead.keep(seconds=0.01)  # it wakes up
    deadline = time.monotonic() + 10
    while dead.lost is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "process" in dead.lost
    dead.release()
    live.check()
    assert json.loads(store.read(".writers/000001")).get("released") is None


def test_a_holder_in_the_same_locked_place_is_dead(store):
    place = {"host": "a", "lock": ["/x", 1, 2]}
    take_lease(store, place=place)
    assert take_lease(store, place=place, seconds=60).number == 2


def test_a_server_that_ignores_conditions_is_refused(store, monkeypatch):
    def put_anyway(self, name, data):
        self.put(name, data)
        return True

    monkeypatch.setattr(ObjectStore, "put_new", put_anyway)
    with pytest.raises(StoreError, match="ignores the condition of a conditional write"):
        take_lease(store)


def test_a_repeated_request_finds_its_own_object(store, monkeypatch):
    real, calls = ObjectStore.put_new, []

    def lost_answer(self, name, data):
        done = real(self, name, data)
        calls.append(done)
        return False if len(calls) == 1 else done

    monkeypatch.setattr(ObjectStore, "put_new", lost_answer)
    assert take_lease(store).number == 1
    assert calls == [True, False]


def test_a_damaged_record_counts_as_a_holder(store):
    store.put(f"{leases.FOLDER}/000004", b"\xff{")
    threading.Timer(0.1, store.put, (f"{leases.FOLDER}/000005", b"[]")).start()
    with pytest.raises(StoreError, match="an unknown process"):
        take_lease(store, seconds=5)
