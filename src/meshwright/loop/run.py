"""`train(config)`: sets a run up, takes its steps, and says how it ended."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack

import jax

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.config import TrainConfig
from meshwright.loop.fit import Result, fit
from meshwright.loop.logging.progress import Voice
from meshwright.loop.setup import ReadyRun, set_up


def train(config: TrainConfig, *, say: Callable[[str], None] | None = None) -> Result:
    """Trains what a configuration describes, in a folder of its own, and returns how it ended.

    All processes of a run call it; process 0 writes and speaks.

    Args:
        say: where to tell what is done, instead of showing it on stderr with a line of progress.
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"train takes a TrainConfig; got {type(config).__name__}.",
            hint="make one with TrainConfig(...), preset(name) or read_config(file).",
        )
    with ExitStack() as stack:
        ready = set_up(config, Voice(say), stack)
        result = fit(ready.loop, ready.state, ready.batches)
        ready.setup.tell.end_progress()
        if ready.samples is not None and result.why != "preempted":
            ready.samples.end(result.state)
        if jax.process_index() == 0:
            _finish(ready, result)
        return result


def _finish(ready: ReadyRun, result: Result) -> None:
    """Writes down how a run ended, makes its page, and tells how to go on."""
    config, tell, log = ready.setup.config, ready.setup.tell, ready.loop.log
    loss, problems = result.metrics.get("eval/loss"), result.problems()
    text = {
        "finished": f"finished at step {result.step}",
        "preempted": f"stopped at step {result.step}, as asked{'; its checkpoint is written' if result.saved else ''}",
        "out of data": f"the data ended at step {result.step}",
    }[result.why]
    text += f"; evaluation loss {loss:.4f}" if loss is not None and result.why != "preempted" else ""
    more = {
        "finished": f" --steps {2 * config.run.steps}",
        "preempted": "",
        "out of data": f" --epochs {2 * (config.data.epochs or 1)}",
    }[result.why]
    go_on = f"{ready.setup.folder.resume_command}{more if result.saved else ''}"
    kind = "error" if problems else "preempted" if result.why == "preempted" else "finish"
    log.event(kind, result.step, "; ".join([text, *problems]), go_on=go_on)
    tell(text)
    if config.run.report:
        log.flush()
        tell(_report(ready))
    tell(f"to go on: {go_on}")
    for problem in problems:  # last, where it is seen
        tell(f"error: {problem}")


def _report(ready: ReadyRun) -> str:
    """Writes the page, and says where it is; a page that cannot be written does not change how a run ended."""
    from meshwright.loop.report import build_report

    folder = ready.setup.folder.path
    try:
        return f"report: {build_report(folder)}"
    except (MeshwrightError, OSError) as error:
        why = str(error).partition("\n")[0]
        command = f"meshwright report {shlex.quote(str(folder))} --out FILE"
        return f"warning: there is no report page: {why}\nhint: {command} writes it elsewhere."
