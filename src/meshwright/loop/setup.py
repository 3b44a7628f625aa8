"""What is decided before the first step: data, model, mesh, layout, step and folder."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from meshwright.distributed.agreement import as_first, together
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.loop.config import TrainConfig
from meshwright.loop.logging.memory_use import read_memory
from meshwright.loop.logging.progress import Progress, steady
from meshwright.loop.mesh_choice import MeshChoice, choose_mesh
from meshwright.loop.model_choice import make_model
from meshwright.loop.optimizers import make_optimizer
from meshwright.loop.run_dir import RunFolder
from meshwright.loop.safety.preemption import check_early
from meshwright.loop.sources import JobSource, TextSource, make_source, rows_of
from meshwright.mesh.build import create_mesh
from meshwright.models.language import LanguageModel
from meshwright.train import Step, language_job, make_train_step, require_agreement, state_layout
from meshwright.train.job import abstract_init, check_axes, load_job


class Voice:
    """Tells what is done, on process 0: above the progress line while there is one."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.say = say or (lambda text: print(text, file=steady(sys.stderr), flush=True))
        self.shows = say is None and jax.process_index() == 0
        self.progress: Progress | None = None

    def __call__(self, text: str) -> None:
        check_early()
        if jax.process_index() != 0:
            return
        if self.progress is not None and self.shows:
            self.progress.say(text)
        else:
            self.say(text)


@dataclass(frozen=True)
class Prepared:
    """Everything that was decided before the first step."""

    config: TrainConfig
    tell: Voice
    folder: RunFolder
    model: LanguageModel | None
    job: Any
    source: TextSource | JobSource
    optimizer: Any
    choice: MeshChoice
    layout: Layout
    precision: str
    step: Step


def prepare(config: TrainConfig, tell: Voice, stack: ExitStack) -> Prepared:
    """Decides everything, on all processes alike; nothing is written but the run's empty folder."""

    def load() -> tuple[Any, TextSource | JobSource]:
        job = load_job(config.model.job) if config.model.job is not None else None
        if job is None:  # wrong options are told before any text is read
            make_model(config.model.model, config.model.model_options)
        return job, make_source(config, job, tell=tell)

    job, source = together("loading the job and its data", load)
    model = None
    if job is None:
        assert isinstance(source, TextSource)
        model = make_model(config.model.model, config.model.model_options, vocab_size=source.vocab_size)
        job = language_job(model, batch_size=config.data.batch_size, num_tokens=config.data.num_tokens, packed=True)
    require_agreement({"processes": jax.process_count(), **shared_options(config), **source.facts()})

    precision = config.placement.precision
    if precision == "auto":
        precision = "float32" if jax.devices()[0].platform == "cpu" else "mixed"
    optimizer = make_optimizer(config.optimizer, config.run.steps)
    choice = together("choosing a mesh", lambda: _choose_mesh(config, model, job, optimizer, precision))
    choice = MeshChoice(as_first(choice.mesh), as_first(choice.reason))
    tell(f"mesh: {choice.mesh} ({_devices()}); {choice.reason}")
    mesh = create_mesh(choice.mesh)
    check_axes(job, mesh.shape)
    layout = state_layout(job, optimizer, mesh, zero_axis=config.placement.zero_axis, precision=precision)
    tell(
        f"model: {config.model.job or config.model.model}, {num_params(job):,} parameters; the state takes "
        f"{format_bytes(layout.bytes_per_device)} on each device; precision {precision}"
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
        overlap=config.placement.overlap,
    )
    _require_rows(step, job, config.placement.minibatches)  # before anything is written
    folder = RunFolder.open(config, name=config.model.model if config.model.job is None else "job")
    stack.callback(folder.close)
    return Prepared(config, tell, folder, model, job, source, optimizer, choice, layout, precision, step)


def _choose_mesh(config: TrainConfig, model: Any, job: Any, optimizer: Any, precision: str) -> MeshChoice:
    named = config.placement.mesh if config.placement.mesh != "auto" else getattr(job, "mesh", None)
    if named is not None:
        return MeshChoice(named, "as asked." if config.placement.mesh != "auto" else "the job's own.")
    return choose_mesh(
        job,
        optimizer,
        num_devices=jax.device_count(),
        batch_size=rows_of(job),
        minibatches=config.placement.minibatches,
        memory=_device_memory(),
        precision=precision,
        heads=getattr(model, "num_heads", None),
        kv_heads=getattr(model, "num_kv_heads", None),
    )


def _device_memory() -> int | None:
    """Returns the bytes of one device; simulated ones share the machine's."""
    limit = read_memory().limit
    if limit is not None or jax.devices()[0].platform != "cpu":
        return limit
    try:
        # Of all processes, which may be on one machine.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()
    except (AttributeError, ValueError, OSError):  # not on this system
        return None


def _require_rows(step: Step, job: Any, minibatches: int) -> None:
    """Raises where a batch cannot be split over devices and minibatches."""
    step.batch_shardings(job.batch)
    rows = rows_of(job)
    parts = minibatches * math.prod(step.layout.mesh.shape[axis] for axis in step.row_axes)
    if rows % parts:
        down, up = rows // parts * parts, -(-rows // parts) * parts
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {minibatches} minibatches for {parts // minibatches} devices.",
            hint=f"--batch-size {f'{down} or {up}' if down else up}.",
        )


def shared_options(config: TrainConfig) -> dict[str, Any]:
    """Returns the options that are the same on all processes."""
    own = ("coordinator", "num_processes", "process_id")
    return {name: value for name, value in config.flat().items() if name not in own}


def num_params(job: Any) -> int:
    """Returns how many parameters a job has; nothing is computed."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_init(job.init)))


def _devices() -> str:
    devices = jax.devices()
    kind = "simulated CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} {kind}{several}"
