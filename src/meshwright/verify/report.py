"""What `verify` found: data, which prints as a table with the likely cause of what differs."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.errors import MeshwrightError
from meshwright.layout.leaf import rich_table, text_table
from meshwright.verify.causes import Cause, guilty_axes
from meshwright.verify.compare import GROWTH, Comparison

Verdict = Literal["equal", "different", "failed", "skipped"]

HEADINGS = ("mesh", "view", "minibatches", "initial", "loss", "gradients", "parameters", "verdict")
STAGES = ("initial parameters", "loss", "gradients", "parameters")


@dataclass(frozen=True)
class Case:
    """One mesh in one view, compared with one device.

    Args:
        comparisons: initial parameters, loss, gradients, and parameters after the steps, in this order.
        causes: what probably makes it differ, the most specific first.
        message: why it failed or was skipped.
    """

    mesh: str
    view: str
    num_minibatches: int
    verdict: Verdict
    comparisons: tuple[Comparison, ...] = ()
    causes: tuple[Cause, ...] = ()
    message: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh's axes and their sizes."""
        return {name: int(size) for name, _, size in (axis.partition(":") for axis in self.mesh.split(","))}

    def __getitem__(self, what: str) -> Comparison:
        return next(comparison for comparison in self.comparisons if comparison.what == what)

    def row(self) -> tuple[str, ...]:
        """Returns the case as a row of the table: the largest relative errors, and the verdict."""
        cells = {comparison.what: _cell(comparison) for comparison in self.comparisons}
        verdict = self.verdict if self.verdict in ("equal", "skipped") else self.verdict.upper()
        return (
            self.mesh,
            self.view,
            str(self.num_minibatches),
            *(cells.get(what, "-") for what in STAGES),
            verdict,
        )

    def text(self) -> str:
        """Returns all there is to say about a case that is not equal."""
        minibatches = f", {self.num_minibatches} minibatches" if self.num_minibatches > 1 else ""
        lines = [f"{self.mesh}, {self.view} view{minibatches}: {self.verdict}"]
        if self.message:
            lines.append(textwrap.indent(self.message, "  "))
        first = next((comparison for comparison in self.comparisons if not comparison.ok), None)
        if first is not None:
            lines += [f"  {line}" for line in _difference(first)]
        for number, cause in enumerate(self.causes):
            lines += [f"  {'also' if number else 'likely cause'}: {cause.text}", f"  fix: {cause.fix}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class VerifyReport:
    """All cases; `ok` where those compared are equal, and there are some."""

    cases: tuple[Case, ...]
    tolerance: float
    num_steps: int
    num_leaves: int
    num_rows: int

    @property
    def ok(self) -> bool:
        return any(case.verdict == "equal" for case in self.cases) and all(
            case.verdict in ("equal", "skipped") for case in self.cases
        )

    def require(self) -> None:
        """Raises `MeshwrightError`, with the whole report as its text, unless everything compared is equal."""
        if not self.ok:
            raise MeshwrightError(f"the sharded step is not the one of a single device.\n{self}")

    def table(self) -> str:
        """Returns one row per case, as text."""
        return text_table(HEADINGS, [case.row() for case in self.cases])

    def summary(self) -> str:
        """Returns the outcome in one line."""
        counts = Counter(case.verdict for case in self.cases)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
        s, after = ("", "") if self.num_steps == 1 else ("s", f", {GROWTH * self.tolerance:g} after the steps")
        return (
            f"{told or 'nothing was compared'}; {self.num_leaves} parameters, {self.num_rows} rows, {self.num_steps} "
            f"step{s}, relative errors up to {self.tolerance:g} allowed{after}"
        )

    def details(self) -> str:
        """Returns what there is to say about the cases that are not equal."""
        told: dict[str, list[Case]] = {}
        for case in self.cases:
            if case.verdict == "skipped":
                told.setdefault(case.message, []).append(case)
        parts = [
            f"skipped {', '.join(dict.fromkeys(case.mesh for case in cases))}: {reason}"
            for reason, cases in told.items()
        ]
        bad = [case for case in self.cases if case.verdict in ("different", "failed")]
        parts += [case.text() for case in bad]
        compared = [(case.sizes, case.verdict == "equal") for case in self.cases if case.verdict != "skipped"]
        axes = guilty_axes(compared)
        if axes:
            named = " and ".join(f"`{axis}`" for axis in axes)
            parts.append(f"every mesh that differs has {named}, and no mesh that agrees: look at what is done over it.")
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [f"{self.table()}\n{self.summary()}", self.details()]))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        table = rich_table(HEADINGS, [case.row() for case in self.cases], title="verify", caption=self.summary())
        return Group(table, Text(self.details()))

    def to_json(self) -> str:
        """Returns the report as JSON; numbers that are not finite are strings."""
        return json.dumps(_plain({"ok": self.ok, **dataclasses.asdict(self)}), indent=1)


def _plain(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {key: _plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(item) for item in thing]
    return str(thing) if isinstance(thing, float) and not math.isfinite(thing) else thing


def _cell(comparison: Comparison) -> str:
    if comparison.what == "initial parameters" and comparison.ok:
        return "bitwise"
    return f"{comparison.error:.1e}{'' if comparison.ok else ' !'}"


def _difference(comparison: Comparison) -> list[str]:
    leaf = comparison.first
    assert leaf is not None
    if comparison.what == "loss":
        lines = [f"loss: one device has {leaf.reference:.9g}, the mesh {leaf.measured:.9g}"]
    else:
        count = f"{comparison.num_different} of {comparison.num_leaves} leaves differ"
        lines = [f"{comparison.what}: {count}, the first at {leaf}"]
    bits = ", all bits must be the same" if comparison.tolerance == 0 else f", {comparison.tolerance:g} allowed"
    lines.append(f"relative error {leaf.error:.3g}{bits}")
    if leaf.ratio is not None:
        lines.append(f"mesh over one device: {leaf.ratio}")
    return lines
