"""How the processes of a run finish a checkpoint together: in a folder that all of them share, or each in its own.

In a shared folder, each process hashes a share of the files, and notes in small files tell process 0 about it. Without
one, each process holds the files that it wrote and a copy of the manifest; the notes are messages.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax

from meshwright.bounded_reader import read_json
from meshwright.checkpoint import arrays
from meshwright.checkpoint.file_hashes import FileHash, hash_files, list_files
from meshwright.checkpoint.manifest import MANIFEST, STATE, Manifest, write_manifest
from meshwright.checkpoint.retention import SAVING
from meshwright.distributed.agreement import from_first, is_first
from meshwright.distributed.mailbox import Mailbox
from meshwright.errors import CheckpointError
from meshwright.files import sync_folder, write_atomically
from meshwright.layout import Layout

PEER_SECONDS = 600.0
"""Seconds that a process waits for another one."""

Hashes = dict[str, FileHash]
MakeManifest = Callable[[Hashes], Manifest]


class Meeting(Protocol):
    """What a process needs of the others to save one step and to upload it.

    Attributes:
        shared: whether all processes see the same folder.
    """

    shared: bool

    def num_bytes(self, layout: Layout) -> int:
        """Returns the bytes that this process needs room for."""

    def open(self, place: Path) -> None:
        """Creates the folder of a step, if Orbax is not to do it."""

    def start_writing(self, folder: Path, tree: arrays.Nested) -> Any:
        """Starts writing the arrays, as `arrays.start_writing` does."""

    def finish_writing(self, place: Path, response: Any) -> None:
        """Waits until the arrays are written."""

    def finish(self, place: Path, make_manifest: MakeManifest) -> str:
        """Hashes the files of a step and writes its manifest last; returns what is unusual, or an empty string."""

    def give_up(self, place: Path, why: str) -> None:
        """Tells the others that this process could not do its part."""

    def share(self, place: Path, names: list[str], begin: Callable[[], None]) -> list[str]:
        """Returns the files that this process uploads, after process 0 called `begin`."""

    def report(self, place: Path, problem: str) -> None:
        """Tells the others that this process uploaded its share, or could not."""

    def hear(self, place: Path) -> None:
        """On process 0, waits until all others uploaded their shares; raises if one could not."""


class SharedFolder:
    """Processes that see the same folder; also a process alone."""

    shared = True

    def num_bytes(self, layout: Layout) -> int:
        return layout.bytes_total

    def open(self, place: Path) -> None:
        # Otherwise Orbax creates the folder in the background, which a busy disk can delay by seconds.
        if jax.process_count() > 1:
            place.mkdir(parents=True)
            (place / SAVING).touch()

    def start_writing(self, folder: Path, tree: arrays.Nested) -> Any:
        return arrays.start_writing(folder, tree)

    def finish_writing(self, place: Path, response: Any) -> None:
        arrays.finish_writing(response, is_alive=(place / SAVING).exists if jax.process_count() > 1 else None)

    def finish(self, place: Path, make_manifest: MakeManifest) -> str:
        files = self._hash_together(place)
        if is_first():
            write_manifest(place, make_manifest(files))
        return ""

    def give_up(self, place: Path, why: str) -> None:
        (place / SAVING).unlink(missing_ok=True)

    def _hash_together(self, place: Path) -> Hashes:
        """Returns the hashes of a step's files; each process hashes a share, and process 0 gets all of them."""
        rank, count = jax.process_index(), jax.process_count()
        names = [f"{STATE}/{name}" for name in list_files(place / STATE)]
        hashes = hash_files(place, names[rank::count], sync=True)
        if rank != 0:
            write_atomically(_note(place, rank), json.dumps(hashes))
            return hashes
        for peer in range(1, count):
            hashes |= _hashes_of(place, peer)
        # Hash files that no process took, because its view of the folder was out of date.
        hashes |= hash_files(place, [name for name in names if name not in hashes], sync=True)
        if count > 1:
            for peer in range(1, count):
                _note(place, peer).unlink()
            (place / SAVING).unlink()
        _sync_folders(place)
        return {name: hashes[name] for name in names}

    def share(self, place: Path, names: list[str], begin: Callable[[], None]) -> list[str]:
        if is_first():
            begin()
        return names[jax.process_index() :: jax.process_count()]

    def report(self, place: Path, problem: str) -> None:
        if not is_first():
            write_atomically(_uploaded(place, jax.process_index()), problem)

    def hear(self, place: Path) -> None:
        deadline = time.monotonic() + PEER_SECONDS
        for peer in range(1, jax.process_count()):
            note = _uploaded(place, peer)
            while not note.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"process {peer} of this run did not upload its share")
                time.sleep(0.05)
            problem = note.read_text()
            note.unlink()
            if problem:
                raise CheckpointError(f"process {peer} of this run could not upload its share: {problem}")


def _hashes_of(place: Path, peer: int) -> Hashes:
    note, deadline = _note(place, peer), time.monotonic() + PEER_SECONDS
    while not note.exists():
        if not (place / SAVING).exists():
            raise CheckpointError(f"process {peer} of this run could not write its share")
        if time.monotonic() > deadline:
            raise CheckpointError(f"process {peer} of this run sent no hashes within {PEER_SECONDS:.0f} s")
        time.sleep(0.05)
    return _as_hashes(read_json(note))


