"""How fast each collective runs on each kind of network, by size, with a source for every figure.

`link_rates.toml` has the figures. Bandwidths are published per link; the shares of them that a collective reaches, and
its latencies, are measured on few machines only, and assumed for the others.
"""

from __future__ import annotations

import bisect
import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class CollectiveRate:
    """Time of a collective on a network: `start + hops * hop + bytes / (bandwidth * share(bytes))`.

    Args:
        start: seconds before the first byte.
        hop: seconds for each hop after another.
        shares: pairs of bytes that a device sends and the share of the bandwidth that it reaches, in rising order.
            Between two of them, the share follows the logarithm of the bytes.
        inner: seconds for each hop inside a host, of a ring over several.
        is_tree: whether the hops grow with the logarithm of the devices, instead of with their number.
        source: where the figures come from; starts with "assumed" if nothing was measured.
    """

    start: float
    hop: float
    shares: tuple[tuple[float, float], ...]
    source: str
    inner: float = 0.0
    is_tree: bool = False

    def share(self, wire_bytes: float) -> float:
        """Returns the share of the bandwidth that a transfer reaches, in which each device sends these bytes.

        Example:
            >>> rate = CollectiveRate(1e-6, 0.0, ((1e6, 0.4), (4e6, 0.8)), "assumed")
            >>> [round(rate.share(size), 6) for size in (1e3, 1e6, 2e6, 1e9)]
            [0.4, 0.4, 0.6, 0.8]
        """
        sizes = [size for size, _ in self.shares]
        place = bisect.bisect_right(sizes, wire_bytes)
        if place in (0, len(sizes)):
            return self.shares[max(0, place - 1)][1]
        (least, low), (most, high) = self.shares[place - 1 : place + 1]
        return low + (high - low) * math.log(wire_bytes / least) / math.log(most / least)

    def waits(self, hops: int, inner: int = 0) -> float:
        """Returns the seconds that do not depend on the bytes, for so many hops, and so many more inside hosts."""
        return self.start + self.hop * (math.log2(hops + 1) if self.is_tree else hops) + self.inner * inner

    def scaled(self, factor: float) -> CollectiveRate:
        """Returns the same rate with all shares multiplied by a factor."""
        return replace(self, shares=tuple((size, share * factor) for size, share in self.shares))


@functools.cache
def link_rates(network: str) -> Mapping[str, CollectiveRate]:
    """Returns the rate of each collective on a kind of network: a name in `link_rates.toml`.

    Example:
        >>> rate = link_rates("nvlink4")["all-gather"]
        >>> rate.share(235e6), round(rate.waits(hops=7) * 1e6, 1), rate.source[:24]
        (0.75, 28.8, 'measured: eight H100s on')
    """
    return {kind: _read(network, kind) for kind in COLLECTIVES}


def line_factor(network: str) -> float:
    """Returns the factor on the shares of a closed ring that a line of devices reaches."""
    return float(_table()[network].get("line", 1.0))


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("meshwright.hardware").joinpath("link_rates.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _read(network: str, kind: str) -> CollectiveRate:
    row = _table()[network][kind]
    source = _table()["sources"].get(row["source"], row["source"])
    if "more" in row:
        source += f"; {row['more']}"
    known = {name: row[name] for name in ("start", "hop", "inner", "is_tree") if name in row}
    if "like" not in row:
        return CollectiveRate(
            known.get("start", 0.0),
            known.get("hop", 0.0),
            tuple((float(size), float(share)) for size, share in row["shares"]),
            source,
            known.get("inner", 0.0),
            known.get("is_tree", False),
        )
    other, _, named = row["like"].partition(".")
    like = _read(other, named or kind)
    scaled = like.scaled(row["top"] / like.shares[-1][1]) if "top" in row else like
    return replace(scaled, source=source, **known)
