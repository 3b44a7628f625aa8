"""Snapshots of the state in host memory: newer than the last checkpoint, for a restart on the hosts that are left.

Every rank writes its own shards below /dev/shm of its host, into a folder that its launcher named. The last complete
snapshot stays until the next one is complete on all ranks, so a rank can die at any instant.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint import arrays
from meshwright.checkpoint.manifest import plain_facts
from meshwright.checkpoint.restoring import Restored
from meshwright.checkpoint.snapshot.rank_file import (
    HostStep,
    Key,
    copy_to_host,
    courses_of,
    index_of,
    move_to_course,
    write_rank,
)
from meshwright.checkpoint.snapshot.replicas import fill_from_replicas
from meshwright.distributed.agreement import as_first, gather_texts
from meshwright.errors import ConfigError
from meshwright.files import explain_failure
from meshwright.launch.memory_folder import open_folder, steps_in
from meshwright.launch.messages import plural
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.types import PyTree

COPIES = 3
"""Copies of a rank's shards that memory must hold: the last snapshot, the next one, and what is being written."""

_GROUP = Path("/sys/fs/cgroup")


class Snapshots:
    """The snapshots of this process, in a folder in memory that outlives it.

    All processes make the same calls in the same order. A failed snapshot does not raise: `tell` gets a line.

    Args:
        folder: the folder on this host.
        every: steps between snapshots.
        tell: called with a line about a snapshot that failed.

    Example:
        >>> import tempfile, meshwright as mw
        >>> state = {"w": np.ones((8, 4), np.float32)}
        >>> layout = mw.make_layout([("w", mw.P("fsdp"))], state, mw.create_mesh("fsdp:8"))
        >>> snapshots = Snapshots(Path(tempfile.mkdtemp()))
        >>> snapshots.take(layout.shard(state), step=7, layout=layout, facts={"data": {}})
        >>> snapshots.wait()
        >>> restored, notes = snapshots.restore(layout, after=5)
        >>> restored.step, restored.notes
        (7, ['step 7 is a snapshot in host memory'])
        >>> snapshots.restore(layout, after=7)  # a checkpoint is as new
        (None, [])
    """

    def __init__(self, folder: Path, every: int = 1, *, tell: Callable[[str], Any] | None = None) -> None:
        self.folder, self.every = folder, every
        self._tell = tell
        self._thread: threading.Thread | None = None
        self._writing: int | None = None
        self._course = ""
        self._restored: int | None = None
        self._problem = ""
        self._has_failed = False

    # --- Taking ---

    def take(self, state: PyTree, *, step: int, layout: Layout, facts: Mapping[str, Any]) -> None:
        """Copies the state to host memory, and writes it in the background; returns once its buffers may be donated."""
        self._settle()
        self._course = self._course or _new_course()
        try:
            shards = copy_to_host(state, layout)
        except MemoryError as error:
            self._writing, self._problem = step, explain_failure(error)
            return
        self._writing, self._problem = step, ""
        work = (self.folder / str(step), shards, plain_facts(facts))
        self._thread = threading.Thread(target=self._write, args=work, name=f"snapshot {step}")
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last snapshot is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    close = wait

    def _write(self, place: Path, shards: Mapping[Key, np.ndarray], facts: Mapping[str, Any]) -> None:
        try:
            ranks = {"rank": jax.process_index(), "num_ranks": jax.process_count()}
            write_rank(place, shards, **ranks, course=self._course, facts=facts)
        except (OSError, MemoryError) as error:
            self._problem = explain_failure(error).replace("the disk is full", "the memory is full")

    def _settle(self) -> None:
        """Removes what is older than the last snapshot if all ranks have it, else that one."""
        self.wait()
        if self._writing is None:
            return
        step, texts = self._writing, gather_texts(self._problem)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        self._remove(lambda other: other < step if not problems else other == step)
        if problems and not self._has_failed and self._tell is not None:
            self._tell(
                f"no snapshot of step {step} ({problems[0]}). Training continues; a restart uses the newest snapshot "
                "or checkpoint before it."
            )
        self._has_failed, self._writing = bool(problems), None

    def _remove(self, wanted: Callable[[int], bool]) -> None:
        for step in steps_in(self.folder):
            if wanted(step):
                shutil.rmtree(self.folder / str(step), ignore_errors=True)  # another rank removes it too

    # --- Restoring ---

    def restore(self, layout: Layout, *, after: int) -> tuple[Restored | None, list[str]]:
        """Returns the newest complete state after step `after`, and notes on newer snapshots that cannot be used."""
        self.wait()
        steps = [step for step in steps_in(self.folder) if step > after][:8]
        own = [f"{step} {course}" for step in steps for course in courses_of(self.folder / str(step)) or [""]]
        found = {line for text in gather_texts("\n".join(own)) for line in text.split("\n") if line}
        pairs = [(int(step), course) for step, _, course in (line.partition(" ") for line in found)]
        last = max((course for _, course in pairs), default="")
        notes: list[str] = []
        for step, course in sorted(pairs, reverse=True):
            if course not in (last, ""):  # of a host that was away while the run took another course
                continue
            restored, why = self._restore(step, course, layout)
            if restored is not None:
                self._restored = step
                return restored, notes
            notes.append(f"skipped the snapshot of step {step} in host memory: {why}")
        return None, notes

    def _restore(self, step: int, course: str, layout: Layout) -> tuple[Restored | None, str]:
        here = HostStep(self.folder / str(step), course)
        structs = dict(zip([leaf.name for leaf in layout.leaves], arrays.abstract_leaves(layout), strict=True))
        wanted = {
            name: {device: (name, index_of(index, struct.shape)) for device, index in _places(struct).items()}
            for name, struct in structs.items()
        }
        held: dict[Key, np.ndarray] = {}
        for name, places in wanted.items():
            for key in places.values():
                if key not in held and (found := here.read(key, np.dtype(structs[name].dtype))) is not None:
                    held[key] = found
        missing = sum(key not in held for places in wanted.values() for key in places.values())
        texts = gather_texts(
            f"{missing} {-1 if here.first_rank is None else here.first_rank} {'; '.join(here.notes[:3])}"
        )
        counts, first, said = zip(*(text.split(" ", 2) for text in texts), strict=True)
        reasons = list(dict.fromkeys(text for text in said if text))
        if any(int(count) for count in counts):
            lost = fill_from_replicas(structs, layout, held)
            if lost:
                return None, "; ".join([f"the hosts that are left do not hold all of `{lost}`", *reasons])
        known = {int(rank): process for process, rank in reversed(list(enumerate(first))) if int(rank) >= 0}
        facts = _broadcast(here.facts, known[min(known)])
        leaves = []
        for name, struct in structs.items():
            parts = [jax.device_put(held[key], device) for device, key in wanted[name].items()]
            leaves.append(jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, parts))
        state = arrays.from_stored(arrays.nest(list(structs), leaves), layout)
        return Restored(state, step, facts, [f"step {step} is a snapshot in host memory", *reasons]), ""

    def begin(self) -> None:
        """Begins a course of the run: removes all snapshots but the restored one, which is its first."""
        self.wait()
        self._writing, self._course = None, _new_course()
        self._remove(lambda other: other != self._restored)
        if self._restored is not None:
            move_to_course(self.folder / str(self._restored), self._course)
        gather_texts("")  # nobody takes another one before all have removed theirs

    def forget(self) -> None:
        """Removes all snapshots, because the run is saved or goes back to a checkpoint."""
        self._restored = None
        self.begin()

    # --- Memory ---

    def require_memory(self, layout: Layout) -> str:
        """Returns the memory that snapshots take on each host, as text; raises on all processes if one lacks it."""
        structs = arrays.abstract_leaves(layout)
        own = sum(
            int(np.prod(struct.sharding.shard_shape(struct.shape), dtype=np.int64)) * struct.dtype.itemsize
            * len({index_of(index, struct.shape) for index in _places(struct).values()})
            for struct in structs
        )  # fmt: skip
        host, taken = socket.gethostname(), _size(self.folder)
        file_system = os.statvfs(self.folder)
        room, memory = file_system.f_bavail * file_system.f_frsize + taken, _available() + taken
        told = [text.rsplit(" ", 3) for text in gather_texts(f"{host} {own} {room} {memory}")]
        for name in dict.fromkeys(host for host, *_ in told):
            ranks = [list(map(int, numbers)) for host, *numbers in told if host == name]
            needed = sum(rank[0] for rank in ranks)
            free, where = min((min(rank[1] for rank in ranks) * COPIES // (COPIES - 1), "in /dev/shm"),
                              (min(rank[2] for rank in ranks), "of memory"))  # fmt: skip
            if COPIES * needed > free:
                raise ConfigError(
                    f"snapshots take {format_bytes(COPIES * needed)} on {name} ({COPIES} copies of the state of "
                    f"{plural(len(ranks), 'rank')}), but only {format_bytes(free)} {where} can be used.",
                    hint="leave out --snapshot-every, or use more hosts; checkpoints work without it.",
                )
        return f"{format_bytes(own)} for each rank, {COPIES} copies at most"


def open_snapshots(folder: str, every: str, *, tell: Callable[[str], Any] | None = None) -> Snapshots:
    """Returns the snapshots of a rank in the folder that its launcher named."""
    if not every.isdigit() or int(every) < 1:
        raise ConfigError(f"{every!r} is not a number of steps between snapshots.", hint="pass 1 or more.")
    return Snapshots(open_folder(folder), int(every), tell=tell)


def _new_course() -> str:
    """Returns the name of a course of the run, the same on all processes; later ones are greater.

    A rollback or a restart begins one. A host that was away may hold snapshots of an earlier course, whose shards do
    not fit to those of others.
    """
    return as_first(f"{time.time_ns():020d}-{secrets.token_hex(4)}")


def _places(struct: Any) -> dict[Any, Any]:
    """Returns the index of each device of this process."""
    found: dict[Any, Any] = struct.sharding.addressable_devices_indices_map(struct.shape)
    return found


def _broadcast(facts: Mapping[str, Any], source: int) -> Mapping[str, Any]:
    """Returns the facts of one process."""
    if jax.process_count() == 1:
        return facts
    import json

    from jax.experimental import multihost_utils

    data = json.dumps(facts).encode()
    length = int(gather_texts(str(len(data)))[source])
    row = np.zeros(length, np.uint8)
    is_source = jax.process_index() == source
    if is_source:
        row[:] = np.frombuffer(data, np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(row, is_source=is_source)).astype(np.uint8))
    found: Mapping[str, Any] = json.loads(text)
    return found


def _size(folder: Path) -> int:
    """Returns the bytes that the snapshots take now."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _available() -> int:
    """Returns the bytes of memory that this host, or this process's control group, can still give out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or another kind of control group
        most, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, most - used)
    return max(0, free)
