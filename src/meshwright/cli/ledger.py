"""`meshwright ledger`: checks that a run used every row exactly once per epoch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import tyro

from meshwright.cli import show
from meshwright.errors import CheckpointError
from meshwright.remote import is_url


def ledger(run: Annotated[str, tyro.conf.Positional], /, upto_step: int | None = None) -> int:
    """Check the rows that a run was trained on, over all restarts; exit with 1 if any was lost or repeated.

    The run needs `meshwright train --ledger`. A step recomputed after a kill counts once and must have used the same
    rows. The number of processes and the batch size may change between restarts. A step that appears in the metrics or
    checkpoints but not in the ledger is reported as a problem.

    Args:
        run: run folder, or the URL of a run.
        upto_step: last step to check; all steps if omitted.
    """
    from meshwright.data import check_ledger

    saved = set[int]()
    if is_url(run):
        from meshwright.loop.folder.remote_run import read_remote

        copy, checkpoints = read_remote(run)
        run, saved = str(copy), {*checkpoints.steps()}
    folder = Path(run, "ledger")
    if os.path.isdir(folder):
        report = check_ledger(folder, upto_step=upto_step, done=_steps_done(Path(run)) | saved - {0})
    else:
        report = check_ledger(run, upto_step=upto_step)
    show(report)
    return 0 if report.ok else 1


def _steps_done(run: Path) -> set[int]:
    """Returns the steps in a run's metrics and checkpoints; ignores unreadable files."""
    from meshwright.checkpoint.retention import finished_steps
    from meshwright.loop.logging.run_log import read_lines

    done: list[Any] = []
    with contextlib.suppress(OSError, CheckpointError):
        done += finished_steps(run / "checkpoints")
    with contextlib.suppress(OSError):
        done += [line.get("step") for line in read_lines(run / "metrics.jsonl")]
    return {step for step in done if type(step) is int and step > 0}
