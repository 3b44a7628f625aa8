"""Expected goodput of a plan: how much of the time trains on a machine whose chips fail now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError
from meshwright.plan.costs.failures import Failures
from meshwright.plan.target import Target

if TYPE_CHECKING:
    from meshwright.plan.plan import Plan

RESTART_S = 300.0
"""Assumed seconds from a failure until the checkpoint begins to load."""
STORAGE_PER_HOST, STORAGE_MOST = 2**30, 100 * 2**30
"""Assumed bytes per second that storage takes: of each host, and at most of all together."""


@dataclass(frozen=True)
class Reliability:
    """What a machine's chips and storage do; see `meshwright plan --mtbf`.

    Args:
        mtbf_hours: mean hours between two failures of one chip, with its share of the host and the network.
        restart_s: seconds from a failure until the checkpoint begins to load.
        storage_rate: bytes per second that all hosts together write and read; None for `STORAGE_PER_HOST` each, at
            most `STORAGE_MOST` together.

    Example:
        >>> Reliability(mtbf_hours=50_000).mtbf_hours
        50000
    """

    mtbf_hours: float
    restart_s: float = RESTART_S
    storage_rate: float | None = None


@dataclass(frozen=True)
class ExpectedGoodput:
    """Expected goodput of a plan; made by `plan_goodput`.

    Args:
        chips: number of chips.
        state_bytes: bytes of a checkpoint: one copy of parameters, optimizer state and the rest.
        step_s: seconds of a step, without failures.
    """

    given: Reliability
    target: Target
    chips: int
    state_bytes: float
    step_s: float

    def failures(self, chips: int | None = None) -> Failures:
        """Returns the failures of the machine, or of one with another number of chips."""
        count = self.chips if chips is None else chips
        save = self.state_bytes / self.storage(count)
        rate = count / (self.given.mtbf_hours * 3600)
        return Failures(rate, save, self.given.restart_s + save)

    def storage(self, chips: int) -> float:
        """Returns the bytes per second that storage takes from a number of chips."""
        if self.given.storage_rate is not None:
            return self.given.storage_rate
        hosts = max(1.0, self.target.num_hosts * chips / self.chips)
        return min(STORAGE_PER_HOST * hosts, STORAGE_MOST)

    @property
    def interval_s(self) -> float:
        """The best interval between saves, in whole steps."""
        return self.interval_steps * self.step_s

    @property
    def interval_steps(self) -> int:
        return max(1, round(self.failures().best_interval / self.step_s))

    @property
    def share(self) -> float:
        """The share of time that trains, with the best interval."""
        return self.failures().goodput(self.interval_s)

    def at(self, chips: int) -> float:
        """Returns the goodput with another number of chips, each time with its best interval."""
        found = self.failures(chips)
        return found.goodput(found.best_interval)

    def curve(self) -> tuple[Sequence[int], Sequence[float]]:
        """Returns numbers of chips, up to four times those of the plan, and the goodput of each."""
        counts = sorted({max(1, round(4 * self.chips * place / 48)) for place in range(49)} | {self.chips})
        return counts, [self.at(count) for count in counts]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON data; they are all assumed but the bytes of the state."""
        found = self.failures()
        counts, shares = self.curve()
        return {
            **dataclasses.asdict(self.given),
            "chips": self.chips,
            "failure_every_s": 1 / found.rate,
            "state_bytes": self.state_bytes,
            "storage_rate": self.storage(self.chips),
            "storage_rate_is_assumed": self.given.storage_rate is None,
            "save_s": found.save,
            "restart_and_load_s": found.restart,
            "young_daly_s": found.young_daly,
            "best_interval_s": self.interval_s,
            "best_interval_steps": self.interval_steps,
            "goodput": self.share,
            "shares": found.shares(self.interval_s),
            "curve": {"chips": counts, "goodput": shares},
            "basis": "assumed",
        }


def plan_goodput(plan: Plan, given: Reliability) -> ExpectedGoodput:
    """Returns the expected goodput of a plan, whose step time must be known.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("7b"), batch_size=4096, num_tokens=4096)
        >>> plan = make_plan(job, "v5p:16x16x16", Setup(mesh="dp:16,fsdp:256", remat="full"))
        >>> found = plan_goodput(plan, Reliability(mtbf_hours=50_000))
        >>> 0.9 < found.share < 1, found.at(64) > found.share
        (True, True)
    """
    if plan.time is None or plan.target.chip is None:
        raise ConfigError("goodput needs a step time, which is unknown for CPUs.", hint="plan for e.g. v5p:4x4x8.")
    chips = plan.target.num_devices // plan.target.chip.devices_per_chip
    return ExpectedGoodput(given, plan.target, chips, plan.state_bytes, plan.time.step.value)
