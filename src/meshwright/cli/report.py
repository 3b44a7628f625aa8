"""`meshwright report`: one page that shows a run."""

from __future__ import annotations

from typing import Annotated

import tyro

from meshwright.loop.report import build_report


def report(run: Annotated[str, tyro.conf.Positional], /, out: str | None = None) -> int:
    """Build the report page of a run from its folder, while it runs or after; prints where the page is.

    The page is one HTML file that needs no network: loss and throughput, where the time went, mesh and layout,
    samples, events, configuration, and the command to resume.

    Args:
        run: the run's folder, such as runs/NAME.
        out: the file to write; report.html in that folder when left out.
    """
    print(build_report(run, out=out))
    return 0
