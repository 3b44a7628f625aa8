"""What stands between the charts of a page: sentences, headline figures, commands, texts side by side."""

from __future__ import annotations

from collections.abc import Sequence
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
    tiles = [
        tag(
            "div",
            tag("dt", one.label),
            tag("dd", tag("strong", one.value), tag("small", one.remark) if one.remark else None),
        )
        for one in figures
    ]
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
