"""A run in an object store: a local run folder, whose finished steps and small files are mirrored to a URL.

Only process 0 holds the lease and uploads logs. The local folder remembers the number of the session that last wrote
it: if the store has seen another session since, the folder is out of date and is made anew from the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import jax

from meshwright.checkpoint import Checkpoints, DurableSteps, Keep, TieredCheckpoints
from meshwright.data.cache_folder import default_cache
from meshwright.distributed.agreement import as_first, from_first, gather_texts, together
from meshwright.errors import CheckpointError, ConfigError, StoreError, TrainingError
from meshwright.files import try_lock, write_atomically
from meshwright.loop.callbacks import Callback
from meshwright.loop.fit import Loop
from meshwright.loop.folder.run_dir import CONFIG, FACTS
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.store_options import StoreOptions
from meshwright.remote import Lease, ObjectStore, is_url, open_store, take_lease
from meshwright.remote.transfer import download_files

CHECKPOINTS, SESSION = "checkpoints", ".session.json"
_NOT_READ = ("tensorboard/", "profile/", "wandb/")  # large, and no command reads them
Tell = Callable[[str], None]


def open_remote(config: TrainConfig, tell: Tell, stack: ExitStack) -> tuple[TrainConfig, RemoteRun | None]:
    """Returns the options with a local run folder, and the run's store if `--run` is a URL.

    Takes the lease on the store and makes the local folder current, before anything is computed. `stack` uploads the
    last files and ends the lease.
    """
    url, options = config.run.run, config.store
    if not is_url(url):
        if options != StoreOptions():
            raise ConfigError(
                "--upload-every, --keep-local, --upload-seconds and --local-run have no effect without a store.",
                hint="use --run s3://BUCKET/NAME, or leave them out.",
            )
        return config, None
    assert url is not None
    every, saves = options.upload_every, config.run.checkpoint_every
    if every is not None and (not saves or every % saves):
        raise ConfigError(
            f"--upload-every {every} is not a multiple of --checkpoint-every {saves}.",
            hint=f"use e.g. --upload-every {10 * (saves or 100)}, or change --checkpoint-every.",
        )
    run = RemoteRun(together("reaching the store of the run", lambda: _open(url, config)), tell)
    stack.callback(run.close)
    folder = Path(options.local_run) if options.local_run is not None else _cached(url, "runs")

    def prepare() -> None:
        if jax.process_index() == 0:
            try:
                run.begin(folder.absolute())
            except OSError as error:
                raise ConfigError(
                    f"cannot write the local folder {folder} of the run: {error.strerror or error}.",
                    hint="choose another one with --local-run.",
                ) from error

    together("opening the local folder of the run", prepare)
    own, run.folder = folder.absolute(), Path(as_first(str(folder.absolute())))
    if jax.process_count() > 1:
        written = as_first((run.folder / SESSION).read_text() if jax.process_index() == 0 else "")
        run.shared = all(text == "yes" for text in gather_texts("yes" if _sees(run.folder, written) else "no"))
    tell(f"the run is in {run.url}; its local folder is {run.folder}")
    if not run.shared:
        tell("not all processes see this folder, so each keeps its part of the run in one of its own")
        together("uploading the logs for the other processes", run.sync_as_first)
        numbers = as_first(f"{run.lease.before} {run.lease.number}" if run.lease is not None else "").split()
        if jax.process_index():
            own = own.with_name(f"{own.name}-rank-{jax.process_index()}")
        together("opening the folder of each process", lambda: run.follow(own, *map(int, numbers)))
    run.start(options.upload_seconds)
    return config.changed({"run": str(run.folder)}), run


def _sees(folder: Path, written: str) -> bool:
    """Returns whether this process sees what process 0 wrote into a folder."""
    for _ in range(15):  # a network file system may show a file late
        with contextlib.suppress(OSError):
            if (folder / SESSION).read_text() == written:
                return True
        time.sleep(0.2)
    return False


def _open(url: str, config: TrainConfig) -> ObjectStore:
    """Opens the store of a run; refuses a command that does not fit before it ends the session of another machine."""
    store = open_store(url, writes=True)
    has_run = store.read(CONFIG) is not None
    if has_run and not config.run.resume:
        raise ConfigError(f"{url} already holds a run.", hint="resume it with --resume, or use another --run.")
    if config.run.resume and not has_run and not config.run.or_start:
        raise ConfigError(f"{url} holds no run to resume.", hint="name the folder that holds config.yaml.")
    return store


class RemoteRun:
    """The store of a run and its local folder.

    Attributes:
        folder: the local run folder.
        lease: the lease on the store, on process 0.
        shared: whether all processes of the run see the folder; if not, each has its own.
    """

    folder: Path
    lease: Lease | None = None
    shared: bool = True

    def __init__(self, store: ObjectStore, tell: Tell) -> None:
        self.store, self.url, self._tell = store, store.url, tell
        self._lock: IO[str] | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._syncing = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    def begin(self, folder: Path) -> None:
        """Takes the lease and makes the local folder current."""
        self.folder = folder
        place = self._lock_folder()
        known = _session(folder, self.url)
        self.lease = take_lease(self.store, place=place, tell=self._tell)
        self.lease.keep()
        # Without a configuration in the store, the last session ended before its run began.
        if known == 0 or known != self.lease.before or self.store.read(CONFIG) is None:
            self._empty()
            fetch_files(self.store, folder)
        self._write_session(self.lease.number)

    def sync_as_first(self) -> None:
        """On process 0, uploads its files, so that the others can fetch them."""
        if self.lease is not None and self.store.read(CONFIG) is not None:
            self.sync()

    def follow(self, folder: Path, before: int, number: int) -> None:
        """Makes the own folder of a process other than 0 current, for the session `number` after `before`."""
        if jax.process_index() == 0:
            return
        self.folder = folder
        self._lock_folder()
        if _session(folder, self.url) == before != 0 and self.store.read(CONFIG) is not None:
            self._sync([name for name in run_files(folder) if _is_of_rank(name, jax.process_index())])
            self._write_session(0)
        else:
            self._empty()
        fetch_files(self.store, folder, but=_NOT_READ)
        for name in run_files(folder):  # only what this process changes is its own
            stat = (folder / name).stat()
            self._uploaded[name] = (stat.st_size, stat.st_mtime_ns)
        self._write_session(number)

    def _empty(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():  # the folder itself may be a mount or a link
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self._write_session(0)

    def start(self, seconds: float) -> None:
        """Starts to upload changed files every few seconds."""
        if self._uploads:
            self._thread = threading.Thread(target=self._repeat, args=(seconds,), name="meshwright-sync", daemon=True)
            self._thread.start()

    def checkpoints(self, keep: Keep, options: StoreOptions, tell: Any) -> Checkpoints:
        """Returns the checkpoints of the run, in the local folder and in the store."""
        durable = DurableSteps(
            self.store.below(CHECKPOINTS), keep=keep, every=options.upload_every, before_commit=self._before_commit
        )
        places: dict[str, Any] = {"durable": durable, "keep_local": options.keep_local, "shared": self.shared}
        return TieredCheckpoints(self.folder / CHECKPOINTS, **places, keep=keep, tell=tell)

    @property
    def _uploads(self) -> bool:
        """Whether this process uploads files: process 0, and others with folders of their own."""
        return self.lease is not None or not self.shared

    def _before_commit(self) -> None:
        """Uploads the logs up to a step before the step is finished, since a resumed run does not recompute them."""
        if self.lease is not None:
            self.lease.check()
            self.sync()
            self.lease.check()
        elif not self.shared:
            self.sync()

    def sync(self) -> None:
        """Uploads the files that changed since the last time, except checkpoints."""
        self._sync(run_files(self.folder))

    def _sync(self, names: list[str]) -> None:
        with self._syncing:
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    stat = (self.folder / name).stat()
                    if self._uploaded.get(name) != (stat.st_size, stat.st_mtime_ns):
                        self.store.upload(self.folder / name, name)
                        self._uploaded[name] = (stat.st_size, stat.st_mtime_ns)

    def close(self) -> None:
        """Uploads the last files and ends the lease."""
        self._over.set()
        if self._thread is not None:  # otherwise the local folder may be incomplete
            self._thread.join()
            self._try()
        if self.lease is not None:
            with contextlib.suppress(StoreError):  # it ends by itself
                self.lease.release()
        if self._lock is not None:
            self._lock.close()

    def _repeat(self, seconds: float) -> None:
        while not self._over.wait(seconds):
            self._try()

    def _try(self) -> None:
        if self.lease is not None and self.lease.lost is not None:
            return
        try:
            self.sync()
        except (StoreError, OSError) as error:
            if not self._failing:
                self._tell(f"cannot upload the logs: {str(error).partition(chr(10))[0]}. They are in {self.folder}.")
            self._failing = True
        else:
            if self._failing:
                self._tell("uploading the logs works again.")
            self._failing = False

    def _lock_folder(self) -> dict[str, Any] | None:
        """Locks the local folder, and returns what tells the lease that its last holder is dead."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        path = self.folder.with_name(f"{self.folder.name}.lock")
        self._lock = path.open("w")
        locked = try_lock(self._lock)
        if locked is False:
            raise ConfigError(
                f"another process is training in {self.url}, with the local folder {self.folder}.",
                hint="wait until it ends, or use another --run.",
            )
        if locked is None:  # without locks, wait for the lease
            return None
        stat = os.fstat(self._lock.fileno())
        return {"host": socket.gethostname(), "boot": _boot(), "lock": [str(path), stat.st_dev, stat.st_ino]}

    def _write_session(self, number: int) -> None:
        write_atomically(self.folder / SESSION, json.dumps({"url": self.url, "session": number}))


