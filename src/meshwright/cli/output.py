"""How commands print: rich on a terminal, plain text into a pipe."""

from __future__ import annotations

import sys
from typing import Any


def show(thing: Any) -> None:
    """Prints something with a plain and a rich form in the form that fits where it goes."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(thing, highlight=False, markup=False)
    else:
        print(thing)
