"""The run folder: its name, its configuration, and its lock."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from meshwright.distributed.agreement import as_first, together
from meshwright.errors import ConfigError
from meshwright.files import try_lock, write_atomically
from meshwright.loop.settings.config import TrainConfig

CONFIG, FACTS = "config.yaml", "run.json"
_FULL = "free some space, or use a folder on another disk with --run."
_FORBIDDEN = "use a folder with write permission for --run."
_FILE = "choose another --run: a file on this path has the name of a folder."
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.EEXIST: _FILE,
    errno.ENOTDIR: _FILE,
    errno.EISDIR: "choose another --run: a folder has the name of one of the run's files.",
    errno.ENAMETOOLONG: "use a shorter name for --run.",
    errno.EIO: "check the disk, or use a folder on another one with --run.",
}
# Files that a new run's folder may already hold: leftovers of a failed start, files of a scheduler or a file system.
_FILES = "run.json metrics.jsonl events.jsonl trackers.json report.html hang-*.txt *.log *.out *.err .* lost+found"
_NO_STRANGERS = f"{_FILES} checkpoints tensorboard ledger profile predictions wandb init".split()
PER_PROCESS = ("coordinator", "num_processes", "process_id", "bind")
"""Options that differ between the processes of a run."""
NOT_OF_THE_RUN = ("resume", "or_start", "run", "local_run", "compile_cache", *PER_PROCESS)
"""Options that describe how a process takes part, not the run."""


class RunFolder:
    """The folder of one run; `RunFolder.open` finds or creates it, the same on all processes."""

    def __init__(self, path: Path, *, resumed: bool, url: str | None = None) -> None:
        self.path = path
        self.resumed = resumed
        self.url = url
        self.local_run: str | None = None
        self._lock: IO[str] | None = None

    @classmethod
    def open(cls, config: TrainConfig, *, name: str, url: str | None = None, shared: bool = True) -> RunFolder:
        """Finds the folder that a configuration names, or creates the next free one under `runs/`.

        Process 0 decides and broadcasts the folder or the error, so that all processes continue or fail together.

        Args:
            url: where the run is, if the folder is the local copy of a run in an object store.
            shared: whether all processes see the same folder; if not, the configuration of each names its own.
        """
        folder = cls(Path(), resumed=False, url=url)
        folder.local_run = config.store.local_run if url is not None else None
        problem: ConfigError | None = None
        if jax.process_index() == 0:
            try:
                folder.path = _choose(config, name, url)
                folder.resumed = (folder.path / CONFIG).is_file()
                if jax.process_count() > 1:  # other processes may have another working directory
                    folder.path = folder.path.absolute()
                folder.path.mkdir(parents=True, exist_ok=True)
                folder._take_lock()
            except ConfigError as error:
                problem = error
            except OSError as error:
                problem = _cannot_write(folder.path if folder.path.name else Path(config.run.run or "runs"), error)
        kind = "resumed" if folder.resumed else "new"
        said = as_first(f"problem {problem}" if problem is not None else f"{kind} {folder.path}")
        kind, _, text = said.partition(" ")
        if problem is not None:
            folder.close()
            raise problem
        if kind == "problem":
            raise ConfigError(text)
        folder.path, folder.resumed = Path(text), kind == "resumed"
        if not shared and config.run.run is not None:
            folder.path = Path(config.run.run)
        elif jax.process_count() > 1:
            together("looking for the run's folder", folder._require_shared)
        return folder

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def shown(self) -> str:
        """The folder or the URL of the run, as users give it."""
        return str(self.path) if self.url is None else self.url

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        local = "" if self.local_run is None else f" --local-run {shlex.quote(self.local_run)}"
        return f"meshwright train --run {shlex.quote(self.shown)}{local} --resume"

    def write_config(self, config: TrainConfig) -> None:
        """Writes the configuration, without the options in `NOT_OF_THE_RUN`."""
        defaults = TrainConfig().flat()
        config = config.changed({name: defaults[name] for name in NOT_OF_THE_RUN})
        self._write(CONFIG, config.to_yaml())

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Writes facts about the run: mesh, layout, devices, versions."""
        facts = {"name": Path(self.shown).name, "resume_command": self.resume_command, "started": time.time(), **facts}
        self._write(FACTS, json.dumps(facts, indent=1))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an `OSError`, e.g. from a full disk, into an error with a hint."""
        try:
            yield
        except OSError as error:
            if error.errno not in _HINTS:
                raise
            raise _cannot_write(self.path, error) from error

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _require_shared(self) -> None:
        for _ in range(50):  # a network file system may show the folder late
            if self.path.is_dir():
                return
            time.sleep(0.2)
        raise ConfigError(
            f"rank 0 created {self.path}, but this process cannot see it.",
            hint="put --run on a file system that all processes share.",
        )

    def _write(self, name: str, text: str) -> None:
        if jax.process_index() == 0:
            write_atomically(self.path / name, text)

    def _take_lock(self) -> None:
        self._lock = (self.path / ".lock").open("w")
        locked = try_lock(self._lock)
        if locked is False:
            raise ConfigError(
                f"another process is training in {self.path}.", hint="wait until it ends, or use another --run."
            )
        if locked is None:  # some network file systems have no locks
            with contextlib.suppress(OSError):
                self._lock.close()
            self._lock = None


def _choose(config: TrainConfig, name: str, url: str | None) -> Path:
    options = config.run
    if options.resume and options.run is None:
        raise ConfigError("--resume needs a run folder.", hint="pass --run runs/NAME --resume.")
    path = Path(options.run) if options.run is not None else _next_free(Path("runs"), name)
    shown = url or str(path)
    if (path / CONFIG).is_file():
        if not options.resume:
            raise ConfigError(f"{shown} already holds a run.", hint="resume it with --resume, or use another --run.")
        return path
    if options.resume and not options.or_start:
        raise ConfigError(f"{shown} holds no run to resume.", hint="name the folder that holds config.yaml.")
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    strangers = [name for name in names if not any(fnmatch.fnmatch(name, known) for known in _NO_STRANGERS)]
    if strangers:
        some = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
        raise ConfigError(
            f"{shown} holds other files but no run: {some}.",
            hint=f"use a folder for the run alone, e.g. --run {shlex.quote(f'{shown}/run')}.",
        )
    return path


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    hint = _HINTS.get(error.errno or 0, "use another folder with --run.")
    return ConfigError(f"cannot write the run folder {path}: {error.strerror or error}.", hint=hint)


def _next_free(parent: Path, name: str) -> Path:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [pattern.fullmatch(path.name) for path in parent.glob(f"{name}-*")]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    return parent / f"{name}-{number:03d}"
