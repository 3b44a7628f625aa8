"""`meshwright ledger`: was every row of the data seen exactly once in each epoch?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from meshwright.cli.output import show


def ledger(run: Annotated[str, tyro.conf.Positional], /, upto_step: int | None = None) -> int:
    """Check which rows a run was trained on, over all its restarts; exits with 1 where one was lost or repeated.

    The run must have been started with its ledger on. A step that was done again after a kill counts once, and must
    have had the same rows. The number of processes and the batch size may have changed between starts.

    Args:
        run: the run's folder.
        upto_step: the last step to look at; all by default.
    """
    from meshwright.data import check_ledger

    folder = Path(run, "ledger")
    report = check_ledger(folder if folder.is_dir() else run, upto_step=upto_step)
    show(report)
    return 0 if report.ok else 1
