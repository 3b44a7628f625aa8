"""The matmuls of a run in fp8, with the dtypes in which they really run."""

from __future__ import annotations

from typing import Any

from meshwright.loop.report.run_record import RunRecord
from meshwright.pages import Section, fold, join, prose, table

_FIELDS = ("name", "pass", "dtypes", "how", "runs")


def matmuls_section(run: RunRecord) -> Section | None:
    """Returns the matmuls of the last compiled step in fp8, or None for other precisions."""
    told = run.happened("fp8")
    if not told:
        return None
    recorded = told[-1].get("matmuls")
    listed = recorded if isinstance(recorded, list) else []
    rows = [_row(item) for item in listed if isinstance(item, dict)]
    heads = ("Parameter", "Pass", "Dtypes", "How", "Runs per step")
    shown = fold(f"All {len(rows):,} kinds of matmuls", table(heads, rows, right=(4,), code=(0, 2))) if rows else None
    return Section("Matmuls", join([prose(str(told[-1].get("text", ""))), shown]))


def _row(item: dict[str, Any]) -> list[str]:
    return [str(item.get(name, "")) for name in _FIELDS]
