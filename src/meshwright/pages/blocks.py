"""Text blocks of a page: paragraphs, headline figures, tables, commands, quotes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.pages.markup import Markup, join, tag


@dataclass(frozen=True)
class Figure:
    """A headline number with its label and an optional remark."""

    label: str
    value: str
    remark: str = ""


def headline(figures: Sequence[Figure]) -> Markup:
    """Returns the most important numbers in large type.

    Example:
        >>> headline([Figure("loss", "2.104")])
        '<dl class="headline"><div><dt>loss</dt><dd><strong>2.104</strong></dd></div></dl>'
    """
    tiles = []
    for one in figures:
        remark = tag("small", one.remark) if one.remark else None
        tiles.append(tag("div", tag("dt", one.label), tag("dd", tag("strong", one.value), remark)))
    return tag("dl", *tiles, class_="headline")


def prose(*sentences: object) -> Markup:
    """Returns sentences as one paragraph, without the empty ones.

    Example:
        >>> prose("The run finished.", "", "Loss < 2.")
        '<p class="prose">The run finished. Loss &lt; 2.</p>'
    """
    said = [sentence for sentence in sentences if sentence]
    spaced = [part for sentence in said for part in (" ", sentence)][1:]
    return tag("p", *spaced, class_="prose")


def side_by_side(*blocks: Markup) -> Markup:
    """Returns blocks next to each other, stacked on narrow pages.

    Example:
        >>> side_by_side(prose("left"), prose("right"))
        '<div class="columns"><p class="prose">left</p><p class="prose">right</p></div>'
    """
    return tag("div", *blocks, class_="columns")


def command(line: str, *, label: str) -> Markup:
    """Returns a command, which breaks between words only; the page's script adds a copy button.

    Example:
        >>> command("meshwright train", label="train")
        '<div class="command" data-copy="train"><pre aria-label="train"><code>meshwright train</code></pre></div>'
    """
    # Browsers would break a line after the dashes of an option.
    words = [tag("span", word) if word.startswith("-") else word for word in line.split(" ")]
    code = tag("code", *[part for word in words for part in (" ", word)][1:])
    return tag("div", tag("pre", code, aria_label=label), class_="command", data_copy=label)


def quote(label: str, *, prompt: str, body: str) -> Markup:
    """Returns sample text with its prompt highlighted; a dot replaces each unprintable character.

    Example:
        >>> quote("step 100", prompt="def ", body="main\\x00")
        '<div><h3>step 100</h3><pre class="quote" dir="auto"><b>def </b>main·</pre></div>'
    """
    seen = "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in body)
    shown = tag("pre", tag("b", prompt), seen, class_="quote", dir="auto")
    return tag("div", tag("h3", label), shown)


def fold(summary: str, *blocks: object, opened: bool = False) -> Markup:
    """Returns a collapsible section.

    Example:
        >>> fold("Details", "text")
        '<details class="fold"><summary>Details</summary>text</details>'
    """
    return tag("details", tag("summary", summary), *blocks, class_="fold", open=opened)


def badge(state: str, *, kind: str) -> Markup:
    """Returns a framed word with a sign for its kind: good, busy, warn or bad.

    Example:
        >>> badge("finished", kind="good")
        '<span class="badge good"><span aria-hidden="true">✓</span> finished</span>'
    """
    signs = {"good": "✓", "busy": "▶", "warn": "■", "bad": "✕"}
    return tag("span", tag("span", signs[kind], aria_hidden="true"), f" {state}", class_=f"badge {kind}")


LONG = 32  # letters


def table(
    headings: Sequence[object],
    rows: Sequence[Sequence[object]],
    *,
    right: Iterable[int] = (),
    code: Iterable[int] = (),
    whole: Iterable[int] = (),
    sortable: bool = True,
) -> Markup:
    """Returns a table that scrolls horizontally and sorts by a click on a heading.

    Args:
        right: indices of right-aligned columns, which sort as numbers, also with units of bytes or time.
        code: indices of columns in a monospace font, whose values may break anywhere.
        whole: indices of those among them whose values stay in one line, such as names and shapes.
        sortable: whether headings are buttons that sort (default: True).

    Example:
        >>> html = table(["leaf", "bytes"], [("up", "9.0 KiB"), ("down", "1.0 MiB")], right=[1])
        >>> '<td class="number">1.0 MiB</td>' in html
        True
    """
    numbers, codes, lines = frozenset(right), frozenset(code), frozenset(whole)
    # A column of sentences must not shrink to the width of a word on a phone.
    long = {
        column
        for column in range(len(headings))
        if any(len(str(row[column])) > LONG and not isinstance(row[column], Markup) for row in rows)
    }

    def cell(element: str, column: int, value: object) -> Markup:
        kinds = ["long"] * (column in long and column not in codes and element == "td")
        kinds += ["number"] * (column in numbers) + ["code"] * (column in codes and element == "td")
        kinds += ["whole"] * (column in lines and element == "td")
        if column in (codes | long) - lines and element == "td" and not isinstance(value, Markup):
            value = join(str(value).split("/"), Markup("/<wbr>"))  # the best places to break a path
        return tag(element, value, class_=" ".join(kinds) or None, scope="col" if element == "th" else None)

    head = tag("tr", *(cell("th", column, heading) for column, heading in enumerate(headings)))
    body = [tag("tr", *(cell("td", column, value) for column, value in enumerate(row))) for row in rows]
    drawn = tag("table", tag("thead", head), tag("tbody", *body), data_sortable=sortable and len(rows) > 1)
    # A scrolling region must be reachable by keyboard and then needs an accessible name.
    name = ", ".join(str(heading) for heading in headings)
    return tag("div", drawn, class_="scroll", tabindex=0, role="region", aria_label=f"Table: {name}")


def pairs(entries: Sequence[tuple[object, object]]) -> Markup:
    """Returns names with their values, in as many columns as fit.

    Example:
        >>> pairs([("mesh", "fsdp:8")])
        '<dl class="pairs"><div><dt>mesh</dt><dd>fsdp:8</dd></div></dl>'
    """
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in entries]
    return tag("dl", *items, class_="pairs")
