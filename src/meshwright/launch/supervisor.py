"""The supervisor's decisions, as a state machine: events go in, actions come out, and nothing else happens.

    running -> stopping -> checking -> waiting -> running ...      and from anywhere: over

*running*: the ranks of an attempt are alive. *stopping*: one failed, and the others are being stopped. *checking*: all
are gone, and the newest verified checkpoint is being looked up. *waiting*: the pause before the next attempt. The
machine has no clock, no files and no processes, so that tests can run it against a simulated cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.launch.events import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_HUNG,
    EXIT_INTERRUPTED,
    EXIT_RESUME,
    EXIT_USAGE,
    Action,
    Asked,
    Ended,
    Ending,
    Event,
    FindVerified,
    Finish,
    Say,
    Silent,
    Start,
    Stop,
    Tick,
    Verified,
)
from meshwright.launch.messages import (
    describe_ending,
    describe_safety,
    describe_silence,
    name_ranks,
    plural,
    rough_duration,
    shorten,
)

Phase = Literal["new", "running", "stopping", "checking", "waiting", "over"]


@dataclass(frozen=True)
class Policy:
    """What the supervisor allows.

    Args:
        max_failures: failures in a row without a new checkpoint before it gives up.
        max_preemptions: preemptions in a row without a new checkpoint before it gives up.
        backoff: seconds before the first restart; they double with each failure in a row.
        longest_backoff: their limit.
        quarantine_after: failures of one host within `quarantine_seconds` after which it is not used for that long.
        quarantine_seconds: length of a quarantine.
        lost_seconds: time for which a host that could not be reached is not used.
        settle_seconds: time for the cause of a failure to show after a rank lost a peer.
        stop_seconds: time for killed ranks to go before their hosts count as lost.
        grace_seconds: time for ranks that were asked to stop, or whose peers are done, to save and end.
    """

    max_failures: int = 5
    max_preemptions: int = 100
    backoff: float = 1.0
    longest_backoff: float = 300.0
    quarantine_after: int = 3
    quarantine_seconds: float = 86400.0
    lost_seconds: float = 600.0
    settle_seconds: float = 2.0
    stop_seconds: float = 30.0
    grace_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ConfigError(f"`{name}` must be at least 0; got {value}.", hint="pass 0 or more.")


class Supervisor:
    """Decides when to start, stop and restart the ranks of a run.

    Args:
        places: hosts that can run ranks; more than the largest size makes spares.
        sizes: numbers of hosts that the run may use, the first one preferred.
        ranks_per_place: ranks on each host.

    Example:
        >>> supervisor = Supervisor(["node0", "node1"], sizes=[2])
        >>> supervisor.begin()
        [Start(attempt=1, places=('node0', 'node1'), step=None)]
        >>> supervisor.handle(Ended({1: Ending(signal=9)}, step=57), now=10.0)
        [Stop(force=True)]
        >>> supervisor.handle(Ended({0: Ending(signal=9)}), now=10.1)
        [FindVerified()]
        >>> [said] = supervisor.handle(Verified(40), now=10.2)
        >>> print(said.text)  # doctest: +NORMALIZE_WHITESPACE
        rank 1 on node1 was killed (SIGKILL) at step 57; the other rank was stopped. Step 40 is the newest verified
        checkpoint; steps 41 to 57 are computed again. The run restarts in 1 s (failure 1 of at most 5 without a new
        checkpoint).
        >>> supervisor.handle(Tick(), now=11.2)
        [Start(attempt=2, places=('node0', 'node1'), step=40)]
    """

    def __init__(
        self, places: Sequence[str], sizes: Sequence[int], *, ranks_per_place: int = 1, policy: Policy | None = None
    ) -> None:
        if not sizes or min(sizes) < 1 or max(sizes) > len(places):
            raise ConfigError(f"a run on {sizes} of {len(places)} hosts is impossible.", hint="add hosts.")
        self.policy = policy or Policy()
        self.phase: Phase = "new"
        self.attempt = 0
        self.wakes_at: float | None = None
        self.verified: int | None = None
        self.ranks_per_place = ranks_per_place
        self._all, self._sizes = tuple(places), sorted(sizes, reverse=True)
        self._places: tuple[str, ...] = ()
        self._alive: set[int] = set()
        self._endings: dict[int, Ending] = {}
        self._silent: Silent | None = None
        self._reached: int | None = None
        self._failures = self._preemptions = 0
        self._kept = -1  # the newest step that a checkpoint or a snapshot held at the last failure
        self._asked = 0
        self._failed_at: dict[str, list[float]] = {}
        self._away_until: dict[str, float] = {}

    def begin(self, step: int | None = None) -> list[Action]:
        """Starts the first attempt, from verified step `step` if the run is a resumed one."""
        self.verified, self._kept = step, -1 if step is None else step
        self._places = self._all[: self._sizes[0]]
        return self._start()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Takes an event at time `now`, in seconds, and returns the actions to take, in order."""
        if self.phase == "over":
            return []
        if isinstance(event, Asked):
            return self._ask(now)
        if isinstance(event, Verified):
            return self._decide(event.step, event.snapshot, now) if self.phase == "checking" else []
        if isinstance(event, Tick):
            return self._wake(now) if self.wakes_at is not None and now >= self.wakes_at else []
        if event.step is not None:
            self._reached = max(event.step, self._reached or 0)
        if isinstance(event, Silent):
            return self._lose(event, now)
        return self._end(event, now)

    @property
    def num_places(self) -> int:
        """Number of hosts of the current attempt."""
        return len(self._places)

    def allow(self, fits: Callable[[int], bool]) -> None:
        """Keeps only the sizes that the run can have, once its mesh is known; the current one stays."""
        self._sizes = [size for size in self._sizes if size == len(self._places) or fits(size)]

    # --- Events ---

    def _end(self, event: Ended, now: float) -> list[Action]:
        if self.phase not in ("running", "stopping"):
            return []
        self._alive -= event.endings.keys()
        if self.phase == "running":
            self._endings.update(event.endings)
        if not self._alive:
            return self._all_gone()
        if self.phase == "stopping":
            return []
        if any(ending.is_failure for ending in event.endings.values()):
            return self._stop(now)
        lost = any(ending.code not in (EXIT_DONE, EXIT_RESUME) for ending in event.endings.values())
        patience = self.policy.settle_seconds if lost else self.policy.grace_seconds
        self.wakes_at = now + patience if self.wakes_at is None else min(self.wakes_at, now + patience)
        return []

    def _lose(self, event: Silent, now: float) -> list[Action]:
        ranks = tuple(rank for rank in event.ranks if rank in self._alive)
        if self.phase != "running" or not ranks:
            return []
        self._silent = Silent(ranks, event.seconds, event.step)
        return self._stop(now)

    def _ask(self, now: float) -> list[Action]:
        self._asked += 1
        if self.phase in ("waiting", "new"):
            return self._over(EXIT_RESUME if self._asked == 1 else EXIT_INTERRUPTED)
        if self._asked > 1:
            return [Stop(force=True), *self._over(EXIT_INTERRUPTED)]
        if self.phase != "running":
            return []
        self.wakes_at = now + self.policy.grace_seconds
        return [Say("stopping: the ranks finish their step and save; ask again to stop at once"), Stop(force=False)]

    def _wake(self, now: float) -> list[Action]:
        self.wakes_at = None
        if self.phase == "waiting":
            chosen = self._choose(now)
            if chosen is None:
                return [Say("no hosts are left to restart on"), *self._over(EXIT_FAILED)]
            self._places = chosen
            return self._start()
        if self.phase == "running":
            if all(ending.code in (EXIT_DONE, EXIT_RESUME) for ending in self._endings.values()):
                self._endings |= {rank: Ending(code=EXIT_HUNG) for rank in sorted(self._alive)}
            return self._stop(now)
        if self.phase == "stopping":  # some cannot be stopped, because their hosts cannot be reached
            for rank in sorted(self._alive):
                self._away_until[self._place(rank)] = now + self.policy.lost_seconds
                if not any(ending.is_failure for ending in self._endings.values()) and self._silent is None:
                    self._endings[rank] = Ending()
            self._alive.clear()
            return self._all_gone()
        return []

    # --- Transitions ---

    def _start(self) -> list[Action]:
        self.phase, self.wakes_at = "running", None
        self.attempt += 1
        self._alive = set(range(len(self._places) * self.ranks_per_place))
        self._endings, self._silent, self._reached = {}, None, None
        return [Start(self.attempt, self._places, self.verified)]

    def _stop(self, now: float) -> list[Action]:
        self.phase, self.wakes_at = "stopping", now + self.policy.stop_seconds
        return [Stop(force=True)]

    def _all_gone(self) -> list[Action]:
        if self._silent is None and all(ending.code == EXIT_DONE for ending in self._endings.values()):
            return self._over(EXIT_DONE)
        self.phase, self.wakes_at = "checking", None
        return [FindVerified()]

    def _over(self, code: int) -> list[Action]:
        self.phase, self.wakes_at = "over", None
        return [Finish(code)]

    def _decide(self, step: int | None, snapshot: int | None, now: float) -> list[Action]:
        """Counts the failure or preemption, and waits for the next attempt or gives up."""
        kept = max(-1 if some is None else some for some in (step, snapshot))
        if kept > self._kept:  # the run has made progress
            self._failures = self._preemptions = 0
        self._kept, self.verified = kept, step
        ranks, why, message = self._cause()
        at = f" at step {self._reached}" if self._reached is not None else ""
        safe = describe_safety(step, self._reached, snapshot)
        if self._asked:
            safe = describe_safety(step, self._reached) if step is not None else "No checkpoint is finished yet."
            return [Say(f"the run was stopped on request{at}. {safe}"), *self._over(EXIT_RESUME)]
        if not ranks:
            self._preemptions += 1
            count, limit, noun = self._preemptions, self.policy.max_preemptions, "preemption"
            what = f"the run was preempted{at} and saved."
        else:
            self._failures += 1
            count, limit, noun = self._failures, self.policy.max_failures, "failure"
            others = len(self._places) * self.ranks_per_place - len(ranks)
            stopped = f"; the other {f'{others} ranks were' if others > 1 else 'rank was'} stopped" if others else ""
            what = f"{name_ranks(ranks, tuple(map(self._place, ranks)))} {why}{at}{stopped}."
            what += f' Its last message: "{shorten(message)}".' if message else ""
            for place in dict.fromkeys(map(self._place, ranks)):
                what += self._blame(place, now)
        if self._is_hopeless(ranks):
            text = f"{what} The run failed before its first step, so it is not restarted."
            return [Say(text), *self._over(EXIT_FAILED)]
        if count > limit:
            text = f"{what} {safe} The run is not restarted: this was {noun} {count} without a new checkpoint."
            return [Say(text), *self._over(EXIT_FAILED)]
        pause = min(self.policy.longest_backoff, self.policy.backoff * 2 ** (count - 1 if ranks else 0))
        chosen, smaller = self._choose(now + pause), ""
        if chosen is None:
            known = [until for until in self._away_until.values() if until > now]
            if not known:
                return [Say(f"{what} {safe} No hosts are left to restart on."), *self._over(EXIT_FAILED)]
            pause = max(pause, min(known) - now)
        elif len(chosen) != len(self._places):
            now_ranks, ranks_before = (len(some) * self.ranks_per_place for some in (chosen, self._places))
            smaller = f" on {plural(now_ranks, 'rank')} instead of {ranks_before}"
        self.phase, self.wakes_at = "waiting", now + pause
        budget = f"{noun} {count} of at most {limit} without a new checkpoint"
        return [Say(f"{what} {safe} The run restarts{smaller} in {rough_duration(pause)} ({budget}).")]

    # --- Judgement ---

    def _cause(self) -> tuple[tuple[int, ...], str, str]:
        """Returns the ranks to blame, their reason and their last message; no rank if the run was preempted."""
        if self._silent is not None:
            return self._silent.ranks, describe_silence(self._silent), ""
        failed = [rank for rank, ending in self._endings.items() if ending.is_failure]
        if not failed and any(ending.code == EXIT_RESUME for ending in self._endings.values()):
            return (), "", ""
        if not failed:  # every rank blames another one, or some never ended after the others had
            failed = list(self._endings)[:1]
        first = self._endings[failed[0]]
        return tuple(rank for rank in failed if self._endings[rank] == first), describe_ending(first), first.message

    def _blame(self, place: str, now: float) -> str:
        """Counts a failure of a host; puts it into quarantine if it fails too often and the run can do without it."""
        recent = [at for at in self._failed_at.get(place, ()) if now - at < self.policy.quarantine_seconds] + [now]
        self._failed_at[place] = recent
        if not self.policy.quarantine_after or len(recent) < self.policy.quarantine_after:
            return ""
        if self._choose(now, without=place) is None:
            return ""
        self._away_until[place] = now + self.policy.quarantine_seconds
        self._failed_at[place] = []
        away = rough_duration(self.policy.quarantine_seconds)
        return f" {place} failed {plural(len(recent), 'time')} within {away} and is not used for {away}."

    def _choose(self, now: float, *, without: str | None = None) -> tuple[str, ...] | None:
        """Returns the hosts of the next attempt: as many as allowed, those of the last attempt first."""
        free = [place for place in self._all if self._away_until.get(place, now) <= now and place != without]
        size = next((size for size in self._sizes if size <= len(free)), None)
        if size is None:
            return None
        known = set(self._places)
        kept = [place for place in free if place in known] + [place for place in free if place not in known]
        chosen = set(kept[:size])
        return tuple(place for place in self._all if place in chosen)

    def _is_hopeless(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether a restart cannot help: wrong usage, or an error before the very first step."""
        codes = {self._endings[rank].code for rank in ranks if rank in self._endings}
        if EXIT_USAGE in codes:
            return True
        return self.attempt == 1 and self._reached is None and self.verified is None and EXIT_FAILED in codes

    def _place(self, rank: int) -> str:
        return self._places[rank // self.ranks_per_place]
