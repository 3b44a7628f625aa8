"""A run's folder: its name, its configuration, and that one run at a time writes into it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from pathlib import Path
from typing import IO, Any

import jax

from meshwright.errors import ConfigError
from meshwright.loop.config import TrainConfig
from meshwright.loop.together import as_first, together

CONFIG, FACTS = "config.yaml", "run.json"
# How a process takes part, not what the run is.
NOT_OF_THE_RUN = ("resume", "or_start", "run", "coordinator", "num_processes", "process_id")


class RunFolder:
    """The folder of one run; `RunFolder.open` finds or makes it, on all processes of the run the same.

    Args:
        path: the folder.
        resumed: whether it held a run before.
    """

    def __init__(self, path: Path, *, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self._lock: IO[str] | None = None

    @classmethod
    def open(cls, config: TrainConfig, *, name: str) -> RunFolder:
        """Finds the folder that a configuration names, or makes the next free one under `runs/`.

        Process 0 decides, and what it meets, all processes are told: one that went on alone would wait for the others.
        """
        folder, problem = cls(Path(), resumed=False), None
        if jax.process_index() == 0:
            try:
                folder.path = _choose(config, name)
                folder.resumed = (folder.path / CONFIG).is_file()
                if jax.process_count() > 1:  # the others may have been started elsewhere
                    folder.path = folder.path.absolute()
                folder.path.mkdir(parents=True, exist_ok=True)
                folder._take_lock()
            except (ConfigError, OSError) as error:
                problem = error
        kind = "resumed" if folder.resumed else "new"
        said = as_first(f"problem {problem}" if problem is not None else f"{kind} {folder.path}")
        kind, _, text = said.partition(" ")
        if problem is not None:
            folder.close()
            raise problem if isinstance(problem, ConfigError) else ConfigError(f"the run's folder: {problem}.")
        if kind == "problem":
            raise ConfigError(text)
        folder.path, folder.resumed = Path(text), kind == "resumed"
        if jax.process_count() > 1:
            together("looking for the run's folder", folder._require_shared)
        return folder

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def resume_command(self) -> str:
        """What to type to go on with the run."""
        return f"meshwright train --run {shlex.quote(str(self.path))} --resume"

    def write_config(self, config: TrainConfig) -> None:
        """Keeps the configuration, without what only says how this process takes part."""
        defaults = TrainConfig().flat()
        config = config.changed({name: defaults[name] for name in NOT_OF_THE_RUN})
        self._write(CONFIG, config.to_yaml())

    def write_facts(self, facts: dict[str, Any]) -> None:
        """Keeps what the run turned out to be: mesh, layout, devices, versions."""
        facts = {"name": self.path.name, "resume_command": self.resume_command, "started": time.time(), **facts}
        self._write(FACTS, json.dumps(facts, indent=1))

    def close(self) -> None:
        """Lets other processes write here."""
        if self._lock is not None:
            self._lock.close()

    def _require_shared(self) -> None:
        for _ in range(50):  # network file systems may take a while to show what another machine made
            if self.path.is_dir():
                return
            time.sleep(0.2)
        raise ConfigError(
            f"{self.path} was made by rank 0, and is not to be seen here.",
            hint="--run on a file system that all share.",
        )

    def _write(self, name: str, text: str) -> None:
        if jax.process_index() == 0:
            new = self.path / f".{name}.new"
            new.write_text(text, encoding="utf-8")
            os.replace(new, self.path / name)

    def _take_lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system; then nothing guards the folder
            return
        self._lock = (self.path / ".lock").open("w")
        try:
            # The system lets go of it when the process ends, however it ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in {self.path} right now.", hint="wait for its end, or use another --run."
            ) from None
        except OSError:  # some network file systems have no locks
            with contextlib.suppress(OSError):
                self._lock.close()
            self._lock = None


def _choose(config: TrainConfig, name: str) -> Path:
    wanted = config.run.run
    if config.run.resume:
        if wanted is None:
            raise ConfigError("--resume needs the folder of a run.", hint="--run runs/NAME --resume.")
        if not config.run.or_start and not (Path(wanted) / CONFIG).is_file():
            raise ConfigError(f"{wanted} holds no run to resume.", hint="the folder with config.yaml in it.")
        return Path(wanted)
    path = Path(wanted) if wanted is not None else _next_free(Path("runs"), name)
    if (path / CONFIG).is_file():
        raise ConfigError(f"{path} already holds a run.", hint="add --resume to go on with it, or name another --run.")
    return path


def _next_free(parent: Path, name: str) -> Path:
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [pattern.fullmatch(path.name) for path in parent.glob(f"{name}-*")]
    number = 1 + max((int(match[1]) for match in taken if match), default=0)
    return parent / f"{name}-{number:03d}"
