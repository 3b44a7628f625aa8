"""The report section on predictions: an image grid or a table, before and after training."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from meshwright.loop.report.run_record import RunRecord, step_of
from meshwright.loop.results.predict import Column, PredictionTable, read_table
from meshwright.pages import Markup, Picture, Section, fold, image_grid, join, prose, side_by_side, table, tag


def predictions_section(run: RunRecord) -> Section | None:
    """Returns the first and last predictions of a job, or None if there are none."""
    events = run.happened("prediction")
    if not events:
        return None
    shown = [events[0]] if len(events) == 1 else [events[0], events[-1]]
    parts = [_part(run, event) for event in shown]
    said = "The job's predictions for the first rows of a batch, the same rows each time."
    has_images = any("<img" in part for part in parts)
    body = side_by_side(*parts) if has_images else join(parts)
    return Section("Predictions", join([prose(said), body]))


def _part(run: RunRecord, event: dict[str, Any]) -> Markup:
    step = step_of(event) or 0
    label = "Before training" if step == 0 else f"After {step:,} {'step' if step == 1 else 'steps'}"
    found = read_table(run.folder / str(event.get("file", "")))
    if found is None:
        return join([tag("h3", label), tag("p", f"Cannot read {event.get('file')}.", class_="note")])
    rows, which = found
    right = rows.num_right
    count = len(rows.outputs[0].values) if rows.outputs else 0
    unit = which if right is None else f"{right} of {count} right, {which}"
    images = next((column for column in (*rows.inputs, *rows.outputs) if column.kind == "image"), None)
    if images is None:
        return join([tag("h3", label), tag("p", unit, class_="note"), _table(rows)])
    parts = [image_grid(label, _pictures(rows, images), unit=unit)]
    for column in rows.outputs:
        if column.kind == "image" and column is not images:
            parts.append(image_grid(f"{label}: {column.name}", [Picture(_png(png), "") for png in column.values]))
    if rows.predicted is None or len(rows.outputs) > 1:
        parts.append(fold("Outputs", _table(rows)))
    return tag("div", *parts)


def _pictures(rows: PredictionTable, images: Column) -> list[Picture]:
    pictures = []
    for index, png in enumerate(images.values):
        caption, good = "", None
        if rows.predicted is not None:
            caption = rows.predicted[index]
            if rows.true is not None:
                good = rows.predicted[index] == rows.true[index]
                caption += "" if good else f", true {rows.true[index]}"
        pictures.append(Picture(_png(png), caption, good))
    return pictures


def _table(rows: PredictionTable) -> Markup:
    columns = [(column.name, column.values) for column in rows.inputs if column.kind == "text"]
    columns += [(f"predicted {column.name}", column.values) for column in rows.outputs if column.kind == "text"]
    if rows.predicted is not None and rows.true is not None:
        signs = ["✓" if a == b else "✕" for a, b in zip(rows.predicted, rows.true, strict=True)]
        columns.append(("right", signs))
    lines = [list(line) for line in zip(*(values for _, values in columns), strict=True)]
    return table([name for name, _ in columns], lines, code=range(len(columns)))


def _png(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
