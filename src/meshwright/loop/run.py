"""`train(config)`: from a configuration to a finished run, in the order of the flow.

mesh -> rules -> layout -> state -> step -> loop -> checkpoint
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshwright.checkpoint import Checkpoints, Keep
from meshwright.checkpoint.arrays import load_ahead
from meshwright.chips import chip_of
from meshwright.data import Ledger
from meshwright.errors import ConfigError
from meshwright.flops import count_flops
from meshwright.job import abstract_init, load_job
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.loop.config import TrainConfig
from meshwright.loop.folder import NOT_OF_THE_RUN, RunFolder
from meshwright.loop.log import RunLog
from meshwright.loop.loop import Loop, Result, fit
from meshwright.loop.memory import read_memory
from meshwright.loop.mesh_choice import MeshChoice, choose_mesh
from meshwright.loop.models import make_model
from meshwright.loop.optimizers import make_optimizer, make_schedule
from meshwright.loop.preemption import Preemption
from meshwright.loop.profile import Profile
from meshwright.loop.progress import Progress
from meshwright.loop.sample import make_sampler
from meshwright.loop.sources import JobSource, Place, TextSource, make_source
from meshwright.loop.spike import SpikeGuard
from meshwright.loop.versions import versions
from meshwright.loop.watchdog import Watchdog
from meshwright.mesh import create_mesh
from meshwright.models.language import LanguageModel
from meshwright.train import (
    NonFiniteGuard,
    State,
    Step,
    init_state,
    language_job,
    make_eval_step,
    make_train_step,
    require_agreement,
    state_layout,
)

TEMPERATURE = 0.7
"""How freely samples are drawn: a little more likely than what the model says, so that short training shows."""


def train(config: TrainConfig, *, say: Callable[[str], None] | None = None) -> Result:
    """Trains what a configuration describes, in a folder of its own, and returns how it ended.

    All processes of a run call it; process 0 writes and speaks.

    Args:
        say: where to tell what is done, instead of showing it on stderr with a line of progress.
    """
    config.check()
    with ExitStack() as stack:
        run = _prepare(config, _Voice(say), stack)
        return _run(run, stack)


class _Voice:
    """Tells what is done, on process 0: above the progress line while there is one."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.shows = say is None and jax.process_index() == 0
        self.progress: Progress | None = None

    def __call__(self, text: str) -> None:
        if jax.process_index() != 0:
            return
        if self.progress is not None and self.shows:
            self.progress.say(text)
        else:
            self.say(text)


@dataclass(frozen=True)
class _Run:
    """Everything that was decided before the first step."""

    config: TrainConfig
    tell: _Voice
    folder: RunFolder
    model: LanguageModel | None
    job: Any
    source: TextSource | JobSource
    optimizer: Any
    choice: MeshChoice
    layout: Layout
    precision: str
    step: Step


def _prepare(config: TrainConfig, tell: _Voice, stack: ExitStack) -> _Run:
    job = load_job(config.model.job) if config.model.job is not None else None
    source = make_source(config, job, tell=tell)
    model = None
    if job is None:
        assert isinstance(source, TextSource)
        model = make_model(config.model.model, config.model.model_options, vocab_size=source.vocab_size)
        job = language_job(model, batch_size=config.data.batch_size, num_tokens=config.data.num_tokens, packed=True)
    require_agreement({"processes": jax.process_count(), **_shared_options(config), **source.facts()})

    precision = config.placement.precision
    if precision == "auto":
        precision = "float32" if jax.devices()[0].platform == "cpu" else "mixed"
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    choice = _choose_mesh(config, model, job, optimizer, precision)
    tell(f"mesh: {choice.mesh} ({_devices()}); {choice.reason}")
    layout = state_layout(
        job, optimizer, create_mesh(choice.mesh), zero_axis=config.placement.zero_axis, precision=precision
    )
    tell(
        f"model: {config.model.job or config.model.model}, {_num_params(job):,} parameters; the state takes "
        f"{format_bytes(layout.bytes_per_device)} on each device"
    )
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=config.placement.view,
        num_minibatches=config.placement.minibatches,
        sync=None if config.placement.sync == "auto" else config.placement.sync,
        precision=precision,
        remat=config.placement.remat,
        clip=config.optimizer.clip,
    )
    step.batch_shardings(job.batch)  # a batch that cannot be split is an error before anything is written
    folder = RunFolder.open(config, name=config.model.model if config.model.job is None else "job")
    stack.callback(folder.close)
    return _Run(config, tell, folder, model, job, source, optimizer, choice, layout, precision, step)


