"""The report of `verify`: data that prints as a table, with the likely cause of each difference."""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshwright.errors import MeshwrightError
from meshwright.layout.leaf import rich_table, text_table
from meshwright.verify.compare import GROWTH, Comparison
from meshwright.verify.diagnose.causes import Cause, guilty_axes

Verdict = Literal["equal", "different", "failed", "skipped"]

STAGES = ("initial parameters", "loss", "gradients", "parameters", "metrics", "model state")
OPTIONAL = ("metrics", "model state")  # only shown if a case has them


@dataclass(frozen=True)
class Case:
    """One mesh in one view, compared with one device.

    Args:
        comparisons: initial parameters, loss, gradients, and parameters after the steps, in this order; then metrics of
            the first step and the model state after the steps, if the job has them.
        causes: likely causes of the difference, most specific first.
        message: the reason if the case failed or was skipped.
        refused: whether the case failed because the job cannot run like this, not because its code is wrong.
        notes: costs that XLA adds in the global view, with their source lines; they do not change the results.
    """

    mesh: str
    view: str
    num_minibatches: int
    verdict: Verdict
    comparisons: tuple[Comparison, ...] = ()
    causes: tuple[Cause, ...] = ()
    message: str = ""
    refused: bool = False
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh's axes and their sizes."""
        return {name: int(size) for name, _, size in (axis.partition(":") for axis in self.mesh.split(","))}

    def __getitem__(self, what: str) -> Comparison:
        return next(comparison for comparison in self.comparisons if comparison.what == what)

    def row(self, stages: Sequence[str] = STAGES) -> tuple[str, ...]:
        """Returns the case as a row of the table: the largest relative error of each stage, and the verdict."""
        found = {comparison.what: _cell(comparison) for comparison in self.comparisons}
        verdict = self.verdict if self.verdict in ("equal", "skipped") else self.verdict.upper()
        cells = (found.get(what, "-") for what in stages)
        return (self.mesh, self.view, str(self.num_minibatches), *cells, verdict)

    def text(self) -> str:
        """Returns the details of a case that differs or failed."""
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
    """All cases of a `verify` call.

    Args:
        notes: differences that the batch cannot show; see `verify.blind_spots`.
    """

    cases: tuple[Case, ...]
    tolerance: float
    num_steps: int
    num_leaves: int
    num_rows: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether at least one case was compared and all compared cases are equal."""
        return {case.verdict for case in self.cases} in ({"equal"}, {"equal", "skipped"})

    def require(self) -> None:
        """Raises a `MeshwrightError` with the whole report unless `ok`."""
        if not self.ok:
            raise MeshwrightError(f"the sharded step differs from the single-device step.\n{self}")

    def table(self) -> str:
        """Returns one row per case, as text."""
        return text_table(*self._table())

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        known = {comparison.what for case in self.cases for comparison in case.comparisons}
        stages = [what for what in STAGES if what not in OPTIONAL or what in known]
        headings = ("mesh", "view", "minibatches", "initial", *stages[1:], "verdict")
        return headings, [case.row(stages) for case in self.cases]

    def summary(self) -> str:
        """Returns the outcome in one line."""
        counts = Counter(case.verdict for case in self.cases)
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
        s, after = ("", "") if self.num_steps == 1 else ("s", f" ({GROWTH * self.tolerance:g} after the last step)")
        return (
            f"{shown or 'nothing was compared'}; {self.num_leaves} parameters, {self.num_rows} rows, {self.num_steps} "
            f"step{s}, relative tolerance {self.tolerance:g}{after}"
        )

    def details(self) -> str:
        """Returns the reasons for skipped, different and failed cases."""
        skipped: dict[str, dict[str, None]] = {}
        for case in self.cases:
            if case.verdict == "skipped":
                skipped.setdefault(case.message, {})[case.mesh] = None
        parts = [f"note: {note}" for note in self.notes]
        parts += [f"skipped {', '.join(meshes)}: {reason}" for reason, meshes in skipped.items()]
        parts += [case.text() for case in self.cases if case.verdict in ("different", "failed")]
        noted: dict[str, dict[str, None]] = {}
        for case in self.cases:
            for note in case.notes:
                noted.setdefault(note, {})[case.mesh] = None
        parts += [f"note ({', '.join(meshes)}, global view): {note}" for note, meshes in noted.items()]
        axes = guilty_axes([(case.sizes, case.verdict == "equal") for case in self.cases if case.verdict != "skipped"])
        if axes:
            named = " and ".join(f"`{axis}`" for axis in axes)
            parts.append(
                f"every mesh that differs has {named}, and no mesh that agrees does: check the code that uses it."
            )
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [f"{self.table()}\n{self.summary()}", self.details()]))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        table = rich_table(*self._table(), title="verify", caption=self.summary())
        return Group(table, Text(self.details()))

    def to_json(self) -> str:
        """Returns the report as JSON; non-finite numbers become strings."""
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
        lines = [f"loss: {leaf.reference:.9g} on one device, {leaf.measured:.9g} on the mesh"]
    else:
        count = f"{comparison.num_different} of {comparison.num_leaves} leaves differ"
        lines = [f"{comparison.what}: {count}, first {leaf}"]
    allowed = "must be bitwise equal" if comparison.tolerance == 0 else f"tolerance {comparison.tolerance:g}"
    lines.append(f"relative error {leaf.error:.3g} ({allowed})")
    if leaf.ratio is not None:
        lines.append(f"ratio of the mesh to one device: {leaf.ratio}")
    return lines
