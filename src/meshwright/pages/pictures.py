"""Images and heat maps, drawn without any other package."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.pages.blocks import table
from meshwright.pages.figure import figure, nothing
from meshwright.pages.grids import shown
from meshwright.pages.markup import Markup, join, tag
from meshwright.pages.numbers import Show, number

MAX_CELLS, MAX_LABELED = 40, 16
_CELL = 34


def encode_png(pixels: bytes, *, width: int, height: int, channels: int) -> bytes:
    """Returns an 8-bit PNG file of pixels in rows, with 1 (gray) or 3 (red, green, blue) values each.

    Example:
        >>> encode_png(bytes([0, 255]), width=2, height=1, channels=1)[:8]
        b'\\x89PNG\\r\\n\\x1a\\n'
    """
    line = width * channels
    assert len(pixels) == line * height
    assert channels in (1, 3)
    # Every line begins with its filter: none.
    raw = b"".join(b"\0" + pixels[start : start + line] for start in range(0, len(pixels), line))
    head = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(raw, 9)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@dataclass(frozen=True)
class Picture:
    """A PNG image with its caption; `good` marks it as right or wrong, and None as neither."""

    png: bytes
    caption: str
    good: bool | None = None


def image_grid(title: str, pictures: Sequence[Picture], *, unit: str = "") -> Markup:
    """Returns images in rows, with a sign and their captions below.

    Example:
        >>> png = encode_png(bytes(4), width=2, height=2, channels=1)
        >>> html = image_grid("Digits", [Picture(png, "3", good=True)])
        >>> "data:image/png;base64," in html, "✓ 3" in html
        (True, True)
    """
    if not pictures:
        return nothing(title, unit)
    cells = []
    for one in pictures:
        source = f"data:image/png;base64,{base64.b64encode(one.png).decode()}"
        kind = "" if one.good is None else " right" if one.good else " wrong"
        sign = "" if one.good is None else "✓ " if one.good else "✕ "
        image = tag("img", src=source, alt=one.caption, width=96, height=96)
        cells.append(tag("li", image, tag("span", f"{sign}{one.caption}"), class_=f"picture{kind}"))
    return figure(title, unit=unit, body=tag("ul", *cells, class_="pictures"), kind="images")


def heat_map(title: str, rows: Sequence[Sequence[float]], *, unit: str = "", show: Show = number) -> Markup:
    """Returns a matrix as colored cells, darker for larger values; negative values have another color.

    Example:
        >>> html = heat_map("confusion", [[5, 1], [0, 6]])
        >>> html.count('class="cell"'), "row 1, column 1: 6" in html
        (4, True)
    """
    if not rows or not rows[0]:
        return nothing(title, unit)
    down, across = shown(len(rows), MAX_CELLS), shown(len(rows[0]), MAX_CELLS)
    largest = max((abs(value) for row in rows for value in row if math.isfinite(value)), default=0.0) or 1.0
    is_small = max(len(down), len(across)) <= MAX_LABELED
    longest = max(len(show(value)) for row in rows for value in row) if is_small else 0
    size = max(_CELL, 8 * longest + 8) if is_small else 14
    height = _CELL if is_small else 14
    left, top = 10 + 8 * len(str(len(rows) - 1)), 20
    parts: list[Markup] = []
    for j, column in enumerate(across):
        if is_small or (column is not None and column % 5 == 0):
            label = "…" if column is None else str(column)
            parts.append(tag("text", label, x=left + (j + 0.5) * size, y=top - 6, class_="tile-label"))
    for i, row in enumerate(down):
        if is_small or (row is not None and row % 5 == 0):
            label = "…" if row is None else str(row)
            parts.append(tag("text", label, x=left - 6, y=top + (i + 0.5) * height + 4, class_="tile-label end"))
        for j, column in enumerate(across):
            if row is not None and column is not None:
                at = (left + j * size, top + i * height, size, height)
                about = f"row {row}, column {column}"
                parts.append(_cell(rows[row][column], largest, at, about, show, is_small))
    width, tall = left + size * len(across) + 4, top + height * len(down) + 4
    label = f"{title}: {len(rows)} rows, {len(rows[0])} columns, largest value {show(largest)}"
    drawn = tag(
        "svg", tag("title", title), *parts,
        width=width, height=tall, viewBox=f"0 0 {width} {tall}", role="img", aria_label=label,
    )  # fmt: skip
    size_text = f"{len(rows)} x {len(rows[0])}"
    return figure(
        title, unit=", ".join(filter(None, [size_text, unit])), body=drawn, after=_values(rows, show), kind="tiles"
    )


def _cell(
    value: float, largest: float, at: tuple[int, int, int, int], about: str, show: Show, is_small: bool
) -> Markup:
    x, y, width, height = at
    share = min(1.0, abs(value) / largest) if math.isfinite(value) else 0.0
    box = tag(
        "rect", x=x, y=y, width=width - 1, height=height - 1,
        class_="tone-1" if value < 0 else "tone-0", fill_opacity=f"{share:.3f}",
    )  # fmt: skip
    text = None
    if is_small:
        strong = " strong" if share > 0.55 else ""
        text = tag("text", show(value), x=x + width / 2, y=y + height / 2 + 4, class_=f"cell-text{strong}")
    return tag("g", tag("title", f"{about}: {show(value)}"), box, text, class_="cell")


def _values(rows: Sequence[Sequence[float]], show: Show) -> Markup | None:
    if max(len(rows), len(rows[0])) > MAX_CELLS:
        return tag("p", f"Only {MAX_CELLS} rows and columns are shown; metrics.jsonl has all values.", class_="note")
    listed = [[index, *map(show, row)] for index, row in enumerate(rows)]
    shown_table = table(["", *range(len(rows[0]))], listed, right=range(len(rows[0]) + 1), sortable=False)
    return join([tag("details", tag("summary", "Numbers"), shown_table, class_="behind")])
