"""Links and link speeds of each mesh axis on a machine.

GPUs are in plain order: the devices of the last axis are neighbors, and an axis that spans hosts uses the network. On
TPUs an axis takes whole dims of the torus or shares one, as in JAX meshes; slices are connected by the network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.hardware.chips import Chip
from meshwright.hardware.link_rates import CollectiveRate, line_factor
from meshwright.mesh.string import MeshSpec
from meshwright.plan.target import Target

# The slowest published network per chip, for vendors that publish none.
NETWORK_ASSUMED = 200e9 / 8 / 8
# Fitted to one H200 (benchmarks/results/plan_h200.md): 60 of 64 GB/s, if no offloading is hidden.
HOST_SHARE = 0.94
# Bytes/s to host memory, each way. GPUs: NVIDIA data sheets, PCIe 4 (A100) and 5, half of the bidirectional figure.
# TPUs publish none per chip; assumed is the share of a PCIe 4 card with four chips.
HOST_SPEED = {"a100": 32e9, "a100-40": 32e9, "h100": 64e9, "h200": 64e9, "b200": 64e9}
HOST_ASSUMED = 16e9
HOST_COPY = CollectiveRate(0.0, 0.0, ((1.0, HOST_SHARE),), "fitted to one H200")
_PERMUTE = "collective-permute"
_CARDS = 8  # of the hosts on which collectives between hosts were measured
_SAME = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


@dataclass(frozen=True)
class Link:
    """The link that an axis uses.

    Args:
        name: "ici", "nvlink", "network" or "host".
        speed: bytes per second that each device can send in gathers and scatters along the axis.
        hop_speed: bytes per second that each device can send to its neighbors, as in a ring of permutes.
        hops: sequential hops over the slowest link in a ring.
        words: placement of the axis on the machine.
        rates: how fast each collective runs on it.
        devices: devices along the axis.
        inner_hops: hops inside hosts, which a ring over several hosts also takes.
        cards: network cards of each host that take part.
        detour: links that each byte of an all-to-all crosses, relative to a gather.
        reached: factor on the shares of `rates`.
        is_closed: whether its devices form closed rings, with every hop between neighbors.
    """

    name: str
    speed: float
    hop_speed: float
    hops: int
    words: str
    rates: Mapping[str, CollectiveRate] = field(repr=False)
    devices: int = 1
    inner_hops: int = 0
    cards: int = _CARDS
    detour: float = 1.0
    reached: float = 1.0
    is_closed: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.words})"

    def seconds(self, kind: str, wire_bytes: float, count: int = 1) -> float:
        """Returns the time of `count` equal collectives of a kind, in which each device sends `wire_bytes` in total."""
        if not count and not wire_bytes:
            return 0.0
        kind = _SAME.get(kind, kind)
        rate, each = self.rates[kind], wire_bytes / max(1, count)
        is_exchange = kind == _PERMUTE or (kind == "all-to-all" and self.name == "network")  # by the card of each GPU
        if is_exchange:
            waits, speed = rate.waits(1), self.hop_speed
        else:
            waits, speed = rate.waits(self.hops, self.inner_hops), self.speed
            each *= _CARDS / self.cards  # fewer cards carry more bytes each
        share = self.reached * rate.share(each) / (self.detour if kind == "all-to-all" else 1.0)
        return count * waits + wire_bytes / (speed * share)

    def seconds_in_rings(self, kind: str, wire_bytes: float, count: int, share: float) -> float:
        """Returns the time of `count` gathers or scatters, of which a share is written as rings of permutes."""
        rings = round(count * share)
        whole = self.seconds(kind, wire_bytes * (1 - share), count - rings)
        return whole + self.seconds(_PERMUTE, wire_bytes * share, rings * max(1, self.devices - 1))


def axis_links(target: Target, spec: MeshSpec) -> Mapping[str, Link]:
    """Returns the link of every axis with more than one device; none for CPUs.

    Example:
        >>> from meshwright.mesh.string import parse_mesh
        >>> from meshwright.plan.target import parse_target
        >>> links = axis_links(parse_target("h200:8x8"), parse_mesh("dp:8,tp:8"))
        >>> {axis: (link.name, link.speed / 1e9) for axis, link in links.items()}
        {'dp': ('network', 50.0), 'tp': ('nvlink', 450.0)}
    """
    chip = target.chip
    if chip is None:
        return {}
    if target.platform == "gpu":
        return _on_hosts(target, chip, spec)
    links: dict[str, Link] = {}
    inside = _on_torus(target, chip, spec)
    for axis, dcn in zip(spec.axes, spec.dcn_sizes, strict=True):
        if axis.size == 1:
            continue
        if dcn > 1:
            speed = NETWORK_ASSUMED if chip.network is None else chip.network
            # Devices of a slice share its traffic, after a scatter or before a gather inside the slice, and of what a
            # device sends in all, only the part for other slices crosses the network.
            ways = axis.size // dcn
            words = f"crosses {dcn} slices" + (", speed assumed" if chip.network is None else "")
            within = inside[axis.name].speed if ways > 1 else speed
            fast = min(speed * ways * (1 - 1 / axis.size) / (1 - 1 / dcn), within)
            links[axis.name] = Link("network", fast, speed, dcn - 1, words, chip.network_rates, axis.size)
        else:
            links[axis.name] = inside[axis.name]
    return links


def host_link(chip: Chip) -> Link:
    """Returns the link between a device and its host's memory.

    Example:
        >>> from meshwright.hardware.chips import chip_of
        >>> host_link(chip_of("h200")).speed / 1e9
        64.0
    """
    known = HOST_SPEED.get(chip.name)
    speed = known or HOST_ASSUMED
    return Link("host", speed, speed, 1, "PCIe" if known else "speed assumed", {"copy": HOST_COPY})


def transfer_seconds(kind: str, wire_bytes: float, axes: Sequence[str], links: Mapping[str, Link]) -> float | None:
    """Returns the time of one transfer of `wire_bytes` per device along axes; None if the link is unknown."""
    link = slowest_link(axes, links, is_ring=kind == _PERMUTE)
    return None if link is None else link.seconds(kind, wire_bytes)


def slowest_link(axes: Sequence[str], links: Mapping[str, Link], *, is_ring: bool = False) -> Link | None:
    """Returns the slowest link of some axes, for a ring or for a whole collective."""
    found = [links[axis] for axis in axes if axis in links]
    return min(found, key=lambda link: link.hop_speed if is_ring else link.speed, default=None)


def _on_hosts(target: Target, chip: Chip, spec: MeshSpec) -> dict[str, Link]:
    links = {}
    stride, per_host = 1, target.shape[1]
    network = NETWORK_ASSUMED if chip.network is None else chip.network
    for axis in reversed(spec.axes):
        span = stride * axis.size
        if axis.size > 1 and span <= per_host:
            speed = chip.links.per_direction
            words = "inside a host"
            links[axis.name] = Link("nvlink", speed, speed, axis.size - 1, words, chip.links.rates, axis.size)
        elif axis.size > 1:
            cards = math.gcd(axis.size, max(1, per_host // stride))
            hosts = axis.size // cards
            # NCCL runs a ring through each network card of the participating GPUs: every byte that a device sends in
            # a ring also leaves each host.
            speed = min(network * cards, chip.links.per_direction)
            words = f"{hosts} hosts, {cards} GPU{'s' if cards > 1 else ''} in each"
            inner = axis.size - hosts
            # A ring of permutes leaves each host from one GPU, through its network card.
            links[axis.name] = Link(
                "network", speed, min(network, speed), hosts - 1, words, chip.network_rates, axis.size, inner, cards
            )
        stride = span
    return dict(reversed(links.items()))


def _on_torus(target: Target, chip: Chip, spec: MeshSpec) -> dict[str, Link]:
    """Places the axes on the torus, starting with the last, which communicates most."""
    free = [(size, wraps) for size, wraps in zip(target.shape, target.wraps, strict=True) if size > 1]
    links = {}
    for axis, size in reversed(list(zip(spec.axes, spec.ici_sizes, strict=True))):
        ways = size
        if chip.devices_per_chip > 1 and ways % chip.devices_per_chip == 0 and axis is spec.axes[-1]:
            ways //= chip.devices_per_chip
        if size == 1:
            continue
        taken = _whole_dims(free, ways)
        if taken is not None:
            for dim in taken:
                free.remove(dim)
            lanes = sum(2 if wraps else 1 for _, wraps in taken) or 1
            words = "x".join(str(length) for length, _ in taken) or "inside a chip"
            is_closed = all(wraps for _, wraps in taken)
            words += " of the torus" + ("" if is_closed else ", no ring")
        else:
            free, lanes = _shared_dims(free, ways)
            is_closed, words = False, "shares dims of the torus"
        speed = chip.links.per_direction
        # The links that cross the middle of the longest dim limit an all-to-all: half of all bytes cross it.
        longest = max((length for length, _ in taken), default=1) if taken is not None else ways
        detour = max(1.0, longest * lanes / (8 if is_closed else 4))
        hops = sum(length // 2 if wraps else length - 1 for length, wraps in taken) if taken is not None else ways - 1
        # A ring uses two links of a device at most, one to each neighbor.
        links[axis.name] = Link(
            "ici",
            speed * lanes,
            speed * min(lanes, 2),
            max(1, hops),
            words,
            chip.links.rates,
            size,
            detour=detour,
            reached=1.0 if is_closed else line_factor("ici"),
            is_closed=is_closed,
        )
    return links


def _whole_dims(free: list[tuple[int, bool]], ways: int) -> tuple[tuple[int, bool], ...] | None:
    for count in range(len(free), -1, -1):
        for dims in itertools.combinations(free, count):
            if math.prod(size for size, _ in dims) == ways:
                return dims
    return None


def _shared_dims(free: list[tuple[int, bool]], ways: int) -> tuple[list[tuple[int, bool]], int]:
    """Takes parts of the free dims; a part of a dim is a line with one lane."""
    left: list[tuple[int, bool]] = []
    lanes = 0
    for size, wraps in sorted(free, reverse=True):
        part = math.gcd(size, ways)
        ways //= part
        lanes += 0 if part == 1 else 2 if part == size and wraps else 1
        if size // part > 1:
            left.append((size // part, wraps and part == 1))
    return left, max(1, lanes)
