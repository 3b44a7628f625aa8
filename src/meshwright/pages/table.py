"""Tables that scroll sideways on their own and sort by a click on a heading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.pages.markup import Markup, tag


def table(
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    right: Iterable[int] = (),
    code: Iterable[int] = (),
    sortable: bool = True,
    caption: str = "",
) -> Markup:
    """Returns a table.

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
    whole = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", head),
        tag("tbody", *body),
        data_sortable=sortable and len(rows) > 1,
    )
    # A region that scrolls must be reachable by keyboard, and then needs a name.
    name = caption or ", ".join(str(heading) for heading in headings)
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=f"Table: {name}")


def pairs(entries: Sequence[tuple[object, object]]) -> Markup:
    """Returns names with their values, in as many columns as fit."""
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in entries]
    return tag("dl", *items, class_="pairs")