class HeldLease(Callback):
    """Stops a run whose store was taken over by another process."""

    def __init__(self, run: RemoteRun) -> None:
        self.run = run

    def after_step(self, loop: Loop) -> bool:
        lease = self.run.lease
        if lease is not None and lease.lost is not None:
            raise TrainingError(
                f"{self.run.url} was taken over by {lease.lost}.", hint="let that run finish, or stop it and resume."
            )
        return False


# --- Files of a run ---


def run_files(folder: Path) -> list[str]:
    """Returns the files of a run folder to upload: all but checkpoints, hidden and temporary files."""
    found = []
    for parent, folders, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        folders[:] = [
            name for name in folders if not name.startswith(".") and (inside / name).as_posix() != CHECKPOINTS
        ]
        found += [(inside / name).as_posix() for name in names if not name.startswith(".")]
    return sorted(found)


def _is_of_rank(name: str, rank: int) -> bool:
    """Returns whether a file is written by a process of this rank.

    Example:
        >>> _is_of_rank("ledger/start-0001.rank-00001.jsonl", 1), _is_of_rank("metrics.jsonl", 1)
        (True, False)
    """
    return f".rank-{rank:05}." in name or name.endswith(f"-rank{rank}.txt")


def fetch_files(store: ObjectStore, folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Downloads the files of a run, except checkpoints."""
    sizes = {
        name: size
        for name, size in store.list().items()
        if not name.startswith((".", f"{CHECKPOINTS}/", *but)) and ".." not in name.split("/")
    }
    download_files(store, sizes, folder)


def read_remote(url: str) -> tuple[Path, Checkpoints]:
    """Returns a local copy of the files of a run in a store, and its checkpoints, which are fetched when restored.

    The copy is only for reading: it is apart from the folder of a process that trains here.
    """
    store = open_store(url)
    if not any(store.read(name) for name in (CONFIG, FACTS)):
        raise ConfigError(f"{url} holds no run.", hint="pass the URL that was given to --run.")
    shared = jax.process_count() == 1
    # Processes on one machine would write the same files, and those on several machines do not see each other's.
    folder = _cached(url, "read" if shared else f"read/rank-{jax.process_index()}")
    incoming = folder / f".incoming-{os.getpid()}"
    try:
        incoming.mkdir(parents=True, exist_ok=True)
        fetch_files(store, incoming, but=_NOT_READ)
        for name in run_files(incoming):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(incoming / name, folder / name)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    durable = DurableSteps(store.below(CHECKPOINTS))
    return folder, TieredCheckpoints(folder / CHECKPOINTS, durable=durable, trust_local=False, shared=shared)


def fetch_step(url: str, step: int | None) -> tuple[str, int]:
    """Returns a local copy of a run that holds a verified step, and its number (default: the last good one).

    All processes call it.
    """
    folder, checkpoints = together("reading a run in a store", lambda: read_remote(url))
    if step is None:
        step, notes = checkpoints.last_good(pass_unreadable=False)
        problems = [] if step is not None else notes or ["no step is finished"]
    else:
        problems = [f"step {step} is not finished"]
        there = together("listing the steps of a run", checkpoints.steps)
        if from_first(int(step in there)):
            problems = checkpoints.verify(step)
    if step is None or problems:
        raise CheckpointError(f"{url}: {problems[0]}.", hint="`meshwright checkpoint ls` lists the steps.")
    return str(folder), step


def _cached(url: str, kind: str) -> Path:
    name = re.sub(r"[^\w.-]", "-", url.rstrip("/").rpartition("/")[2])[:60]
    return default_cache() / kind / f"{name}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:12]}"


def _session(folder: Path, url: str) -> int:
    """Returns the session that last wrote a local folder, 0 if unknown; raises if it belongs to something else."""
    try:
        held = json.loads((folder / SESSION).read_bytes())
        owner, number = str(held["url"]), int(held["session"])
    except FileNotFoundError:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds other files; the local folder of a run in a store must be new or its own.",
                hint="use another --local-run.",
            ) from None
        return 0
    except (ValueError, KeyError, TypeError, OSError):
        return 0
    if owner != url:
        raise ConfigError(f"{folder} is the local folder of {owner}.", hint="use another --local-run.")
    return number


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
