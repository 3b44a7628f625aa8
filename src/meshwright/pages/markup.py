"""HTML and SVG as strings that know they are safe: whatever is not marked as markup is escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

# What HTML cannot hold or a reader cannot see is written as Python would: control characters, and halves of characters
# that UTF-8 has no bytes for. Line breaks and tabs stay.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)
}


class Markup(str):
    """Text that is HTML already; `tag` and `join` make it from pieces."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Returns a value as HTML text; markup stays as it is.

    >>> text("a < b\\0"), text(Markup("<b>"))
    ('a &lt; b\\\\x00', '<b>')
    """
    return value if isinstance(value, Markup) else Markup(escape(str(value).translate(_SHOWN), quote=True))


def tag(element: str, *children: object, **attributes: Any) -> Markup:
    """Returns an element; children that are None are left out, and so are attributes that are None or False.

    An underscore at the end of an attribute's name is dropped, and others become dashes.

    >>> tag("a", "x & y", href="#top", class_="link", aria_label=None)
    '<a href="#top" class="link">x &amp; y</a>'
    """
    shown = "".join(
        f" {_attribute(name)}" if value is True else f' {_attribute(name)}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if element in ("br", "hr", "meta", "col"):
        return Markup(f"<{element}{shown}>")
    return Markup(f"<{element}{shown}>{join(children)}</{element}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Returns the parts that are not None one after the other, escaped where they need it."""
    return Markup(between.join(text(part) for part in parts if part is not None))


def data_block(value: Any) -> Markup:
    """Returns a value for scripts to read, as JSON that no text in it can end early."""
    shown = json.dumps(_visible(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{shown}</script>')


def _visible(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, (list, tuple)) else value


def _attribute(name: str) -> str:
    # SVG has names with capitals (viewBox), which stay.
    return name.rstrip("_").replace("_", "-")