def _as_hashes(items: Mapping[str, Any]) -> Hashes:
    return {str(name): FileHash(int(item[0]), str(item[1])) for name, item in items.items()}


def _note(place: Path, rank: int) -> Path:
    return place / f".hashes-{rank}.json"


def _uploaded(place: Path, rank: int) -> Path:
    return place.with_name(f".uploaded-{place.name}-{rank}")


def _sync_folders(place: Path) -> None:
    for folder, _, _ in os.walk(place):
        sync_folder(Path(folder))


class OwnFolders:
    """Processes with a folder each. A process holds the shards of its own devices, one file per shard.

    A file that several processes hold, such as a shard of replicated parameters, counts once.

    Args:
        name: name of this meeting, the same on all processes and never used before.
    """

    shared = False

    def __init__(self, name: str) -> None:
        self._box, self._rank, self._count = Mailbox(name), jax.process_index(), jax.process_count()

    def num_bytes(self, layout: Layout) -> int:
        return layout.bytes_per_device * jax.local_device_count()

    def open(self, place: Path) -> None:
        place.mkdir(parents=True)

    def start_writing(self, folder: Path, tree: arrays.Nested) -> Any:
        return arrays.start_writing_alone(folder, tree)

    def finish_writing(self, place: Path, response: Any) -> None:
        arrays.finish_writing(response)

    def finish(self, place: Path, make_manifest: MakeManifest) -> str:
        own = hash_files(place, [f"{STATE}/{name}" for name in list_files(place / STATE)], sync=True)
        _sync_folders(place)
        if self._rank:
            self._tell("save/hashes", own)
            self._take(place, own, self._hear("save/manifest", 0))
            self._tell("save/finished", True)
            # Until then, this process keeps the step before: process 0 may still fail or end.
            self._hear("committed", 0)
            return ""
        hashes, differ = dict(own), set()
        for peer in range(1, self._count):
            found = _as_hashes(self._hear("save/hashes", peer))
            differ |= {name for name, item in found.items() if hashes.setdefault(name, item) != item}
        top = {name: (place / name).read_text() for name in own if (place / name).parent == place / STATE}
        hashes = {name: hashes[name] for name in sorted(hashes)}
        manifest = make_manifest(hashes)
        self._tell("save/manifest", {"manifest": manifest.to_json(), "files": top, "hashes": hashes})
        for peer in range(1, self._count):
            self._hear("save/finished", peer)
        write_manifest(place, manifest)  # last, since the other processes use what is finished here
        self._tell("committed", True)
        self._box.remove("save")
        differ -= top.keys()
        return f"replicas differ in {len(differ)} files, such as {min(differ)}; the first ones count" if differ else ""

    def _take(self, place: Path, own: Hashes, found: Mapping[str, Any]) -> None:
        """Finishes the step in the folder of this process, as process 0 did."""
        for name, text in found["files"].items():  # they hold times, which differ
            write_atomically(place / name, text)
        wanted = _as_hashes(found["hashes"])
        for name, item in own.items():
            if name not in found["files"] and item != wanted[name]:
                (place / name).unlink()
        write_atomically(place / MANIFEST, found["manifest"])

    def give_up(self, place: Path, why: str) -> None:
        self._tell("gave-up", why)

    def share(self, place: Path, names: list[str], begin: Callable[[], None]) -> list[str]:
        if self._rank:
            self._tell("upload/held", names)
            return list(self._hear("upload/shares", 0)[self._rank])
        held = [names, *(self._hear("upload/held", peer) for peer in range(1, self._count))]
        begin()  # removes the objects of an earlier upload, so nobody may have begun
        holders: dict[str, list[int]] = {}
        for rank, found in enumerate(held):
            for name in found:
                holders.setdefault(name, []).append(rank)
        shares: list[list[str]] = [[] for _ in held]
        for number, name in enumerate(sorted(holders)):
            ranks = holders[name]
            shares[ranks[number % len(ranks)]].append(name)
        self._tell("upload/shares", shares)
        return shares[0]

    def report(self, place: Path, problem: str) -> None:
        if problem:
            self.give_up(place, problem)
        elif self._rank:
            self._tell("upload/done", True)

    def hear(self, place: Path) -> None:
        for peer in range(1, self._count):
            self._hear("upload/done", peer)
        self._box.remove("upload")

    def _tell(self, what: str, content: Any) -> None:
        self._box.put(f"{what}-{self._rank}", json.dumps(content).encode())

    def _hear(self, what: str, rank: int) -> Any:
        def check() -> None:
            why = self._box.get(f"gave-up-{rank}")
            if why is not None:
                raise CheckpointError(f"process {rank} of this run could not do its share: {json.loads(why)}")

        try:
            return json.loads(self._box.wait(f"{what}-{rank}", seconds=PEER_SECONDS, check=check))
        except TimeoutError:
            raise CheckpointError(f"process {rank} of this run did not answer within {PEER_SECONDS:.0f} s") from None


class Meetings:
    """Makes the meetings of a folder of checkpoints, one for each save or upload.

    Args:
        shared: whether all processes see the folder.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared or jax.process_count() == 1
        self._series: int | None = None
        self._number = itertools.count()

    def next(self) -> Meeting:
        """Returns the next meeting; every process calls it in the same order, on the main thread."""
        if self.shared:
            return SharedFolder()
        if self._series is None:
            self._series = from_first(next(_series))
        return OwnFolders(f"checkpoints-{self._series}-{next(self._number)}")


_series = itertools.count()
