"""A cluster that exists only on paper: hosts that die, hang and become unreachable, simulated from event to event."""

import heapq
import random
from dataclasses import dataclass, field

from meshwright.launch.events import Asked, Ended, Ending, FindVerified, Finish, Silent, Start, Stop, Tick, Verified

KILLED = Ending(signal=9)


@dataclass
class Rates:
    """Mean seconds between events of the whole cluster, and durations in seconds."""

    death: float = 4 * 3600.0
    hang: float = 40 * 3600.0
    partition: float = 100 * 3600.0
    preemption: float = 200 * 3600.0
    start: float = 120.0
    step: float = 10.0
    steps_per_save: int = 120
    verify_lag: float = 30.0  # a save is finished, and hashed, this much later
    silent: float = 60.0
    outage: float = 500.0
    damaged: float = 0.02  # part of the checkpoints that are found damaged when they are verified


@dataclass
class Cluster:
    """Runs a supervisor against the simulation, and keeps account of the time."""

    supervisor: object
    rates: Rates
    num_ranks: int
    ranks_per_place: int
    seed: int = 0
    now: float = 0.0
    alive: set = field(default_factory=set)
    unreachable: dict = field(default_factory=dict)  # place -> time of its return
    verified: set = field(default_factory=set)
    resumed: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)
    code: int | None = None

    def run(self, hours):
        self.random, self.queue, self.serial = random.Random(self.seed), [], 0
        self.step, self.places, self.best = None, (), 0
        for kind in ("death", "hang", "partition", "preemption"):
            self.plan(kind, self.random.expovariate(1 / getattr(self.rates, kind)))
        self.carry_out(self.supervisor.begin())
        while self.code is None and self.queue and self.now < hours * 3600:
            wakes, due = self.supervisor.wakes_at, self.queue[0][0]
            if wakes is not None and wakes <= due:
                self.now = max(self.now, wakes)
                self.carry_out(self.supervisor.handle(Tick(), self.now))
                continue
            if not self.alive or self.supervisor.phase == "stopping":
                assert wakes is not None or self.code is not None, f"deadlock in {self.supervisor.phase}"
            self.now, _, kind, what = heapq.heappop(self.queue)
            self.happen(kind, what)
        return self

    def plan(self, kind, seconds, what=None):
        self.serial += 1
        heapq.heappush(self.queue, (self.now + seconds, self.serial, kind, what))

    def happen(self, kind, what):
        if kind in ("death", "hang", "partition", "preemption"):
            self.plan(kind, self.random.expovariate(1 / getattr(self.rates, kind)))
            if not self.alive:
                return
            self.counts[kind] = self.counts.get(kind, 0) + 1
            rank = self.random.randrange(self.num_ranks)
            if rank not in self.alive:
                return
            if kind == "death":
                self.end({rank: KILLED})
            elif kind == "hang":
                self.freeze()
                self.plan("silent", self.rates.silent, (self.attempt, (rank,)))
            elif kind == "partition":  # several hosts are cut off for a while
                self.freeze()
                first = rank // self.ranks_per_place
                cut = range(first, min(len(self.places), first + 4))
                for number in cut:
                    self.unreachable[self.places[number]] = self.now + self.rates.outage
                ranks = tuple(r for number in cut for r in self.ranks_of(number))
                self.plan("silent", self.rates.silent, (self.attempt, ranks))
            else:  # all ranks save and stop
                reached = self.reached()
                self.verified.add(reached)
                self.end(dict.fromkeys(self.alive, Ending(code=75)))
        elif kind == "silent" and what[0] == self.attempt and self.alive:
            self.carry_out(self.supervisor.handle(Silent(what[1], self.rates.silent, self.reached()), self.now))
        elif kind == "gone" and what[0] == self.attempt and what[1]:
            self.end(dict.fromkeys(what[1], KILLED))

    def ranks_of(self, number):
        return range(number * self.ranks_per_place, (number + 1) * self.ranks_per_place)

    def reached(self):
        """The last finished step of this attempt."""
        until = self.frozen if self.frozen is not None else self.now
        return self.first + max(0, int((until - self.began - self.rates.start) / self.rates.step))

    def freeze(self):
        if self.frozen is None:
            self.frozen = self.now

    def end(self, endings):
        assert endings.keys() <= self.alive
        self.freeze()
        self.alive -= endings.keys()
        self.carry_out(self.supervisor.handle(Ended(endings, self.reached()), self.now))

    def carry_out(self, actions):
        for action in actions:
            if isinstance(action, Start):
                self.start(action)
            elif isinstance(action, Stop):
                dead = set(self.alive)
                for number, place in enumerate(self.places):
                    if self.unreachable.get(place, 0) > self.now:
                        dead.difference_update(self.ranks_of(number))
                self.plan("gone", 0.5, (self.attempt, dead))
            elif isinstance(action, FindVerified):
                self.carry_out(self.supervisor.handle(Verified(self.find()), self.now))
            elif isinstance(action, Finish):
                self.code = action.code

    def start(self, action):
        assert len(set(action.places)) == len(action.places) == self.num_ranks // self.ranks_per_place
        # The old ranks are gone, or cut off from all others, without which they cannot save.
        assert not any(self.unreachable.get(place, 0) > self.now for place in action.places), "started on a lost host"
        assert action.step is None or action.step in self.verified, f"resumed from unverified step {action.step}"
        self.attempt, self.places = action.attempt, action.places
        self.first, self.began, self.frozen = action.step or 0, self.now, None
        self.resumed.append(action.step)
        self.alive = set(range(self.num_ranks))

    def find(self):
        """The newest step that was saved, hashed in time, and not damaged."""
        saved = self.reached() // self.rates.steps_per_save * self.rates.steps_per_save
        if saved > self.first:
            at = self.began + self.rates.start + (saved - self.first) * self.rates.step
            if at + self.rates.verify_lag > self.frozen or self.random.random() < self.rates.damaged:
                saved -= self.rates.steps_per_save
            if saved > self.first:
                self.verified.add(saved)
        return max(self.verified, default=None)

    def ask(self):
        self.carry_out(self.supervisor.handle(Asked(), self.now))
