"""Setup of a run, from its configuration to a loop that is ready to start: mesh, rules, layout, step, state, data.

The step comes before the state: it rejects a batch that it cannot split before the run folder is created, and the
state may come from a checkpoint in that folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint import Checkpoints, Keep
from meshwright.checkpoint.arrays import load_ahead
from meshwright.checkpoint.snapshot import Snapshots
from meshwright.data import Ledger
from meshwright.data.cache_folder import default_cache
from meshwright.distributed.agreement import agree, as_first, together
from meshwright.errors import ConfigError, LayoutError
from meshwright.launch.pulse import current_pulse
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.loop.callbacks import Callback, Checkpointing, Evaluation, SkippedSteps, StepLog, make_evaluation
from meshwright.loop.compile_cache import use_compile_cache
from meshwright.loop.fit import Loop
from meshwright.loop.logging.goodput import RunningGoodput, read_goodput
from meshwright.loop.logging.profiler import StepProfiler
from meshwright.loop.logging.progress import Progress, Voice
from meshwright.loop.logging.run_log import EVENTS, METRICS, RunLog
from meshwright.loop.logging.run_stats import (
    checkpoint_facts,
    flops_per_step,
    num_params,
    peak_flops,
    run_facts,
    tokens_per_step,
)
from meshwright.loop.remote_run import HeldLease, RemoteRun, open_remote
from meshwright.loop.results.before_after import BeforeAfter
from meshwright.loop.results.predict import Predictions
from meshwright.loop.results.sample import TrainingSamples
from meshwright.loop.resume import RunStart, find_start, step_in_log
from meshwright.loop.run_dir import PER_PROCESS, RunFolder
from meshwright.loop.safety.early_stop import make_early_stop
from meshwright.loop.safety.folder_check import FolderCheck
from meshwright.loop.safety.heartbeat import Heartbeat, report_run
from meshwright.loop.safety.preemption import Preemption
from meshwright.loop.safety.snapshotting import Snapshotting, find_snapshots
from meshwright.loop.safety.spike import Rollback, SpikeGuard
from meshwright.loop.safety.watchdog import Watchdog
from meshwright.loop.settings.choices import MeshChoice, choose_mesh, device_memory, make_model
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.optimizers import OptimizerChoice, choose_optimizer
from meshwright.loop.settings.pipeline_options import pipeline_line, require_rows, with_pipeline
from meshwright.loop.sources import HeldOut, Source, make_held_out, make_source, rows_of, with_rows
from meshwright.loop.text_source import MixedSource, StreamStart, TextSource
from meshwright.loop.weights.init_origin import (
    InitOrigin,
    as_on_first,
    compare_weights,
    copy_of_tokenizer,
    find_origin,
    with_own_tokenizer,
    without_auto,
)
from meshwright.loop.weights.initial_adapters import with_adapters
from meshwright.mesh.build import create_mesh
from meshwright.mesh.string import parse_mesh
from meshwright.models.language import LanguageModel
from meshwright.train import NonFiniteGuard, RunState, Step, language_job, make_train_step, state_layout
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.job import check_axes
from meshwright.train.jobs.job_loading import load_job


@dataclass(frozen=True)
class RunSetup:
    """The decisions about a run, the same on all processes, before anything is computed."""

    config: TrainConfig
    tell: Voice
    model: LanguageModel | None
    job: Any
    source: Source
    held_out: HeldOut | None
    updates: OptimizerChoice
    choice: MeshChoice
    layout: Layout
    precision: str
    step: Step
    folder: RunFolder
    origin: InitOrigin | None = None
    remote: RemoteRun | None = None

    @property
    def optimizer(self) -> Any:
        return self.updates.optimizer


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
    setup = _decide(config, tell, remote)
    stack.callback(setup.folder.close)
    report_run(setup)
    stack.callback(_use_compile_cache(setup))
    preemption = stack.enter_context(Preemption())
    samples = _make_samples(setup)
    keep = Keep(last=config.run.keep_last, every=config.run.keep_every)
    if remote is not None:
        checkpoints = remote.checkpoints(keep, config.store, tell.event)
    else:
        checkpoints = Checkpoints(setup.folder.checkpoints, keep=keep, tell=tell.event)
    load_ahead()
    snapshots = find_snapshots(setup)
    start = find_start(setup, checkpoints, snapshots)
    data = _Data(setup, stack)
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
    callbacks = [*_make_callbacks(setup, start, checkpoints, data, flops, stack, snapshots), preemption]
    _count_time(callbacks, setup, began)
    tell(f"training from step {start.step} to {config.run.steps} in {setup.folder.shown}; the first step compiles")
    loop = Loop(setup.step, config.run.steps, log, callbacks, say=tell)
    return ReadyRun(setup, loop, start.state, batches, samples)


def _use_compile_cache(setup: RunSetup) -> Callable[[], None]:
    wanted, mesh = setup.config.run.compile_cache, setup.layout.mesh
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    knows = setup.model is not None or wanted != "auto"  # a custom job may use pipelines on any axis
    is_safe = not on_cpus or (knows and mesh.shape.get("pp", 1) == 1)
    return use_compile_cache(wanted, folder=default_cache(), is_safe=is_safe, tell=setup.tell)


# --- Decisions ---


def _decide(config: TrainConfig, tell: Voice, remote: RemoteRun | None) -> RunSetup:
    """Makes all decisions, the same on all processes; writes only the empty run folder."""
    if config.run.run is not None:
        config = with_own_tokenizer(config, Path(config.run.run))
    origin = find_origin(config)
    config, tokenizer = without_auto(config, origin)
    config = together("reading --init-adapters", lambda: with_adapters(config))
    if tokenizer is not None:
        tell(f"tokenizer: {tokenizer}")
    model, job, source, held_out = _load(config, origin, tell)
    if origin is not None:
        origin = replace(origin, model=model)
    job = together("choosing a pipeline", lambda: with_pipeline(job, config.placement))
    adapted: Any = {"freeze": config.adapt.freeze, "train": config.adapt.train, "adapters": config.adapt.lora}
    job = together("adapting the job", lambda: adapt_job(job, **adapted))
    precision: str = config.placement.precision
    if precision == "auto":
        precision = "float32" if jax.devices()[0].platform == "cpu" else "mixed"
    updates = together("choosing an optimizer", lambda: choose_optimizer(config.optimizer, config.run.steps, job))
    optimizer = updates.optimizer
    if updates.text:
        tell(updates.text)
    choice = together("choosing a mesh", lambda: _choose_mesh(config, model, job, optimizer, precision))
    choice = MeshChoice(as_first(choice.mesh), as_first(choice.reason))
    tell(f"mesh: {choice.mesh} ({_devices()}); {choice.reason}")
    mesh = create_mesh(parse_mesh(choice.mesh).resolve(jax.device_count()))
    # Report a misspelled axis before the layout warns about it; the step checks the axes of the layout itself.
    check_axes(job, {axis: size for axis, size in mesh.shape.items() if axis != config.placement.zero_axis})
    zero_axis, pad, ema = config.placement.zero_axis, config.placement.pad or False, config.adapt.ema
    try:
        layout = state_layout(job, optimizer, mesh, zero_axis=zero_axis, precision=precision, pad=pad, ema=ema)
    except LayoutError as error:
        if "hint: pad to" not in str(error):
            raise
        more = "Or store such parameters padded: --pad REGEX, e.g. --pad layers/."
        raise LayoutError(f"{error} {more}", report=error.report) from None
    if origin is not None and origin.weights is not None:
        lora = getattr(job, "lora", None)
        together("comparing --init-from with the model", lambda: compare_weights(origin, layout, config.init, lora))
    named = config.model.job or (config.model.model if origin is None else origin.name(config.model.model))
    tell(
        f"model: {named}, {num_params(job):,} parameters; the state takes "
        f"{format_bytes(layout.bytes_per_device)} per device; precision {precision}"
    )
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=None if config.placement.view == "auto" else config.placement.view,
        num_minibatches=config.placement.minibatches,
        sync=None if config.placement.sync == "auto" else config.placement.sync,
        precision=precision,
        remat=config.placement.remat,
        clip=config.optimizer.clip,
        overlap=config.placement.overlap,
        ema=ema,
    )
    tell(f"view: {step.view}")
    if (line := pipeline_line(step, job, config.placement)) is not None:
        tell(line)
    require_rows(step, job, config.placement)
    place: dict[str, Any] = {} if remote is None else {"url": remote.url, "shared": remote.shared}
    folder = RunFolder.open(config, name=named if config.model.job is None else "job", **place)
    if tokenizer is not None:  # the original may disappear, the copy stays
        config = config.changed({"tokenizer": str(copy_of_tokenizer(folder.path))})
    return RunSetup(
        config, tell, model, job, source, held_out, updates, choice, layout, precision, step, folder, origin, remote
    )


def _load(
    config: TrainConfig, origin: InitOrigin | None, tell: Voice
) -> tuple[LanguageModel | None, Any, Source, HeldOut | None]:
    """Returns the model, the job and its data, after checking that all processes agree."""
    named, sizes = config.model.model, config.model.model_options
    taken = origin if named == "auto" and config.model.job is None else None

    def load() -> tuple[Any, Source, HeldOut | None]:
        job = load_job(config.model.job) if config.model.job is not None else None
        if taken is not None:
            taken.changed_model(sizes)
        elif job is None:  # report wrong options before reading any text
            make_model(named, sizes)
        source = make_source(config, job, tell=tell)
        held_out = make_held_out(config, job, source, tell=tell)
        if held_out is None and config.run.patience is not None:
            raise ConfigError(f"--patience needs evaluation data: {source.why_no_evaluation}.", hint="add eval_data.")
        return job, source, held_out

    job, source, held_out = together("loading the job and its data", load)
    shared = {name: value for name, value in as_on_first(config).flat().items() if name not in PER_PROCESS}
    held = {} if held_out is None else {"eval_data": held_out.fingerprint}
    agree({**shared, **source.facts(), **held}, job=job)
    if job is not None:
        return None, with_rows(job, source.batch_size), source, held_out
    assert isinstance(source, TextSource)
    if taken is not None:
        model = taken.changed_model(sizes, vocab_size=source.vocab_size, mesh=config.placement.mesh, tell=tell)
    else:
        model = make_model(named, sizes, vocab_size=source.vocab_size)
    job = language_job(
        model,
        batch_size=source.batch_size,
        num_tokens=config.data.num_tokens,
        packed=True,
        num_sources=len(source.sources) if isinstance(source, MixedSource) else None,
    )
    return model, job, source, held_out


def _choose_mesh(config: TrainConfig, model: Any, job: Any, optimizer: Any, precision: str) -> MeshChoice:
    named = config.placement.mesh if config.placement.mesh != "auto" else getattr(job, "mesh", None)
    if named is not None:
        return MeshChoice(named, "set by --mesh." if config.placement.mesh != "auto" else "set by the job.")
    return choose_mesh(
        job,
        optimizer,
        num_devices=jax.device_count(),
        batch_size=rows_of(job),
        minibatches=config.placement.minibatches,
        memory=device_memory(),
        precision=precision,
        ema=config.adapt.ema,
        pad=config.placement.pad or False,
        heads=getattr(model, "num_heads", None),
        kv_heads=getattr(model, "num_kv_heads", None),
    )


def _devices() -> str:
    devices = jax.devices()
    kind = "simulated CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} {kind}{several}"


# --- Data, logs and callbacks ---


class _Data:
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


def _make_callbacks(
    setup: RunSetup,
    start: RunStart,
    checkpoints: Checkpoints,
    data: _Data,
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


def _count_time(callbacks: list[Callback], setup: RunSetup, began: float) -> None:
    """Lets the log of steps show the goodput, over all attempts."""
    if jax.process_index() == 0:
        for callback in callbacks:
            if isinstance(callback, StepLog):
                callback.goodput = RunningGoodput(read_goodput(setup.folder.path), began)


def _make_samples(setup: RunSetup) -> BeforeAfter | None:
    """Returns the samples to show before and after training: text of a built-in model, or a job's predictions."""
    options = setup.config.run
    if setup.model is not None:
        return TrainingSamples(setup) if options.sample_tokens else None
    return Predictions(setup) if options.predict_rows and getattr(setup.job, "predict", None) is not None else None
