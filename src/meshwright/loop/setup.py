"""Setup of a run, from its configuration to a loop that is ready to start: decisions, state, data, log, callbacks.

The step comes before the state: it rejects a batch that it cannot split before the run folder is created, and the
state may come from a checkpoint in that folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.checkpoint import Checkpoints, Keep
from meshwright.checkpoint.arrays import load_ahead
from meshwright.data.cache_folder import default_cache
from meshwright.distributed.agreement import together
from meshwright.loop.compile_cache import use_compile_cache
from meshwright.loop.decisions import RunSetup, decide
from meshwright.loop.fit import Loop
from meshwright.loop.folder.remote_run import open_remote
from meshwright.loop.logging.progress import Voice
from meshwright.loop.logging.run_log import EVENTS, RunLog
from meshwright.loop.logging.run_stats import flops_per_step, run_facts
from meshwright.loop.results.before_after import BeforeAfter
from meshwright.loop.resume import find_start, step_in_log
from meshwright.loop.run_callbacks import RunData, count_time, make_callbacks, make_samples
from meshwright.loop.safety.heartbeat import report_run
from meshwright.loop.safety.preemption import Preemption
from meshwright.loop.safety.snapshotting import find_snapshots
from meshwright.loop.settings.config import TrainConfig
from meshwright.train import RunState


@dataclass(frozen=True)
class ReadyRun:
    """A run that is ready to start: `fit(ready.loop, ready.state, ready.batches)`."""

    setup: RunSetup
    loop: Loop
    state: RunState
    batches: Any
    samples: BeforeAfter | None


def set_up(config: TrainConfig, tell: Voice, stack: ExitStack, *, began: float | None = None) -> ReadyRun:
    """Prepares a run for its first step; `stack` closes its resources, `began` is when the process began (now)."""
    began = time.time() if began is None else began
    config, remote = open_remote(config, tell, stack)
    setup = decide(config, tell, remote)
    stack.callback(setup.folder.close)
    report_run(setup)
    stack.callback(_use_compile_cache(setup))
    preemption = stack.enter_context(Preemption())
    samples = make_samples(setup)
    keep = Keep(last=config.run.keep_last, every=config.run.keep_every)
    if remote is not None:
        checkpoints = remote.checkpoints(keep, config.store, tell.event)
    else:
        checkpoints = Checkpoints(setup.folder.checkpoints, keep=keep, tell=tell.event)
    load_ahead()
    snapshots = find_snapshots(setup)
    start = find_start(setup, checkpoints, snapshots)
    data = RunData(setup, stack)
    batches = data.open(start.data, start.step + 1)  # checks the position in the data before anything is written
    stack.callback(batches.close)
    flops = flops_per_step(setup)
    log = _open_log(setup, flops, stack)
    stack.callback(checkpoints.close)
    with setup.folder.writing():
        start.announce(setup, log, began=began)
    if snapshots is not None:
        snapshots.begin()
    if samples is not None:
        events = setup.folder.path / EVENTS
        samples.begin(start.state, step_in_log(events, start.step, lambda line: line.get("when") == "after"))
    callbacks = [*make_callbacks(setup, start, checkpoints, data, flops, stack, snapshots), preemption]
    count_time(callbacks, setup, began)
    tell(f"training from step {start.step} to {config.run.steps} in {setup.folder.shown}; the first step compiles")
    loop = Loop(setup.step, config.run.steps, log, callbacks, say=tell)
    return ReadyRun(setup, loop, start.state, batches, samples)


def _use_compile_cache(setup: RunSetup) -> Callable[[], None]:
    wanted, mesh = setup.config.run.compile_cache, setup.layout.mesh
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    knows = setup.model is not None or wanted != "auto"  # a custom job may use pipelines on any axis
    is_safe = not on_cpus or (knows and mesh.shape.get("pp", 1) == 1)
    return use_compile_cache(wanted, folder=default_cache(), is_safe=is_safe, tell=setup.tell)


def _open_log(setup: RunSetup, flops: float | None, stack: ExitStack) -> RunLog:
    """Opens the run's log and writes its configuration; all processes succeed or fail together."""
    folder, options = setup.folder, setup.config.run

    def open_log() -> RunLog:
        with folder.writing():
            return RunLog(
                folder.path,
                rank=jax.process_index(),
                tensorboard=options.tensorboard,
                wandb=options.wandb,
                trackio=options.trackio,
                tell=setup.tell,
            )

    def write() -> None:
        with folder.writing():
            if setup.origin is not None and jax.process_index() == 0:
                setup.origin.copy_to(folder.path)  # the configuration names the copy
            folder.write_config(setup.config)
            folder.write_facts(run_facts(setup, flops))
        if setup.remote is not None and jax.process_index() == 0:
            setup.remote.sync()  # from now on there is a run to resume

    setup.tell.log = log = stack.enter_context(together("opening its logs", open_log))
    together("writing its configuration", write)
    return log
