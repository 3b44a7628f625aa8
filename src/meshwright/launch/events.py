"""The language between the supervisor and the outside: events that it receives, actions that it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HUNG = 70
"""Exit code of a rank that its own watchdog ended, after it wrote the stacks of its threads."""
EXIT_RESUME = 75
"""Exit code of a rank that saved and stopped on request: "resume me"."""
EXIT_LOST_PEER = 76
"""Exit code of a rank that stopped because it lost contact with another one; never the cause of a failure."""
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Args:
        code: its exit code, or None if a signal ended it.
        signal: the number of that signal.
        message: its last line of output.
        out_of_memory: whether the kernel's out-of-memory killer ended it.
    """

    code: int | None = None
    signal: int | None = None
    message: str = ""
    out_of_memory: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether this can be the cause of a failed attempt."""
        return self.code not in (EXIT_DONE, EXIT_RESUME, EXIT_LOST_PEER)


# --- Events ---


@dataclass(frozen=True)
class Ended:
    """Ranks ended. `step` is the last step that any rank has reported."""

    endings: Mapping[int, Ending]
    step: int | None = None


@dataclass(frozen=True)
class Silent:
    """Ranks whose heartbeat has stopped for `seconds`, although their process still exists."""

    ranks: tuple[int, ...]
    seconds: float
    step: int | None = None


@dataclass(frozen=True)
class Verified:
    """The answer to `FindVerified`: the newest verified checkpoint, and the newest snapshot in host memory, if any."""

    step: int | None
    snapshot: int | None = None


@dataclass(frozen=True)
class Asked:
    """The user or the scheduler asked the whole run to stop; a second time means at once."""


@dataclass(frozen=True)
class Tick:
    """The time that `Supervisor.wakes_at` named has come."""


Event = Ended | Silent | Verified | Asked | Tick

# --- Actions ---


@dataclass(frozen=True)
class Start:
    """Start an attempt.

    Args:
        attempt: number of the attempt, from 1.
        places: the host of each group of ranks, in the order of the ranks.
        step: the verified step to continue from, or None to start from the beginning.
    """

    attempt: int
    places: tuple[str, ...]
    step: int | None


@dataclass(frozen=True)
class Stop:
    """Stop all ranks: by force at once, or by asking them to save."""

    force: bool


@dataclass(frozen=True)
class FindVerified:
    """Look for the newest checkpoint that is complete and unchanged; answer with `Verified`."""


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Finish:
    """End the launcher with this exit code."""

    code: int


Action = Start | Stop | FindVerified | Say | Finish
