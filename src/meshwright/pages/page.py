"""The HTML page: a single file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.files import write_atomically
from meshwright.pages.figure import patterns
from meshwright.pages.markup import Markup, join, tag


@dataclass(frozen=True)
class Section:
    """A section of a page; `short` is its name in the table of contents (default: the title)."""

    title: str
    body: Markup
    short: str = ""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", (self.short or self.title).lower()).strip("-")


def make_page(title: str, *, head: Markup, sections: Sequence[Section], foot: object = "") -> str:
    """Returns the whole page as HTML.

    Its content security policy blocks all loads except images inside the page, and all scripts except the page's own.

    Example:
        >>> html = make_page("A run", head=tag("h1", "A run"), sections=[Section("Loss", tag("p", "1 < 2"))])
        >>> "1 &lt; 2" in html, "default-src 'none'" in html
        (True, True)
    """
    style, script = _resource("page.css"), _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    )
    contents = [tag("li", tag("a", one.short or one.title, href=f"#{one.anchor}")) for one in sections]
    main = [
        tag("section", tag("h2", one.title, id=name), one.body, id=one.anchor, aria_labelledby=name)
        for one in sections
        if (name := f"{one.anchor}-title")
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">\
<meta http-equiv="Content-Security-Policy" content="{policy}">\
<meta name="viewport" content="width=device-width, initial-scale=1">\
<meta name="color-scheme" content="light dark">\
{tag("title", title)}<style>
{style}</style></head><body><a href="#content" class="skip">Skip to the content</a>{patterns()}{tag("header", head)}\
<nav aria-label="Contents">{tag("ul", *contents)}</nav>{tag("main", join(main, chr(10)), id="content")}\
{tag("footer", foot) if foot else ""}<script>{script}</script></body></html>
"""


def write_page(html: str, path: str | Path, *, hint: str = "name another file.") -> Path:
    """Writes a page atomically and returns its path.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_page(make_page("A run", head=tag("h1", "A run"), sections=[]), f"{folder}/report.html").name
        'report.html'
    """
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, html)
    except OSError as error:
        raise MeshwrightError(f"{path} cannot be written: {error.strerror}.", hint=hint) from None
    return place


@cache
def _resource(name: str) -> str:
    return resources.files("meshwright.pages").joinpath(name).read_text(encoding="utf-8")
