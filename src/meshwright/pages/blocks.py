"""What stands between the charts of a page: sentences, headline figures, tables, commands, texts side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.pages.markup import Markup, tag


@dataclass(frozen=True)
class Figure:
    """A headline number with what it is, and a remark."""

    label: str
    value: str
    remark: str = ""


def headline(figures: Sequence[Figure]) -> Markup:
    """Returns the few numbers that matter most, large."""
    tiles = []
    for one in figures:
        remark = tag("small", one.remark) if one.remark else None
        tiles.append(tag("div", tag("dt", one.label), tag("dd", tag("strong", one.value), remark)))
    return tag("dl", *tiles, class_="headline")


def prose(*sentences: object) -> Markup:
    """Returns sentences as one paragraph; empty ones are left out."""
    said = [sentence for sentence in sentences if sentence]
    spaced = [part for sentence in said for part in (" ", sentence)][1:]
    return tag("p", *spaced, class_="prose")


def side_by_side(*blocks: Markup) -> Markup:
    """Returns blocks beside each other where there is room, under each other where not."""
    return tag("div", *blocks, class_="columns")


def command(line: str, *, label: str) -> Markup:
    """Returns a command to copy; the button comes with the page's script."""
    return tag("div", tag("pre", tag("code", line), aria_label=label), class_="command", data_copy=label)


def quote(label: str, *, prompt: str, body: str) -> Markup:
    """Returns a text with its beginning set apart; a dot stands for each character that cannot be shown."""
    seen = "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in body)
    shown = tag("pre", tag("b", prompt), seen, class_="quote", dir="auto")
    return tag("div", tag("h3", label), shown)


def fold(summary: str, *blocks: object, opened: bool = False) -> Markup:
    """Returns something that opens on demand, or is open from the start."""
    return tag("details", tag("summary", summary), *blocks, class_="fold", open=opened)


def badge(state: str, *, kind: str) -> Markup:
    """Returns a word in a frame; `kind` is good, busy, warn or bad, each with a sign of its own."""
    signs = {"good": "✓", "busy": "▶", "warn": "■", "bad": "✕"}
    return tag("span", tag("span", signs[kind], aria_hidden="true"), f" {state}", class_=f"badge {kind}")


def table(
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    right: Iterable[int] = (),
    code: Iterable[int] = (),
    sortable: bool = True,
) -> Markup:
    """Returns a table that scrolls sideways on its own and sorts by a click on a heading.

    Args:
        right: the columns of numbers, which stand on the right.
        code: the columns whose text is code.
        sortable: whether headings are buttons that sort; numbers, also with units of bytes or time, sort as numbers.
    """
    numbers, codes = frozenset(right), frozenset(code)

    def cell(element: str, column: int, value: object) -> Markup:
        kinds = ["number"] * (column in numbers) + ["code"] * (column in codes and element == "td")
        return tag(element, value, class_=" ".join(kinds) or None, scope="col" if element == "th" else None)

    head = tag("tr", *(cell("th", column, heading) for column, heading in enumerate(headings)))
    body = [tag("tr", *(cell("td", column, value) for column, value in enumerate(row))) for row in rows]
    whole = tag("table", tag("thead", head), tag("tbody", *body), data_sortable=sortable and len(rows) > 1)
    # A region that scrolls must be reachable by keyboard, and then needs a name.
    name = ", ".join(str(heading) for heading in headings)
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=f"Table: {name}")


def pairs(entries: Sequence[tuple[object, object]]) -> Markup:
    """Returns names with their values, in as many columns as fit."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in entries]
    return tag("dl", *items, class_="pairs")
