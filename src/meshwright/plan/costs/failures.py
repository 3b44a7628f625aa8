"""Goodput at scale: the share of time that trains if chips fail, and the checkpoint interval that makes it largest.

Failures come at random, at a constant rate per chip. After a failure the run restarts, loads the last checkpoint and
repeats the steps after it. With `r` failures per second of the whole machine, `T` seconds of training between
saves of `C` seconds, and `D` seconds to restart and load, which failures interrupt as well, a stretch of `T` takes

    E = exp(r D) (exp(r (T + C)) - 1) / r

seconds on average (Daly, "A higher order estimate of the optimum checkpoint interval", 2006), and the goodput is T / E.
It is largest where (1 - r T) exp(r (T + C)) = 1. If failures are rare, that is the interval of Young and Daly,
T = sqrt(2 C / r).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HALVINGS = 200


@dataclass(frozen=True)
class Failures:
    """How often a machine fails, and what saves and restarts take.

    Args:
        rate: failures per second, of all chips together.
        save: seconds in which a save stops training.
        restart: seconds from a failure to the first new step, without failures in between.

    Example:
        >>> day = Failures(rate=1 / 86400, save=60.0, restart=600.0)
        >>> round(day.young_daly), round(day.best_interval), round(day.goodput(day.best_interval), 3)
        (3220, 3180, 0.957)
    """

    rate: float
    save: float
    restart: float

    @property
    def young_daly(self) -> float:
        """The best interval to first order: sqrt(2 x save / rate)."""
        return math.sqrt(2 * self.save / self.rate)

    @property
    def best_interval(self) -> float:
        """Seconds of training between saves with the largest goodput."""

        def slope(share: float) -> float:  # of a failure's mean time; as logarithms, which keep the digits of rare ones
            return math.log1p(-share) + share + self.rate * self.save if share < 1 else -math.inf

        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if slope(middle) > 0 else (low, middle)
        return high / self.rate

    def seconds(self, interval: float) -> float:
        """Returns the mean time that `interval` seconds of training and their save take; infinite if it overflows."""
        try:
            return math.exp(self.rate * self.restart) * math.expm1(self.rate * (interval + self.save)) / self.rate
        except OverflowError:
            return math.inf

    def goodput(self, interval: float) -> float:
        """Returns the share of time that trains, if each checkpoint is saved after `interval` seconds of training."""
        return interval / self.seconds(interval)

    def shares(self, interval: float) -> dict[str, float]:
        """Returns the shares of time: "training", "saves", "restarts", and "lost work", which is trained again.

        Example:
            >>> shares = Failures(rate=1e-4, save=60.0, restart=600.0).shares(1000.0)
            >>> {name: round(share, 3) for name, share in shares.items()}
            {'training': 0.842, 'saves': 0.051, 'restarts': 0.058, 'lost work': 0.049}
        """
        whole = self.seconds(interval)
        if math.isinf(whole):
            return {"training": 0.0, "saves": 0.0, "restarts": 0.0, "lost work": 1.0}
        failed = math.expm1(self.rate * (interval + self.save))
        found = {
            "training": interval / whole,
            "saves": self.save / whole,
            "restarts": failed * math.expm1(self.rate * self.restart) / self.rate / whole,
        }
        return {**found, "lost work": max(0.0, 1 - sum(found.values()))}


def simulate(failures: Failures, interval: float, *, stretches: int, seed: int) -> float:
    """Returns the goodput of a simulated run that trains `stretches` intervals; it checks the formula.

    Example:
        >>> day = Failures(rate=1 / 86400, save=60.0, restart=600.0)
        >>> abs(simulate(day, 3600.0, stretches=4000, seed=0) - day.goodput(3600.0)) < 0.01
        True
    """
    draw = random.Random(seed)
    clock, fails, done = 0.0, draw.expovariate(failures.rate), 0
    while done < stretches:
        ends = clock + interval + failures.save
        if ends <= fails:
            clock, done = ends, done + 1
            continue
        while True:  # restart, from the beginning if it fails as well
            clock = fails
            fails = clock + draw.expovariate(failures.rate)
            if clock + failures.restart <= fails:
                clock += failures.restart
                break
    return done * interval / clock
