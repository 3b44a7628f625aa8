"""`train(config)`: a whole run, from setup to report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack

import jax

from meshwright import interrupts
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.fit import Result, fit
from meshwright.loop.logging.fp8_report import InspectFp8, report_fp8
from meshwright.loop.logging.goodput import read_goodput
from meshwright.loop.logging.progress import Voice
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.setup import ReadyRun, set_up


def train(
    config: TrainConfig, *, say: Callable[[str], None] | None = None, inspect_fp8: InspectFp8 | None = None
) -> Result:
    """Trains the model that a configuration describes, in a run folder, and returns the outcome.

    All processes of a run must call it; only process 0 writes logs and prints.

    Args:
        say: function that receives each printed line (default: print to stderr, with a progress line).
        inspect_fp8: function that reads from the compiled step which matmuls really run in fp8, such as
            `meshwright.plan.compiled.fp8_matmuls.inspect_fp8`, which `meshwright train` uses. Without it, a run with
            `--precision fp8` says that this was not checked.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "job.py").write_text('''
        ... import numpy as np, meshwright as mw
        ... make_batch = lambda seed: {"x": np.ones((8, 4), np.float32)}
        ... job = mw.Job(
        ...     init=lambda key: {"w": np.zeros(4, np.float32)}, rules=[("w", mw.P())], mesh="dp:8",
        ...     loss=lambda params, batch, rng: (((batch["x"] @ params["w"] - 1) ** 2).mean(), {}),
        ...     batch=make_batch(0), make_batch=make_batch,
        ... )''')
        >>> changes = {"job": f"{folder}/job.py:job", "view": "global", "run": f"{folder}/run", "steps": 2}
        >>> train(TrainConfig().changed(changes), say=lambda line: None).why
        'finished'
    """
    if not isinstance(config, TrainConfig):
        raise ConfigError(
            f"train takes a TrainConfig; got {type(config).__name__}.",
            hint="make one with TrainConfig(...), preset(name) or read_config(file).",
        )
    with ExitStack() as stack:
        began = time.time() if interrupts.watch is None else interrupts.watch.began
        ready = set_up(config, Voice(say), stack, began=began)
        report_fp8(ready.setup, ready.loop.log, ready.state, inspect_fp8)
        result = fit(ready.loop, ready.state, ready.batches)
        ready.setup.tell.end_progress()
        if ready.samples is not None and result.why != "preempted":
            with ready.loop.timed("eval"):
                ready.samples.end(result.state)
        if jax.process_index() == 0:
            _finish(ready, result)
        return result


def _finish(ready: ReadyRun, result: Result) -> None:
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
