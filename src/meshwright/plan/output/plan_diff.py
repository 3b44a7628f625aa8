"""Comparison of two plans, figure by figure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.bounded_reader import read_json
from meshwright.errors import ConfigError, FileFormatError, MeshwrightError
from meshwright.pages import plural
from meshwright.plan.output.explain import SHOW, Explanation, PlanData, band_of, explain
from meshwright.plan.output.setup_words import assignments, counted
from meshwright.plan.output.summary import PART_NAMES, PARTS, Summary, Table
from meshwright.plan.plan import Plan
from meshwright.plan.step_setup import Setup

_WRITE = "write one with: meshwright plan ... --json > FILE"


@dataclass(frozen=True)
class Change:
    """One figure of two plans; `before` or `after` is None if that plan does not have it."""

    group: str
    name: str
    before: float | None
    after: float | None
    unit: str

    @property
    def differs(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans, with their causes; `str(diff)` has sentences and tables."""

    before: PlanData
    after: PlanData
    changes: tuple[Change, ...]

    @property
    def differs(self) -> bool:
        return any(change.differs for change in self.changes)

    @property
    def titles(self) -> tuple[str, str]:
        """One line about each plan."""
        return _title(self.before), _title(self.after)

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """The causes of the differences in time and memory."""
        return explain(self.before, self.after)

    def why(self) -> Summary:
        """Returns both titles and the explanations, for a terminal."""
        head = "\n".join(f"{letter}: {title}" for letter, title in zip("AB", self.titles, strict=True))
        return Summary((head, *map(str, self.explanations)))

    def summary(self) -> Summary:
        """Returns `why()` and tables of all figures, for a terminal."""
        why = self.why()
        if not self.differs:
            return Summary((why.parts[0], "no figure differs"))
        groups = dict.fromkeys(change.group for change in self.changes)
        tables: list[str | Table] = []
        for group in groups:
            rows = tuple(_row(change) for change in self.changes if change.group == group)
            tables.append(Table(group, ("", "A", "B", "B - A", ""), rows, (1, 2, 3, 4)))
        return Summary((*why.parts, *tables))

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.titles[0],
            "after": self.titles[1],
            "explanations": [one.to_json() for one in self.explanations],
            "changes": [dataclasses.asdict(change) for change in self.changes],
        }

    def __str__(self) -> str:
        return str(self.summary())

    def __rich__(self) -> Any:
        return self.summary().__rich__()


def diff_plans(before: Plan | PlanData, after: Plan | PlanData) -> PlanDiff:
    """Compares two plans, given as `Plan` or as `Plan.to_json` data.

    Example:
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.plan.step_setup import Setup
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> whole, split = (make_plan(job, "cpu:8", Setup(mesh=mesh)) for mesh in ("dp:8", "fsdp:8"))
        >>> changes = {change.name: change for change in diff_plans(whole, split).changes}
        >>> changes["optimizer"].before / changes["optimizer"].after > 6
        True
    """
    old, new = (plan.to_json() if isinstance(plan, Plan) else plan for plan in (before, after))
    changes = [*_memory(old, new), *_sent(old, new), *_time(old, new), *_money(old, new)]
    return PlanDiff(old, new, tuple(changes))


def read_plan(path: str | Path) -> PlanData:
    """Reads a plan from a file written by `meshwright plan --json`; from a search, its best plan.

    Example:
        >>> import json, tempfile
        >>> from meshwright.models import Decoder
        >>> from meshwright.plan.plan import make_plan
        >>> from meshwright.train import language_job
        >>> job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)
        >>> path = Path(tempfile.mkdtemp()) / "plan.json"
        >>> _ = path.write_text(json.dumps(make_plan(job, "cpu:8", Setup(mesh="dp:8")).to_json()))
        >>> read_plan(path)["setup"]
        {'mesh': 'dp:8'}
    """
    try:
        data = read_json(path, object)
    except (OSError, FileFormatError) as error:
        raise MeshwrightError(f"cannot read {path} as a plan: {str(error).rstrip('.')}.", hint=_WRITE) from None
    if isinstance(data, dict) and isinstance(data.get("plans"), list):
        if not data["plans"]:
            raise MeshwrightError(f"{path} holds a search that found no plan.", hint=_WRITE)
        data = data["plans"][0]
    if not isinstance(data, dict) or not {"target", "setup", "memory", "sent"} <= data.keys():
        raise MeshwrightError(f"{path} does not hold a plan.", hint=_WRITE)
    try:  # read every field that a comparison uses
        changed = diff_plans(data, data)
        changed.to_json()
        for change in changed.changes:
            _row(change)
    except KeyError as error:
        raise MeshwrightError(f"the plan in {path} has no {error}.", hint=_WRITE) from None
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise MeshwrightError(f"the plan in {path} is malformed: {error}.", hint=_WRITE) from None
    return data


def parse_setup(text: str, base: Setup) -> Setup:
    """Parses a setup in the form of `str(setup)`: a mesh, then the options that differ from `base`.

    Example:
        >>> str(parse_setup("fsdp:8 remat=full num_minibatches=2", Setup(mesh="dp:8", sync="once")))
        'fsdp:8 remat=full num_minibatches=2 sync=once'
    """
    if not text.strip() or text.strip().endswith(".json"):
        raise MeshwrightError(
            f"{text!r} is neither a file nor a setup.",
            hint='pass a setup like "fsdp:32,tp:4 remat=full", or a file written by `meshwright plan --json`.',
        )
    mesh, *words = text.split()
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = {"minibatches": "num_minibatches", "batch_size": "rows", "microbatches": "num_microbatches"}.get(
            name, name
        )
        if not equals or name not in (field.name for field in dataclasses.fields(Setup)):
            raise MeshwrightError(
                f"{word!r} in {text!r} is not a setup option, and no file has that name.",
                hint='pass a setup like "fsdp:32,tp:4 remat=full", or a file written by `meshwright plan --json`.',
            )
        value = value.removeprefix("=")  # "remat==full", as constraints may be written
        changes[name] = tuple(value.split(",")) if name == "pad" else _value(name, value, word)
    return dataclasses.replace(base, mesh=mesh, **changes)


