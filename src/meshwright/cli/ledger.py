"""`meshwright ledger`: was every row of the data seen exactly once in each epoch?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshwright.cli import show
from meshwright.errors import CheckpointError


def ledger(run: Annotated[str, tyro.conf.Positional], /, upto_step: int | None = None) -> int:
    """Check which rows a run was trained on, over all its restarts; exits with 1 where one was lost or repeated.

    The run must have been started with its ledger on. A step that was done again after a kill counts once, and must
    have had the same rows. The number of processes and the batch size may have changed between starts. Steps that the
    run's metrics and checkpoints show, and the ledger does not have, are not proven: that is a problem as well.

    Args:
        run: the run's folder.
        upto_step: the last step to look at; all by default.
    """
    from meshwright.data import check_ledger

    folder = Path(run, "ledger")
    if os.path.isdir(folder):
        report = check_ledger(folder, upto_step=upto_step, done=_steps_done(Path(run)))
    else:
        report = check_ledger(run, upto_step=upto_step)
    show(report)
    return 0 if report.ok else 1


def _steps_done(run: Path) -> set[int]:
    """Returns the steps that a run's metrics and checkpoints show; what cannot be read there shows none."""
    from meshwright.checkpoint.retention import finished_steps
    from meshwright.loop.logging.run_log import read_lines

    done: list[Any] = []
    with contextlib.suppress(OSError, CheckpointError):
        done += finished_steps(run / "checkpoints")
    with contextlib.suppress(OSError):
        done += [line.get("step") for line in read_lines(run / "metrics.jsonl")]
    return {step for step in done if type(step) is int and step > 0}
