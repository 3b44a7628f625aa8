"""The decisions about a run: model, data, mesh, layout, step and folder, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshwright.distributed.agreement import agree, as_first, together
from meshwright.errors import ConfigError, MeshError
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.loop.folder.remote_run import RemoteRun
from meshwright.loop.folder.run_dir import PER_PROCESS, RunFolder
from meshwright.loop.logging.progress import Voice
from meshwright.loop.logging.run_stats import num_params
from meshwright.loop.settings.choices import MeshChoice, choose_mesh, device_memory, make_model
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.optimizers import OptimizerChoice, choose_optimizer, muon_line
from meshwright.loop.settings.pipeline_options import pipeline_line, require_rows, with_pipeline
from meshwright.loop.sources import HeldOut, Source, make_held_out, make_source, rows_of, with_rows
from meshwright.loop.text_source import MixedSource, TextSource
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
from meshwright.models.execution import Execution
from meshwright.models.language import LanguageModel
from meshwright.train import Step, language_job, make_train_step, state_layout
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.job import check_axes
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.padding import padding_suggested
from meshwright.train.precision import Precision

# Up to as many documents in a row, cuDNN was measured to take lengths in less than half of the time that a mask takes
# (benchmarks/results/packed_attention.md).
_MOST_SEGMENTS = 16


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
    dtypes: Precision
    step: Step
    folder: RunFolder
    origin: InitOrigin | None = None
    remote: RemoteRun | None = None

    @property
    def optimizer(self) -> Any:
        return self.updates.optimizer


def decide(config: TrainConfig, tell: Voice, remote: RemoteRun | None) -> RunSetup:
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
    dtypes = config.dtypes(precision)
    updates = together("choosing an optimizer", lambda: choose_optimizer(config.optimizer, config.run.steps, job))
    optimizer = updates.optimizer
    if updates.text:
        tell(updates.text)
    choice = together("choosing a mesh", lambda: _choose_mesh(config, model, job, optimizer, dtypes))
    choice = MeshChoice(as_first(choice.mesh), as_first(choice.reason))
    tell(f"mesh: {choice.mesh} ({_devices()}); {choice.reason}")
    try:
        mesh = create_mesh(choice.mesh)
    except MeshError:
        parse_mesh(choice.mesh).resolve(jax.device_count())  # raises with a hint for the command line
        raise
    # Report a misspelled axis before the layout warns about it; the step checks the axes of the layout itself.
    check_axes(job, {axis: size for axis, size in mesh.shape.items() if axis != config.placement.zero_axis})
    zero_axis, pad, ema = config.placement.zero_axis, config.placement.pad or False, config.adapt.ema
    with padding_suggested(job):
        layout = state_layout(job, optimizer, mesh, zero_axis=zero_axis, precision=dtypes, pad=pad, ema=ema)
    if origin is not None and origin.weights is not None:
        lora = getattr(job, "lora", None)
        together("comparing --init-from with the model", lambda: compare_weights(origin, layout, config.init, lora))
    named = config.model.job or (config.model.model if origin is None else origin.name(config.model.model))
    tell(
        f"model: {named}, {num_params(job):,} parameters; the state takes "
        f"{format_bytes(layout.bytes_per_device)} per device; precision {precision}"
    )
    if (muons := muon_line(layout, job)) is not None:
        tell(muons)
    step = make_train_step(
        job,
        optimizer,
        layout,
        view=None if config.placement.view == "auto" else config.placement.view,
        num_minibatches=config.placement.minibatches,
        sync=None if config.placement.sync == "auto" else config.placement.sync,
        precision=dtypes,
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
        config,
        tell,
        model,
        job,
        source,
        held_out,
        updates,
        choice,
        layout,
        precision,
        dtypes,
        step,
        folder,
        origin,
        remote,
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
        run=Execution(max_segments=segments_to_pack(source.most_segments, model, platform=jax.default_backend())),
        batch_size=source.batch_size,
        num_tokens=config.data.num_tokens,
        packed=True,
        num_sources=len(source.sources) if isinstance(source, MixedSource) else None,
    )
    return model, job, source, held_out


def segments_to_pack(most: int | None, model: Any, *, platform: str) -> int | None:
    """Returns `Execution.max_segments` for rows of at most `most` documents, where their lengths save time on GPUs.

    Example:
        >>> from meshwright.models import Decoder
        >>> model = Decoder.named("tiny")
        >>> [segments_to_pack(most, model, platform="gpu") for most in (4, 17, None)]
        [4, None, None]
    """
    # Lengths with a sliding window have not run on a GPU.
    gains = platform == "gpu" and getattr(model, "sliding_window", None) is None
    return most if gains and most is not None and most <= _MOST_SEGMENTS else None


def _choose_mesh(config: TrainConfig, model: Any, job: Any, optimizer: Any, precision: Precision) -> MeshChoice:
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