def _run(run: _Run, stack: ExitStack) -> Result:
    config, folder, options = run.config, run.folder, run.config.run
    preemption = stack.enter_context(Preemption())
    log = stack.enter_context(
        RunLog(
            folder.path,
            rank=jax.process_index(),
            tensorboard=options.tensorboard,
            wandb=options.wandb,
            trackio=options.trackio,
            tell=run.tell,
        )
    )

    def told(kind: str, step: int, text: str) -> None:
        log.event(kind, step, text)
        run.tell(text)

    keep = Keep(last=options.keep_last, every=options.keep_every)
    checkpoints = Checkpoints(folder.checkpoints, keep=keep, tell=told)
    stack.callback(checkpoints.close)
    load_ahead()
    state, data_state = _first_state(run, checkpoints, log)
    start = int(state.step)
    if start >= options.steps:
        raise ConfigError(
            f"{folder.path} stands at step {start} of {options.steps} already.", hint="ask for more with --steps."
        )

    flops, peak = _flops_per_step(run), _peak_flops(run)
    run.folder.write_config(config)
    run.folder.write_facts(_facts(run, flops, peak))
    sampler = _Sampler(run, log) if run.model is not None and options.sample_tokens else None
    if sampler is not None and start == 0:
        sampler.show(state, "before")

    ledger = Ledger(folder.path / "ledger", tell=run.tell) if config.data.ledger else None

    def open_batches(data: Mapping[str, Any] | None, first_step: int) -> Any:
        return run.source.open(run.step, Place(data, first_step, ledger), seed=options.seed)

    def reopen(undone: Mapping[str, Any], after: Mapping[str, Any], first_step: int) -> Any:
        if ledger is not None:
            row = int(undone["next_row"])
            ledger.skip(row, int(after["next_row"]) - row, why="the loss rose, and the run was rolled back")
        return open_batches(after, first_step)

    progress = Progress(
        options.steps,
        start_step=start,
        tokens_per_step=_tokens_per_step(run.job),
        stream=sys.stderr if run.tell.shows else None,
        plain_seconds=options.log_seconds,
    )
    stack.callback(progress.close)
    run.tell.progress = progress
    watchdog = None
    if config.safety.hang:
        watchdog = stack.enter_context(
            Watchdog(
                config.safety.hang,
                tell=lambda text: told("hang", progress.step, text),
                folder=folder.path,
                rank=jax.process_index(),
            )
        )
    run.tell(f"training from step {start} to {options.steps} in {folder.path}; the first step compiles")
    loop = Loop(
        step=run.step,
        num_steps=options.steps,
        log=log,
        progress=progress,
        checkpoints=checkpoints,
        checkpoint_every=options.checkpoint_every,
        facts={"config": config.flat(), "model": repr(run.model) if run.model is not None else config.model.job},
        evaluate=_make_evaluation(run),
        eval_every=options.eval_every,
        learning_rates=_learning_rates(config),
        guard=NonFiniteGuard.for_layout(run.layout, limit=config.safety.max_skipped),
        preemption=preemption,
        watchdog=watchdog,
        profile=Profile(options.profile, folder.path / "profile") if options.profile else None,
        spikes=SpikeGuard(factor=config.safety.rollback) if config.safety.rollback else None,
        reopen=reopen,
        flops_per_step=flops,
        peak_flops=peak,
    )
    result = fit(loop, state, open_batches(data_state, start + 1))
    progress.close()
    run.tell.progress = None
    if sampler is not None and result.why != "preempted":
        sampler.show(result.state, "after")
    _end(run, log, result)
    return result


def _first_state(run: _Run, checkpoints: Checkpoints, log: RunLog) -> tuple[State, Mapping[str, Any] | None]:
    """Returns the state to begin with, and that of the data."""
    config = run.config
    if not run.folder.resumed:
        log.event("start", 0, f"started on {run.choice.mesh}")
        key = jax.random.key(config.run.seed)
        return init_state(run.job, run.optimizer, run.layout, key, precision=run.precision), None
    if checkpoints.latest() is None:
        log.rewind(0)
        run.tell("the run ended before its first checkpoint: it starts again")
        log.event("resume", 0, "no checkpoint was there: started again")
        key = jax.random.key(config.run.seed)
        return init_state(run.job, run.optimizer, run.layout, key, precision=run.precision), None
    restored = checkpoints.restore(run.layout)
    for note in restored.notes:
        run.tell(note)
    log.rewind(restored.step)
    text = f"resumed from the checkpoint of step {restored.step} on {run.choice.mesh}"
    log.event("resume", restored.step, text, notes=restored.notes)
    run.tell(text)
    return restored.state, restored.facts.get("data")


def _make_evaluation(run: _Run) -> Callable[[State], Mapping[str, float]] | None:
    count = run.config.run.eval_batches
    if not run.config.run.eval_every:
        return None
    step = make_eval_step(run.job, run.layout, view=run.config.placement.view, precision=run.precision)
    if run.source.evaluation(step, count) is None:
        run.tell("there are not enough rows to evaluate on: evaluation is left out")
        return None

    def evaluate(state: State) -> Mapping[str, float]:
        batches = run.source.evaluation(step, count)
        assert batches is not None
        sums: dict[str, float] = {}
        weight = 0.0
        for batch in batches:
            found = {name: float(value) for name, value in jax.device_get(step(state, batch.arrays)).items()}
            tokens = found.pop("tokens", 1.0)
            weight += tokens
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + tokens * value
        return {name: total / weight for name, total in sums.items()}

    return evaluate


