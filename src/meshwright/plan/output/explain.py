"""Causes of the difference in time and memory between two plans, which add up to it.

Works on plans as JSON data, so it can also compare plans written by different versions of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.hardware.chips import chip_of
from meshwright.layout.leaf import format_bytes
from meshwright.pages.numbers import compact, duration, number, percent, plural
from meshwright.plan.output.setup_words import pipeline_words

PlanData = Mapping[str, Any]
SHOW: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "s": duration,
    "1/s": compact,
    "share": percent,
    "$": lambda dollars: f"${number(dollars)}",
}
_SMALL = 0.01  # causes below this share of the largest become one


@dataclass(frozen=True)
class CostChange:
    """One cause of a difference in seconds or bytes.

    Args:
        what: the cause in a few words, e.g. "recomputation".
        before, after: seconds or bytes in each plan.
        why: a sentence without a full stop.
        unit: "s" or "bytes".
    """

    what: str
    before: float
    after: float
    why: str
    unit: str

    @property
    def more(self) -> float:
        """`after - before`."""
        return self.after - self.before

    def __str__(self) -> str:
        return f"{signed(self.more, self.unit)} {self.what}: {self.why}."


@dataclass(frozen=True)
class Explanation:
    """The causes of one difference, the largest first; they add up to it.

    Args:
        about: "step time" or "memory per device".
        before, after: totals of the two plans.
    """

    about: str
    before: float
    after: float
    unit: str
    causes: tuple[CostChange, ...]

    @property
    def more(self) -> float:
        """`after - before`."""
        return self.after - self.before

    @property
    def headline(self) -> str:
        """The difference in one sentence."""
        show, more = SHOW[self.unit], self.more
        if not more:
            return f"{self.about}: {show(self.before)} in both."
        word = "more" if more > 0 else "less"
        share = f", {abs(more) / self.before:.0%}" if self.before else ""
        return f"{self.about}: {show(self.after)} in B, {show(self.before)} in A ({show(abs(more))} {word}{share})."

    def to_json(self) -> dict[str, Any]:
        fields = ("what", "before", "after", "more", "why")
        causes = [{name: getattr(cause, name) for name in fields} for cause in self.causes]
        return {name: getattr(self, name) for name in ("about", "unit", *fields[1:4])} | {"causes": causes}

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  {cause}" for cause in self.causes)])


def explain(before: PlanData, after: PlanData) -> tuple[Explanation, ...]:
    """Explains the difference in step time and memory between two plans, given as `Plan.to_json` data.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> full, none = (make_plan(job, "v5p:2x2x2", Setup(mesh="fsdp:8", remat=remat)) for remat in ("full", "none"))
        >>> time, memory = explain(full.to_json(), none.to_json())
        >>> memory.causes[0].what, memory.causes[0].more > 0
        ('activations', True)
    """
    made = []
    if before["time"] is not None and after["time"] is not None:
        causes = _ordered(_time(before, after), "s")
        made.append(Explanation("step time", _seconds(before, "step"), _seconds(after, "step"), "s", causes))
    old, new = (float(plan["memory"]["total"]) for plan in (before, after))
    made.append(Explanation("memory per device", old, new, "bytes", _ordered(_memory(before, after), "bytes")))
    return tuple(made)


def band_of(plan: PlanData) -> str:
    """Returns the band of a plan's step time; "" if it has none.

    >>> band_of({"time": {"step": {"value": 1.0}, "error": 0.25}}), band_of({"time": None})
    ('800 ms to 1.25 s', '')
    """
    error = (plan["time"] or {}).get("error")
    if not error:
        return ""
    step = _seconds(plan, "step")
    return f"{duration(step / (1 + error))} to {duration(step * (1 + error))}"


def signed(value: float, unit: str) -> str:
    """Formats an amount with its sign.

    >>> signed(-0.25, "s"), signed(2.0**20, "bytes")
    ('-250 ms', '+1.0 MiB')
    """
    return ("+" if value >= 0 else "-") + SHOW[unit](abs(value))


def _ordered(causes: Iterable[CostChange], unit: str) -> tuple[CostChange, ...]:
    """Sorts causes by size, the largest first, and adds up the small ones as the last."""
    # Rounding errors are not a cause.
    real = [cause for cause in causes if abs(cause.more) > 1e-9 * max(abs(cause.before), abs(cause.after))]
    found = sorted(real, key=lambda cause: -abs(cause.more))
    large = [cause for cause in found if abs(cause.more) >= _SMALL * abs(found[0].more)]
    small = found[len(large) :]
    if len(small) > 1:
        totals = [math.fsum(getattr(cause, side) for cause in small) for side in ("before", "after")]
        names = ", ".join(cause.what for cause in small)
        return (*large, CostChange("other causes", totals[0], totals[1], names, unit))
    return tuple(found)


def _time(before: PlanData, after: PlanData) -> list[CostChange]:
    sides = (before, after)
    again = [_recomputing(plan) for plan in sides]
    own = [_seconds(plan, "matmul") - spent for plan, spent in zip(sides, again, strict=True)]
    if _runs_alike(before, after):
        # The model's own matmuls are then equal; recomputed ones may be attention, which is slower than the average.
        own = [own[0] if again[0] <= again[1] else own[1]] * 2
        again = [_seconds(plan, "matmul") - spent for plan, spent in zip(sides, own, strict=True)]
    names = ("memory", "optimizer", "bubble", "fixed")
    between, update, bubble, fixed = ([_seconds(plan, name) for plan in sides] for name in names)
    policies = [f"remat={plan['setup'].get('remat', 'none')}" for plan in sides]
    parted = [
        ", ".join([policy, *_pieces(plan), *pipeline_words(plan.get("pipeline", {}))])
        for policy, plan in zip(policies, sides, strict=True)
    ]
    meshes = [str(plan["setup"]["mesh"]) for plan in sides]
    ticks = [str(plan["time"]["bubble"]["note"]) for plan in sides]
    peaks, reads = (_machines(before, after, show) for show in (_peak_words, _bandwidth_words))
    parts = (
        ("recomputation", again, "the backward pass recomputes for ", _joined(policies, peaks)),
        ("model matmuls", own, "they take ", _joined(meshes, peaks)),
        (
            "memory traffic",
            between,
            "reads and writes between matmuls, and the start of kernels, take ",
            _joined(parted, reads),
        ),
        ("optimizer", update, "the update takes ", _joined(meshes, reads)),
        ("pipeline bubble", bubble, "stages are idle for ", ticks),
        ("between steps", fixed, "the host takes ", meshes),
    )
    causes = [_cause(what, spent, words + _each(spent, notes), "s") for what, spent, words, notes in parts]
    return [*causes, *_waiting(before, after)]


def _pieces(plan: PlanData) -> list[str]:
    count = plan["setup"].get("num_minibatches", 1)
    return [plural(count, "minibatch")] if count > 1 else []


def _machines(before: PlanData, after: PlanData, show: Callable[[PlanData], str]) -> list[str]:
    """Returns what distinguishes the machines of two plans: their chips, or else their shapes; "" if they are equal."""
    names = [str(plan["target"]["name"]) for plan in (before, after)]
    if names[0] == names[1]:
        return ["", ""]
    kinds = [name.partition(":")[0] for name in names]
    return names if kinds[0] == kinds[1] else [show(plan) for plan in (before, after)]


def _peak_words(plan: PlanData) -> str:
    name, count = str(plan["target"]["name"]), plan["target"]["devices"]
    chip = chip_of(name.partition(":")[0])
    peak = None if chip is None else chip.peak("float32" if plan["setup"].get("precision") == "float32" else "bfloat16")
    return name + (f", {count} x {peak / 1e12:,.0f} TFLOP/s" if peak else "")


def _bandwidth_words(plan: PlanData) -> str:
    name, count = str(plan["target"]["name"]), plan["target"]["devices"]
    chip = chip_of(name.partition(":")[0])
    return name + (f", {count} x {chip.memory_bandwidth / 1e9:,.0f} GB/s" if chip else "")


def _joined(notes: Sequence[str], machines: Sequence[str]) -> list[str]:
    return [f"{note} on {machine}" if machine else note for note, machine in zip(notes, machines, strict=True)]


def _runs_alike(before: PlanData, after: PlanData) -> bool:
    """Whether two plans run the same matmuls, apart from those that are recomputed."""

    def model(plan: PlanData) -> tuple[Any, ...]:
        setup = plan["setup"]
        return (plan["target"]["name"], plan["tokens_per_step"], setup["mesh"], setup.get("precision"))

    return model(before) == model(after) and before["flops"]["model"] == after["flops"]["model"]


def _cause(what: str, values: Sequence[float], why: str, unit: str) -> CostChange:
    return CostChange(what, values[0], values[1], why, unit)


def _recomputing(plan: PlanData) -> float:
    flops = plan["flops"]
    return _seconds(plan, "matmul") * flops["recomputed"] / flops["matmul"] if flops["matmul"] else 0.0


def _waiting(before: PlanData, after: PlanData) -> list[CostChange]:
    """Returns a cause for each axis and kind of transfer, and one for communication that exceeds all compute."""
    groups = [_by_link(plan) for plan in (before, after)]
    causes = []
    for axis, kind in groups[0] | groups[1]:
        found = [group.get((axis, kind), []) for group in groups]
        spent = [math.fsum(_wait(item) for item in items) for items in found]
        why = "devices wait for " + _each(spent, [_sent_words(items) for items in found])
        causes.append(_cause(f"{kind} over {axis}", spent, why, "s"))
    known = [math.fsum(_wait(item) for item in plan["sent"]) for plan in (before, after)]
    over = [_seconds(plan, "exposed") - spent for plan, spent in zip((before, after), known, strict=True)]
    why = "communication that could overlap exceeds all compute by " + _each(over, ["", ""])
    return [*causes, _cause("busy links", over, why, "s")]


def _by_link(plan: PlanData) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in plan["sent"]:
        found.setdefault((item["axis"], item["kind"]), []).append(item)
    return found


def _wait(item: Mapping[str, Any]) -> float:
    return float((item["seconds"] or 0.0) * (1 - item["hidden"]))


def _sent_words(items: list[Mapping[str, Any]]) -> str:
    if not items:
        return ""
    size = math.fsum(item["wire_bytes"] for item in items)
    hidden = math.fsum(item["wire_bytes"] * item["hidden"] for item in items) / size if size else 1.0
    return f"{format_bytes(size)} over {items[0]['link'].partition(' (')[0]}, {percent(hidden)} hidden"


def _memory(before: PlanData, after: PlanData) -> list[CostChange]:
    sides = [{part["name"]: part for part in plan["memory"]["parts"]} for plan in (before, after)]
    ways = [_ways(plan) for plan in (before, after)]
    causes = []
    for name in sides[0] | sides[1]:
        sizes = [float(side[name]["bytes"]) if name in side else 0.0 for side in sides]
        if name in ("parameters", "optimizer"):
            # ZeRO-1 shards the optimizer state over one more axis.
            zeros = [plan["setup"].get("zero_axis") if name == "optimizer" else None for plan in (before, after)]
            notes = [
                ("replicated" if count == 1 else f"{count} shards") + (f", ZeRO-1 over {zero}" if zero else "")
                for count, zero in zip(ways, zeros, strict=True)
            ]
        else:
            notes = [str(side[name]["note"]) if name in side else "" for side in sides]
        why = _each(sizes, notes, format_bytes) + _kinds([side.get(name, {}).get("split", {}) for side in sides])
        causes.append(_cause(name, sizes, why, "bytes"))
    # If the compiler rejected a program as too large, the parts do not add up to its total.
    totals = [plan["memory"]["total"] for plan in (before, after)]
    known = [math.fsum(part["bytes"] for part in side.values()) for side in sides]
    rest = [total - size for total, size in zip(totals, known, strict=True)]
    if any(abs(size) > 1 for size in rest):
        causes.append(_cause("unattributed", rest, _each(rest, ["", ""], format_bytes), "bytes"))
    return causes


def _kinds(splits: list[dict[str, float]]) -> str:
    """Returns the two kinds of layer with the largest differences, in words."""
    more = {kind: splits[1].get(kind, 0.0) - splits[0].get(kind, 0.0) for kind in splits[0] | splits[1]}
    largest = [kind for kind in sorted(more, key=lambda kind: -abs(more[kind])) if abs(more[kind]) >= 1][:2]
    return "; from " + ", ".join(f"{kind} {signed(more[kind], 'bytes')}" for kind in largest) if largest else ""


def _ways(plan: PlanData) -> int:
    """Returns the largest number of shards that a mesh splits a parameter into."""
    sizes = dict(part.split("@")[0].split(":") for part in plan["setup"]["mesh"].split(","))
    return math.prod(int(size) for axis, size in sizes.items() if axis != "dp")


def _each(values: list[float], notes: list[str], show: Callable[[float], str] = duration) -> str:
    """Returns the value of each plan with its note, or with one note if it is the same."""
    shown = [show(value) for value in values]
    notes = [note if value else "" for value, note in zip(values, notes, strict=True)]
    if notes[0] == notes[1]:
        said = f"{shown[1]} in B, {shown[0]} in A"
        return f"{said} ({notes[0]})" if notes[0] else said
    parts = [f"{value} in {letter}" for value, letter in zip(shown, "AB", strict=True)]
    first, second = (f"{part} ({note})" if note else part for part, note in zip(parts, notes, strict=True))
    return f"{second}, {first}"


def _seconds(plan: PlanData, name: str) -> float:
    return float(plan["time"].get(name, {"value": 0.0})["value"])  # older plans lack some parts
