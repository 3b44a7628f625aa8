"""`meshwright report`: the report page of a run."""

from __future__ import annotations

from typing import Annotated

import tyro

from meshwright.loop.folder.remote_run import read_remote
from meshwright.loop.report import build_report
from meshwright.remote import is_url


def report(run: Annotated[str, tyro.conf.Positional], /, out: str | None = None) -> int:
    """Build the report page of a run, during or after the run, and print its path.

    The page is one HTML file that needs no network: loss, throughput, time, mesh, layout, samples, events,
    configuration, and the command to resume.

    Args:
        run: run folder, e.g. runs/NAME, or the URL of a run.
        out: file to write; report.html in the run folder, or in the local copy of a URL, if omitted.
    """
    if is_url(run):
        run = str(read_remote(run)[0])
    print(build_report(run, out=out))
    return 0
