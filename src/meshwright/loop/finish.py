"""The end of a run: last samples, outcome, report page, and the command that continues it."""

from __future__ import annotations

import shlex
import time

import jax

from meshwright.errors import MeshwrightError
from meshwright.loop.fit import Result
from meshwright.loop.logging.goodput import read_goodput
from meshwright.loop.setup import ReadyRun


def finish(ready: ReadyRun, result: Result) -> None:
    """Shows the samples after training on all processes, then reports the outcome on process 0."""
    ready.setup.tell.end_progress()
    if ready.samples is not None and result.why != "preempted":
        with ready.loop.timed("eval"):
            ready.samples.end(result.state)
    if jax.process_index() == 0:
        _conclude(ready, result)


def _conclude(ready: ReadyRun, result: Result) -> None:
    """Logs the outcome, writes the report page, and prints the command that continues the run."""
    config, tell, log = ready.setup.config, ready.setup.tell, ready.loop.log
    loss, problems = result.metrics.get("eval/loss"), result.problems()
    saved = "; checkpoint saved" if result.saved else ""
    text, more = {
        "finished": (f"finished at step {result.step}", f" --steps {2 * config.run.steps}"),
        "preempted": (f"stopped at step {result.step} on request{saved}", ""),
        "out of data": (f"out of data at step {result.step}", f" --epochs {2 * (config.data.epochs or 1)}"),
        "stopped early": (
            f"stopped early at step {result.step}: no improvement in {config.run.patience} evaluations",
            f" --patience {2 * (config.run.patience or 1)}",
        ),
    }[result.why]
    text += f"; evaluation loss {loss:.4f}" if loss is not None and result.why != "preempted" else ""
    if result.best is not None:
        name = config.run.monitor.rpartition(":")[0].removeprefix("eval/")
        text += f"; best {name} {result.best[1]:.4g} at step {result.best[0]}"
    go_on = f"{ready.setup.folder.resume_command}{more if result.saved else ''}"
    kind = "error" if problems else "preempted" if result.why == "preempted" else "finish"
    log.flush()
    seconds = ready.loop.tail()
    goodput = read_goodput(ready.setup.folder.path, ending={"time": time.time(), "seconds": seconds})
    log.event("goodput", result.step, str(goodput), categories=goodput.seconds)
    log.event(kind, result.step, "; ".join([text, *problems]), go_on=go_on, why=result.why, seconds=seconds)
    tell(text)
    tell(str(goodput))
    if config.run.report:
        log.flush()
        tell(_report(ready))
    tell(f"to continue: {go_on}")
    for problem in problems:  # print errors last, where people see them
        tell(f"error: {problem}")


def _report(ready: ReadyRun) -> str:
    """Writes the report page and returns the line to print; a failure does not change the outcome of the run."""
    from meshwright.loop.report import build_report

    folder = ready.setup.folder.path
    try:
        return f"report: {build_report(folder)}"
    except (MeshwrightError, OSError) as error:
        why = str(error).partition("\n")[0]
        command = f"meshwright report {shlex.quote(str(folder))} --out FILE"
        return f"warning: could not write the report page: {why}\nhint: run {command}."