class _Sampler:
    """Text that the model writes, before and after."""

    def __init__(self, run: _Run, log: RunLog) -> None:
        assert isinstance(run.source, TextSource)
        assert run.model is not None
        self.run, self.log = run, log
        self.tokenizer = run.source.tokenizer
        self.options = run.config.run
        self.prompt = self.tokenizer.encode(self.options.prompt)
        self.generate = make_sampler(
            run.model, window=len(self.prompt) + self.options.sample_tokens, precision=run.precision
        )

    def show(self, state: State, when: str) -> None:
        tokens = self.generate(
            state.params, self.prompt, self.options.sample_tokens, seed=self.options.seed, temperature=TEMPERATURE
        )
        text = self.tokenizer.decode(tokens)
        self.log.event("sample", int(state.step), text, prompt=self.options.prompt, when=when)
        shown = "".join(letter if letter.isprintable() or letter == "\n" else "\N{MIDDLE DOT}" for letter in text)
        self.run.tell(f"a sample {when} training:\n{_indented(self.options.prompt + shown)}")


def _end(run: _Run, log: RunLog, result: Result) -> None:
    if jax.process_index() != 0:
        return
    loss = result.metrics.get("eval/loss")
    text = {
        "finished": f"finished at step {result.step}",
        "preempted": f"stopped at step {result.step}, as asked; its checkpoint is written",
        "out of data": f"the data ended at step {result.step}",
    }[result.why]
    text += f"; evaluation loss {loss:.4f}" if loss is not None and result.why != "preempted" else ""
    log.event("preempted" if result.why == "preempted" else "finish", result.step, text)
    run.tell(text)
    if run.config.run.report:
        from meshwright.loop.report import build_report

        log.flush()
        run.tell(f"report: {build_report(run.folder.path)}")
    more = "" if result.why == "preempted" else f" --steps {2 * run.config.run.steps}"
    run.tell(f"to go on: {run.folder.resume_command}{more}")


def _choose_mesh(config: TrainConfig, model: Any, job: Any, optimizer: Any, precision: str) -> MeshChoice:
    named = config.placement.mesh if config.placement.mesh != "auto" else getattr(job, "mesh", None)
    if named is not None:
        return MeshChoice(named, "as asked." if config.placement.mesh != "auto" else "the job's own.")
    return choose_mesh(
        job,
        optimizer,
        num_devices=jax.device_count(),
        batch_size=int(jax.tree.leaves(job.batch)[0].shape[0]),
        memory=_device_memory(),
        precision=precision,
        heads=getattr(model, "num_kv_heads", None) or getattr(model, "num_heads", None),
    )


def _device_memory() -> int | None:
    """Returns the bytes of one device; simulated ones share the machine's."""
    limit = read_memory().limit
    if limit is not None or jax.devices()[0].platform != "cpu":
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def _facts(run: _Run, flops: float | None, peak: float | None) -> dict[str, Any]:
    """Returns what `run.json` holds."""
    devices = jax.devices()
    tokens = _tokens_per_step(run.job)
    return {
        "config": run.config.flat(),
        "mesh": dict(run.layout.mesh.shape),
        "mesh_reason": run.choice.reason,
        "layout": json.loads(run.layout.to_json()),
        "devices": [device.device_kind for device in devices],
        "device_kind": devices[0].device_kind,
        "num_processes": jax.process_count(),
        "versions": versions(),
        "num_params": _num_params(run.job),
        "flops_per_token": None if flops is None or not tokens else flops / tokens,
        "peak_flops": None if peak is None else peak / len(devices),
        "tokens_per_step": tokens,
    }


def _learning_rates(config: TrainConfig) -> np.ndarray:
    # All at once: asked for step by step, each would cost the loop a small program.
    schedule = make_schedule(config.optimizer, config.run.steps)
    return np.asarray(jax.vmap(schedule)(jax.numpy.arange(config.run.steps)))


def _flops_per_step(run: _Run) -> float | None:
    """Returns what a step needs: forward and backward, without what remat computes again."""

    def loss(params: Any, batch: Any) -> Any:
        value = run.job.loss(params, batch, None)[0]
        return value[0] if isinstance(value, tuple) else value

    counted = count_flops(jax.grad(loss), abstract_init(run.job.init), run.job.batch)
    return float(counted.model) or None


def _peak_flops(run: _Run) -> float | None:
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return None
    peak = chip.peak("float32" if run.precision == "float32" else "bfloat16")
    return None if peak is None else peak * run.layout.mesh.size


def _tokens_per_step(job: Any) -> int:
    leaves = jax.tree.leaves(job.batch)
    return int(np.prod(leaves[0].shape[:2])) if leaves else 0


def _num_params(job: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(abstract_init(job.init)))


def _shared_options(config: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in config.flat().items() if name not in NOT_OF_THE_RUN}


def _devices() -> str:
    devices = jax.devices()
    kind = "simulated CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} {kind}{several}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
