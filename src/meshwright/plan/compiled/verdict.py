"""Verdicts on the collectives of a compiled program: hidden, partly hidden or exposed, and the reason.

A transfer is hidden as far as the compute between its start and its end lasts: matmul FLOPs at the chip's matmul rate,
against its bytes at the speed of its link. TPU compilers also estimate the cycles of other work; a cycle is scaled so
that the matmuls run at that rate. On other platforms only matmuls count. Transfers on the same link share the compute
they overlap with in proportion to their remaining time, so a second of compute hides at most a second of each link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.mesh.string import MeshSpec, parse_mesh
from meshwright.pages.numbers import percent
from meshwright.plan.compiled.collectives import Collective, ProgramSchedule
from meshwright.plan.compiled.scheduled_steps import Steps, timed_steps
from meshwright.plan.costs.links import Link, axis_links, transfer_seconds
from meshwright.plan.target import Target, parse_target

Exposure = Literal["hidden", "partly hidden", "exposed"]
# Shares below and above these count as exposed and hidden, since rates are not known more precisely.
EXPOSED_BELOW, HIDDEN_FROM = 0.01, 0.99
# Options that make collectives asynchronous, found by compiling one collective beside a matmul with and without each
# (libtpu 0.0.42). Gathers over two or three torus dims need the 2d or 3d form, scatters the nd form.
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
_SPARSE_CORES = {
    "all-gather": (f"{_OFFLOAD}all_gather", "with its 2d_ and 3d_ forms"),
    "reduce-scatter": (f"{_OFFLOAD}reduce_scatter", "with its nd_ form"),
    "all-reduce": (f"{_OFFLOAD}all_reduce", ""),
}
OPTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {"v5p": _SPARSE_CORES, "v6e": _SPARSE_CORES}
# With the option, reduce-scatters stay reduce-scatters on these chips, though they may remain synchronous.
KEEPS_SCATTERS = ("v5e", "v5p", "v6e")
SYNCHRONOUS: Mapping[str, tuple[str, ...]] = {"v5e": ("all-reduce", "reduce-scatter")}


@dataclass(frozen=True)
class Verdict:
    """A verdict on one collective; `str(verdict)` is a sentence.

    Args:
        share: hidden share of the transfer time; 1 or 0 if the chip is unknown.
        transfer_s: seconds per transfer; None if the link is unknown.
        why: reason why it is exposed, and the option or change that would hide it.
    """

    share: float
    transfer_s: float | None = None
    why: str = ""

    @property
    def state(self) -> Exposure:
        return state_of(self.share)

    def __str__(self) -> str:
        share = f" ({percent(self.share)})" if self.state == "partly hidden" else ""
        return f"{self.state}{share}: {self.why}" if self.why else f"{self.state}{share}"


@dataclass(frozen=True)
class CompiledCollective:
    """One collective of a compiled program, as JSON-ready data. Other fields are those of `Collective`.

    Args:
        axes: mesh axes that it runs along.
        wire_bytes: bytes that each device sends per run, with the algorithm that sends the fewest.
        transfer_s: seconds per run; None if the link is unknown.
        share: hidden share of that time, from `judge`; None if the chip is unknown.
        why: reason why it is exposed, and the option or change that would hide it.
    """

    kind: str
    axes: tuple[str, ...]
    bytes_moved: int
    wire_bytes: float
    group_size: int
    is_async: bool
    matmuls_between: int
    trips: int
    source: str
    flops_between: float = 0.0
    cycles_between: int = 0
    serves: str = ""
    line: str = ""
    merged: int = 0
    transfer_s: float | None = None
    share: float | None = None
    why: str = ""

    @property
    def hidden_share(self) -> float:
        """Hidden share of its time; 1 or 0 if the chip is unknown."""
        return float(self.is_async and self.matmuls_between > 0) if self.share is None else self.share

    @property
    def state(self) -> Exposure:
        """Hidden, partly hidden or exposed."""
        return state_of(self.hidden_share)

    @property
    def hidden(self) -> bool:
        return self.state == "hidden"

    @property
    def reason(self) -> str:
        """Why it is not hidden or sends too much; "" if there is no problem."""
        return self.why or why_not_hidden(self, self.hidden_share)

    @property
    def verdict(self) -> str:
        """State, share and reason in one sentence."""
        return str(Verdict(self.hidden_share, self.transfer_s, self.reason))


def judge(
    schedule: ProgramSchedule,
    target: str | Target,
    mesh: str | MeshSpec,
    *,
    dtype: str = "bfloat16",
    options: Mapping[str, Any] | None = None,
) -> tuple[Verdict, ...]:
    """Returns a verdict on every collective of a schedule compiled for a target.

    Args:
        mesh: mesh that it was compiled with.
        dtype: dtype of the matmuls, which determines their rate.
        options: compiler options that it was compiled with, which are not suggested again.

    Example:
        >>> from meshwright.plan.compiled.collectives import Collective, Stretch
        >>> gather = Collective("all-gather", "g", 64 * 2**20, 4, True, 1, partners=((0, 1, 2, 3),))
        >>> beside = Stretch((0,), flops=5e10, cycles=0)
        >>> [str(one) for one in judge(ProgramSchedule((gather,), 1, 0, (beside,)), "v5p:2x2x1", "fsdp:4")]
        ['partly hidden (37.8%): the transfer takes longer than the compute it overlaps with']
    """
    target = parse_target(target)
    facts = _transfers(schedule, target, mesh, dtype)
    beside = hidden_seconds(schedule, facts.seconds, facts.lanes, facts.rate) if facts.rate else []
    known = facts.rate is not None and facts.is_linked
    found = []
    for place, one in enumerate(schedule.collectives):
        whole = facts.seconds[place]
        share = (beside[place] / whole if whole else float(one.hidden)) if known else float(one.hidden)
        advice = sync_advice(target.kind, target.platform, one.kind, one.source, options or {})
        found.append(Verdict(share, whole, why_not_hidden(one, share, advice)))
    return tuple(found)


class _Transfers(NamedTuple):
    seconds: list[float | None]
    lanes: list[tuple[str, ...]]
    rate: float | None
    is_linked: bool


def _transfers(schedule: ProgramSchedule, target: Target, mesh: str | MeshSpec, dtype: str) -> _Transfers:
    """Returns the time and links of every transfer, and the FLOP/s of matmuls."""
    spec = mesh if isinstance(mesh, MeshSpec) else parse_mesh(mesh).resolve(target.num_devices)
    sizes = dict(zip(spec.names, spec.sizes, strict=True))
    links = axis_links(target, spec)
    axes = [one.axes(sizes) for one in schedule.collectives]
    seconds = [
        transfer_seconds(one.kind, one.wire_bytes, along, links)
        for one, along in zip(schedule.collectives, axes, strict=True)
    ]
    return _Transfers(seconds, [link_names(along, links) for along in axes], target.matmul_rate(dtype), bool(links))


def timed_schedule(schedule: ProgramSchedule, target: Target, mesh: str | MeshSpec, *, dtype: str) -> Steps:
    """Returns the steps of a schedule with their times, and with the transfers that each hides."""
    facts = _transfers(schedule, target, mesh, dtype)
    if facts.rate is None:
        return schedule.steps
    pieces = hidden_pieces(schedule, facts.seconds, facts.lanes, facts.rate)
    return timed_steps(schedule.steps, pieces, rate=facts.rate, cycle=cycle_seconds(schedule, facts.rate))


def hidden_seconds(
    schedule: ProgramSchedule, seconds: Sequence[float | None], lanes: Sequence[tuple[str, ...]], rate: float
) -> list[float]:
    """Returns the seconds of each transfer that compute hides; `lanes` are the links that each uses."""
    found = [0.0] * len(seconds)
    for hidden in hidden_pieces(schedule, seconds, lanes, rate):
        for place, spent in hidden.items():
            found[place] += spent
    return found


def hidden_pieces(
    schedule: ProgramSchedule, seconds: Sequence[float | None], lanes: Sequence[tuple[str, ...]], rate: float
) -> list[dict[int, float]]:
    """Returns the seconds of each transfer that each stretch of the schedule hides."""
    left = [whole or 0.0 for whole in seconds]
    cycle = cycle_seconds(schedule, rate)
    found = []
    for stretch in schedule.stretches:
        # A loop has FLOPs but no cycle estimate.
        lasts = max(stretch.flops / rate, stretch.cycles * cycle)
        load: dict[str, float] = {}
        for place in stretch.in_flight:
            for lane in lanes[place]:
                load[lane] = load.get(lane, 0.0) + left[place]
        parts = {lane: min(1.0, lasts / total) if total else 0.0 for lane, total in load.items()}
        shares = {place: min((parts[lane] for lane in lanes[place]), default=0.0) for place in stretch.in_flight}
        found.append({place: share * left[place] for place, share in shares.items()})
        for place, share in shares.items():
            left[place] *= 1 - share
    return found


def cycle_seconds(schedule: ProgramSchedule, rate: float) -> float:
    """Returns the seconds of an estimated cycle, with which the matmuls run at `rate`; 0 without estimates."""
    return schedule.matmul_flops / rate / schedule.matmul_cycles if schedule.matmul_cycles else 0.0


def link_names(axes: Sequence[str], links: Mapping[str, Link]) -> tuple[str, ...]:
    """Returns the links that a transfer uses: on a torus, each axis has separate links unless axes share a dim."""
    shared = any(link.words.startswith("shares") for link in links.values())
    names = [axis if links[axis].name == "ici" and not shared else links[axis].name for axis in axes if axis in links]
    return tuple(dict.fromkeys(names))


def state_of(share: float) -> Exposure:
    """Returns the state for a hidden share."""
    return "hidden" if share >= HIDDEN_FROM else "exposed" if share < EXPOSED_BELOW else "partly hidden"


def why_not_hidden(one: Collective | CompiledCollective, share: float, advice: str = "") -> str:
    """Returns why a collective is not hidden or sends too much, or ""; `advice` comes from `sync_advice`."""
    if one.kind == "all-reduce" and ("reduce_scatter" in one.source or "psum_scatter" in one.source):
        said = "a reduce-scatter was compiled to an all-reduce, which sends twice the bytes"
        return f"{said}; {advice}" if advice else said
    if state_of(share) == "hidden":
        return ""
    if one.merged:
        waits = "" if one.is_async else "synchronous: "
        return (
            f"{waits}{one.merged} matmuls of its ring were merged into one, so none is left to overlap with; "
            "put an optimization_barrier between them, as gather_matmul does"
        )
    if one.is_async and (one.matmuls_between or one.cycles_between):
        return "the transfer takes longer than the compute it overlaps with"
    if one.is_async:
        return "no matmul between its start and its end"
    return f"synchronous, {advice or 'the device waits for it'}"


def sync_advice(chip: str, platform: str, kind: str, source: str, options: Mapping[str, Any]) -> str:
    """Returns why a collective is synchronous on a chip, and the option that changes it; "" if unknown.

    Example:
        >>> sync_advice("v5e", "tpu", "all-reduce", "jit(step)/psum", {})
        'the default on v5e; no known option changes it'
    """
    if kind == "all-reduce" and "scatter" in source:
        option, forms = _SPARSE_CORES["reduce-scatter"]
        if chip not in KEEPS_SCATTERS or option in options:
            return ""
        return f"the option {_named(option, forms)} keeps it a reduce-scatter"
    if kind in OPTIONS.get(chip, {}):
        option, forms = OPTIONS[chip][kind]
        if option in options:
            return f"even though the option {option} is set"
        return f"the default on {chip}; the option {_named(option, forms)} makes it asynchronous"
    if kind in SYNCHRONOUS.get(chip, ()):
        return f"the default on {chip}; no known option changes it"
    if platform == "gpu" or (chip, kind) == ("v5e", "all-gather"):
        return "because the compiler found no matmul to overlap with"
    return ""


def _named(option: str, forms: str) -> str:
    return f"{option} ({forms})" if forms else option