def _value(name: str, text: str, word: str) -> Any:
    if name == "overlap":
        if text.lower() not in ("true", "false"):
            raise MeshwrightError(f"{word!r} is neither true nor false.", hint=f"write e.g. {name}=false.")
        return text.lower() == "true"
    if name == "view" and text == "auto":
        return None
    counts = dict.fromkeys(("rows", "num_minibatches", "num_microbatches", "pipeline_rounds"), int)
    kind = {**counts, "clip": float}.get(name, str)
    try:
        value = kind(text)
    except ValueError:
        raise MeshwrightError(f"{word!r} is not a number.", hint=f"write e.g. {name}=2.") from None
    if isinstance(value, int) and value < 1:
        raise ConfigError(f"{word!r} is less than 1.", hint=f"write e.g. {name}=2.")
    return value


def _memory(old: PlanData, new: PlanData) -> list[Change]:
    parts = [_by_name(plan["memory"]["parts"]) for plan in (old, new)]
    group = f"Memory per device ({_both(old['memory']['basis'], new['memory']['basis'])})"
    return [*_bytes(group, *parts), Change(group, "total", old["memory"]["total"], new["memory"]["total"], "bytes")]


def _bytes(group: str, old: dict[str, float], new: dict[str, float]) -> list[Change]:
    return [Change(group, name, old.get(name, 0.0), new.get(name, 0.0), "bytes") for name in old | new]


def _by_name(parts: list[PlanData]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        found[part["name"]] = float(part["bytes"])
        found |= {f"{part['name']} from {kind}": float(size) for kind, size in part.get("split", {}).items()}
    return found


def _sent(old: PlanData, new: PlanData) -> list[Change]:
    def by_kind(plan: PlanData) -> dict[str, float]:
        found: dict[str, float] = {}
        for item in plan["sent"]:
            name = f"{item['kind']} over {item['axis']}"
            found[name] = found.get(name, 0.0) + item["wire_bytes"]
        return found

    def exposed(plan: PlanData) -> float:
        return math.fsum(item["wire_bytes"] * (1 - item["hidden"]) for item in plan["sent"])

    kinds = [by_kind(plan) for plan in (old, new)]
    bases = [dict.fromkeys(item["basis"] for item in plan["sent"]) for plan in (old, new)]
    group = f"Communication per device and step ({_both(*(' and '.join(basis) or 'nothing' for basis in bases))})"
    total = Change(group, "total", sum(kinds[0].values()), sum(kinds[1].values()), "bytes")
    return [*_bytes(group, *kinds), total, Change(group, "exposed", exposed(old), exposed(new), "bytes")]


def _time(old: PlanData, new: PlanData) -> list[Change]:
    if old["time"] is None or new["time"] is None:
        return []
    group = "Time per step (assumed)"
    found = [
        Change(group, PART_NAMES.get(name, name), _seconds(old, name), _seconds(new, name), "s")
        for name in (*PARTS, "step")
        if _seconds(old, name) or _seconds(new, name)
    ]
    found.append(Change(group, f"{_unit(old, new)}/s", old["tokens_per_second"], new["tokens_per_second"], "1/s"))
    return [*found, Change(group, "MFU", old["mfu"], new["mfu"], "share")]


def _money(old: PlanData, new: PlanData) -> list[Change]:
    """Returns the prices and the goodput of plans that have them."""
    group = "Price and goodput (assumed)"
    price, other_price = (plan.get("dollars_per_billion_tokens") for plan in (old, new))
    share, other_share = ((plan.get("goodput") or {}).get("goodput") for plan in (old, new))
    found = (
        Change(group, f"price per billion {_unit(old, new)}", price, other_price, "$"),
        Change(group, "goodput with failures", share, other_share, "share"),
    )
    return [change for change in found if change.before is not None or change.after is not None]


def _unit(old: PlanData, new: PlanData) -> str:
    units = {counted(plan["rows"], plan["tokens_per_step"]) for plan in (old, new)}
    return "rows" if units == {"rows"} else "tokens"


def _seconds(plan: PlanData, name: str) -> float:
    value = float(plan["time"][name]["value"])
    return value if value > 1e-9 else 0.0  # drops rounding errors


def _both(one: str, other: str) -> str:
    return one if one == other else f"A {one}, B {other}"


def _title(plan: PlanData) -> str:
    words = " ".join([plan["setup"]["mesh"], *assignments(plan["setup"])])
    band = band_of(plan)
    verdict = plan["memory"]["verdict"] + (f" A step takes {band}." if band else "")
    return f"{words}, {plural(plan['rows'], 'row')} on {plan['target']['title']}: {verdict}"


def _row(change: Change) -> tuple[str, ...]:
    show = SHOW[change.unit]
    before, after = ("-" if value is None else show(value) for value in (change.before, change.after))
    if change.before is None or change.after is None or not change.differs:
        return change.name, before, after, "", ""
    more = change.after - change.before
    sign = "+" if more > 0 else "-"
    share = f"{sign}{abs(more) / change.before:.1%}" if change.before else "new"
    return change.name, before, after, sign + show(abs(more)), share
