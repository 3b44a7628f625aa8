"""HTML and SVG strings that escape everything except `Markup`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

# Control characters and lone surrogates, which HTML cannot contain, are written as Python escapes.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)
}


class Markup(str):
    """A string that is already HTML, as returned by `tag` and `join`."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Returns a value as escaped HTML; markup is returned unchanged.

    >>> text("a < b\\0"), text(Markup("<b>"))
    ('a &lt; b\\\\x00', '<b>')
    """
    return value if isinstance(value, Markup) else Markup(escape(str(value).translate(_SHOWN), quote=True))


def tag(element: str, *children: object, **attributes: Any) -> Markup:
    """Returns an element; children of None and attributes of None or False are skipped.

    In attribute names, a trailing underscore is dropped and other underscores become dashes.

    >>> tag("a", "x & y", href="#top", class_="link", aria_label=None)
    '<a href="#top" class="link">x &amp; y</a>'
    """
    shown = "".join(
        f" {_attribute(name)}" if value is True else f' {_attribute(name)}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if element in ("br", "hr", "meta", "col", "img"):
        return Markup(f"<{element}{shown}>")
    return Markup(f"<{element}{shown}>{join(children)}</{element}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Returns the escaped parts in one string, skipping None.

    >>> join(["1 < 2", None, tag("b", "yes")], ": ")
    '1 &lt; 2: <b>yes</b>'
    """
    return Markup(between.join(text(part) for part in parts if part is not None))


def data_block(value: Any) -> Markup:
    """Returns a JSON script element; `<` is escaped so that no text can close the element."""
    shown = json.dumps(_visible(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{shown}</script>')


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, (list, tuple)) else value


def _attribute(name: str) -> str:
    # SVG attributes such as viewBox keep their capitals.
    return name.rstrip("_").replace("_", "-")
