"""The launcher's main loop: passes what happens to the supervisor, and carries out its decisions."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from meshwright.launch.command import to_resume, to_shrink
from meshwright.launch.events import (
    Action,
    Asked,
    Ended,
    Ending,
    FindVerified,
    Finish,
    Say,
    Silent,
    Start,
    Stop,
    Tick,
    Verified,
)
from meshwright.launch.memory_folder import newest_snapshot
from meshwright.launch.pulse import Pulses
from meshwright.launch.safe_step import newest_verified
from meshwright.launch.supervisor import Supervisor

_PAUSE = 0.05


class Ranks(Protocol):
    """The ranks of a run on some engine."""

    beats: Path

    def start(self, slots: Sequence[int], extra: Sequence[str]) -> None: ...
    def poll(self) -> dict[int, Ending]: ...
    def stop(self, *, force: bool) -> None: ...
    def close(self) -> None: ...


@dataclass
class Watch:
    """Runs a supervisor with real ranks until it finishes.

    Args:
        places: the names of the supervisor's hosts; their positions are the slots of the ranks.
        say: prints a line.
        silent_seconds: time without a heartbeat after which a rank counts as dead.
        start_seconds: time for its first heartbeat.
        run: the run folder or URL, if it is known before the ranks report it.
        folder: the local folder of the run, as the ranks report it.
        snapshots: the folder of the snapshots in this host's memory.
    """

    supervisor: Supervisor
    ranks: Ranks
    places: Sequence[str]
    say: Callable[[str], None]
    silent_seconds: float = 60.0
    start_seconds: float = 300.0
    run: str | None = None
    folder: str | None = None
    snapshots: Path | None = None
    clock: Callable[[], float] = time.monotonic
    _pulses: Pulses | None = None
    _shape: dict[str, Any] = field(default_factory=dict)
    _resized: bool = False
    _asked: int = 0
    _code: int | None = None

    def __call__(self) -> int:
        """Starts the run, watches it to its end, and returns the exit code."""
        with ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    stack.callback(signal.signal, number, signal.signal(number, self._note))
            stack.callback(self.ranks.close)
            self._carry_out(self.supervisor.begin())
            told = read_at = 0.0
            while self._code is None:
                time.sleep(_PAUSE)
                now = self.clock()
                if self._asked > told:
                    told += 1
                    self._carry_out(self.supervisor.handle(Asked(), now))
                if now - read_at > 0.25:
                    read_at = now
                    self._look(now)
                if ended := self.ranks.poll():
                    self._look(now)
                    self._carry_out(self.supervisor.handle(Ended(ended, self._step), now))
                elif silent := self._silent(now):
                    event = Silent(tuple(silent), max(silent.values()), self._step)
                    self._carry_out(self.supervisor.handle(event, now))
                if self.supervisor.wakes_at is not None and now >= self.supervisor.wakes_at:
                    self._carry_out(self.supervisor.handle(Tick(), now))
        return self._code

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked += 1

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self.say(action.text)
            elif isinstance(action, Stop):
                self.ranks.stop(force=action.force)
            elif isinstance(action, Start):
                self._start(action)
            elif isinstance(action, FindVerified):
                place = self.folder or self.run
                step = None if place is None else newest_verified(Path(place) / "checkpoints")
                held = None if self.snapshots is None else newest_snapshot(self.snapshots)
                self._carry_out(self.supervisor.handle(Verified(step, held), self.clock()))
            elif isinstance(action, Finish):
                self._code = action.code

    def _start(self, action: Start) -> None:
        extra = to_resume(self.run) if action.attempt > 1 else []
        self._resized = self._resized or (bool(self._shape) and self._shape["before"] != len(action.places))
        if self._resized:  # also when it grows again, because the run remembers its last mesh
            extra += to_shrink(**self._shape, now=len(action.places)) or []
        num_ranks = len(action.places) * self.supervisor.ranks_per_place
        self._pulses = Pulses(self.ranks.beats, num_ranks=num_ranks, now=self.clock())
        self.ranks.start([self.places.index(place) for place in action.places], extra)

    def _look(self, now: float) -> None:
        """Reads the heartbeats, and what the run said about itself in them."""
        if self._pulses is None or self.supervisor.phase != "running":
            return
        self._pulses.read(now)
        self.run = self._pulses.fact("run") or self.run
        self.folder = self._pulses.fact("folder") or self.folder  # the local copy of a run in an object store
        mesh, minibatches = self._pulses.fact("mesh"), self._pulses.fact("minibatches")
        if not self._shape and mesh is not None:
            self._shape = {"mesh": mesh, "minibatches": int(minibatches or 1), "before": self.supervisor.num_places}
            self.supervisor.allow(lambda size: to_shrink(**self._shape, now=size) is not None)

    def _silent(self, now: float) -> dict[int, float]:
        if self._pulses is None or self.supervisor.phase != "running":
            return {}
        return self._pulses.silent(now, seconds=self.silent_seconds, start_seconds=self.start_seconds)

    @property
    def _step(self) -> int | None:
        return None if self._pulses is None else self._pulses.step
