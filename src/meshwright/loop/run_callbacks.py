"""The callbacks of a run, from its options, and the data and samples that they use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import jax

from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.snapshot import Snapshots
from meshwright.data import Ledger
from meshwright.launch.pulse import current_pulse
from meshwright.loop.callbacks import Callback, Checkpointing, Evaluation, SkippedSteps, make_evaluation
from meshwright.loop.decisions import RunSetup
from meshwright.loop.folder.remote_run import HeldLease
from meshwright.loop.logging.goodput import RunningGoodput, read_goodput
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.logging.progress import Progress
from meshwright.loop.logging.run_log import METRICS
from meshwright.loop.logging.run_stats import checkpoint_facts, peak_flops, tokens_per_step
from meshwright.loop.logging.step_log import StepLog
from meshwright.loop.results.before_after import BeforeAfter
from meshwright.loop.results.predict import Predictions
from meshwright.loop.results.sample import TrainingSamples
from meshwright.loop.resume import RunStart, step_in_log
from meshwright.loop.safety.early_stop import make_early_stop
from meshwright.loop.safety.folder_check import FolderCheck
from meshwright.loop.safety.heartbeat import Heartbeat
from meshwright.loop.safety.snapshotting import Snapshotting
from meshwright.loop.safety.spike import Rollback, SpikeGuard
from meshwright.loop.safety.watchdog import Watchdog
from meshwright.loop.text_source import StreamStart
from meshwright.train import NonFiniteGuard


def make_callbacks(
    setup: RunSetup,
    start: RunStart,
    checkpoints: Checkpoints,
    data: RunData,
    flops: float | None,
    stack: ExitStack,
    snapshots: Snapshots | None,
) -> list[Callback]:
    """Returns the callbacks; a rollback comes before evaluation and checkpoints, so that bad states are not saved."""
    config, tell, folder, options = setup.config, setup.tell, setup.folder, setup.config.run
    progress = Progress(
        options.steps,
        start_step=start.step,
        tokens_per_step=tokens_per_step(setup),
        stream=sys.stderr if tell.shows else None,
        plain_seconds=options.log_seconds,
    )
    stack.callback(progress.close)
    tell.progress = progress
    callbacks: list[Callback] = [FolderCheck(folder.path)]  # first: nothing is saved into a new folder of this name
    if setup.remote is not None:
        callbacks.append(HeldLease(setup.remote))
    if config.safety.hang:
        watchdog = Watchdog(
            config.safety.hang,
            tell=lambda text: tell.event("hang", progress.step, text),
            folder=folder.path,
            rank=jax.process_index(),
            ends_process=current_pulse() is not None,
        )
        callbacks.append(stack.enter_context(watchdog))
    callbacks.append(Heartbeat())
    rates, counts_tokens = setup.updates.rates(options.steps), setup.source.counts_tokens
    callbacks.append(StepLog(rates, counts_tokens, flops, peak_flops(setup), setup.source.batch_size))
    callbacks.append(SkippedSteps(NonFiniteGuard.for_layout(setup.layout, limit=config.safety.max_skipped)))
    callbacks.append(progress)
    spikes = None
    if config.safety.rollback:
        spikes = SpikeGuard(factor=config.safety.rollback)
        if start.spikes is not None:
            spikes.state = start.spikes
        forget = None if snapshots is None else snapshots.forget
        callbacks.append(Rollback(spikes, checkpoints, data.reopen, forget))
    evaluate = make_evaluation(setup)
    early = make_early_stop(setup, start, checkpoints)
    if evaluate is not None:
        evaluated = step_in_log(folder.path / METRICS, start.step, lambda line: "eval/loss" in line)
        if early is not None and not early.has_evaluated(start.step):
            evaluated = None  # the checkpoint is older than the evaluation in the log
        callbacks.append(Evaluation(evaluate, options.eval_every, evaluated))
    if early is not None:
        callbacks.append(early)
    if options.profile:
        profiler = StepProfiler(options.profile, folder.path / "profile")
        callbacks.append(profiler)
        if profiler.stop <= start.step + 1:
            tell(f"--profile {options.profile} has no effect: the run is already at step {start.step}")

    def facts() -> dict[str, Any]:
        saved = {"spikes": spikes, "evaluations": early}
        return checkpoint_facts(setup) | {name: item.state for name, item in saved.items() if item is not None}

    saving = Checkpointing(checkpoints, options.checkpoint_every, facts)
    if early is not None:
        saving.also = early.wants_save
    return [*callbacks, saving, *([] if snapshots is None else [Snapshotting(snapshots, facts)])]


def count_time(callbacks: list[Callback], setup: RunSetup, began: float) -> None:
    """Lets the log of steps show the goodput, over all attempts."""
    if jax.process_index() == 0:
        for callback in callbacks:
            if isinstance(callback, StepLog):
                callback.goodput = RunningGoodput(read_goodput(setup.folder.path), began)


def make_samples(setup: RunSetup) -> BeforeAfter | None:
    """Returns the samples to show before and after training: text of a built-in model, or a job's predictions."""
    options = setup.config.run
    if setup.model is not None:
        return TrainingSamples(setup) if options.sample_tokens else None
    return Predictions(setup) if options.predict_rows and getattr(setup.job, "predict", None) is not None else None


class RunData:
    """The batches of a run, from any position in the data, and their ledger."""

    def __init__(self, setup: RunSetup, stack: ExitStack) -> None:
        self.setup, self.ledger = setup, None
        if setup.config.data.ledger:
            self.ledger = Ledger(setup.folder.path / "ledger", tell=setup.tell)
            stack.callback(self.ledger.close)

    def open(self, data: Mapping[str, Any] | None, first_step: int) -> Any:
        place = StreamStart(data, first_step, self.ledger)
        return self.setup.source.open(self.setup.step, place, seed=self.setup.config.run.seed)

    def reopen(self, undone: Mapping[str, Any], after: Mapping[str, Any], first_step: int) -> Any:
        if self.ledger is not None:
            row = int(undone["next_row"])
            sources = None
            if "mixture" in after:
                before, now = undone["mixture"]["taken"], after["mixture"]["taken"]
                sources = {name: (before.get(name, 0), count - before.get(name, 0)) for name, count in now.items()}
            why = "rolled back after a loss spike"
            self.ledger.skip(row, int(after["next_row"]) - row, why=why, sources=sources)
        return self.open(after, first_step)
