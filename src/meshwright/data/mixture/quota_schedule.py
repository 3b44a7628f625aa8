"""The order in which a mixture takes rows from its sources.

After n rows, each source has given its share of n, rounded up or down. Always taking the row that is most overdue does
not guarantee this for three or more sources. The quota method of Balinski and Young does: of the sources below their
rounded-up share of the next length, take the one whose next row is due first. All arithmetic is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

# Slots to keep for readers that are behind the newest one.
_KEPT = 1 << 16


class QuotaSchedule:
    """The source of every slot of a mixture, and the position of the row in the order of that source.

    Args:
        weights: whole numbers above 0.
        start: number of the first slot.
        taken: rows that each source gave before `start`.
        since: the slot at which these weights began.
        taken_since: rows that each source gave before `since`.

    Example:
        >>> sources, positions, taken = QuotaSchedule([2, 1], start=0, taken=[0, 0]).slots(0, 6)
        >>> sources.tolist(), positions.tolist(), taken.tolist()
        ([0, 0, 1, 0, 0, 1], [0, 1, 0, 2, 3, 1], [4, 2])
    """

    def __init__(
        self,
        weights: Sequence[int],
        *,
        start: int,
        taken: Sequence[int],
        since: int | None = None,
        taken_since: Sequence[int] | None = None,
    ) -> None:
        self.weights = [int(weight) for weight in weights]
        self.since = start if since is None else since
        self.taken_since = [int(count) for count in (taken if taken_since is None else taken_since)]
        self._first = (start, [int(count) for count in taken])
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._base, self._taken = self._first[0], list(self._first[1])
        self._base_taken = list(self._taken)
        self._sources: list[int] = []
        self._positions: list[int] = []

    def slots(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the sources of some slots, the positions in them, and the rows each source has given after these."""
        with self._lock:
            if first < self._base:
                self._restart()
            if first < self._base:
                raise ValueError(f"slot {first} is before slot {self._base}, where this schedule starts")
            while self._base + len(self._sources) < first + count:
                self._extend()
            begin = first - self._base
            stop = begin + count
            sources = np.array(self._sources[begin:stop], np.int64)
            positions = np.array(self._positions[begin:stop], np.int64)
            taken = np.bincount(self._sources[:stop], minlength=len(self.weights)) + self._base_taken
            self._forget(max(_KEPT, 64 * count))
            return sources, positions, taken

    def _extend(self) -> None:
        length = self._base + len(self._sources) - self.since + 1
        total, best, due = sum(self.weights), -1, 0
        for number, weight in enumerate(self.weights):
            given = self._taken[number] - self.taken_since[number]
            if given * total >= weight * length:
                continue  # it has its rounded-up share already
            if best < 0 or (given + 1) * self.weights[best] < due * weight:
                best, due = number, given + 1
        self._sources.append(best)
        self._positions.append(self._taken[best])
        self._taken[best] += 1

    def _forget(self, kept: int) -> None:
        over = len(self._sources) - kept
        if over > kept:
            for source in self._sources[:over]:
                self._base_taken[source] += 1
            del self._sources[:over], self._positions[:over]
            self._base += over
