"""The model, the tokenizer and the parameters of a run, for programs that use its result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.checkpoint import Checkpoints, read_manifest
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import Layout
from meshwright.loop.choices import make_model
from meshwright.loop.config import TrainConfig, read_config
from meshwright.loop.origin import model_of_fact, with_own_tokenizer
from meshwright.loop.run_dir import CONFIG
from meshwright.mesh.build import create_mesh
from meshwright.models.language import LanguageModel
from meshwright.parallel.heads import heads_fit
from meshwright.train import LoraSettings, RunState, language_job, merged, state_layout
from meshwright.train.job_loading import load_job
from meshwright.train.lora import adapt_job
from meshwright.train.state import make_state, params_layout
from meshwright.types import PyTree


@dataclass(frozen=True)
class SavedRun:
    """A run with a checkpoint, before any parameter is read.

    Args:
        stored: precision in which the run stored its parameters.
        step: the step to read (default: the last good one).
        lora: settings of the run's adapters, if it has any.
    """

    folder: Path
    config: TrainConfig
    model: LanguageModel
    tokenizer: Tokenizer
    stored: str
    step: int | None
    lora: LoraSettings | None = None

    def restore(self, mesh: Mesh) -> tuple[PyTree, int, Sequence[str]]:
        """Returns the parameters on a mesh, their step and everything unusual; verifies every byte first.

        Adapters of a run with `--lora` are merged into their matrices.
        """
        options, adapters = self.config.adapt, self.lora
        job = adapt_job(self._job(), freeze=options.freeze, train=options.train, adapters=adapters)
        stored = state_layout(job, _no_optimizer(), mesh, precision=self.stored)
        restored = Checkpoints(self.folder / "checkpoints").restore(stored, step=self.step, cast=True, part="params")
        params = restored.state
        if adapters is not None:
            whole = params_layout(self.layout(mesh))

            def merge(params: PyTree) -> PyTree:
                plain = merged(params, adapters)
                return jax.tree.map(lambda leaf, known: leaf.astype(known.dtype), plain, whole.abstract)

            params = jax.jit(merge, out_shardings=whole.shardings)(params)
        notes = [*restored.notes]
        if options.ema is not None:
            notes.append("the run keeps a moving average of its parameters; this uses the parameters themselves")
        return params, restored.step, notes

    def state(self, params: PyTree) -> RunState:
        """Returns a state that fits `layout` and holds the parameters."""

        def rest(key: Any) -> RunState:
            return dataclasses.replace(
                make_state(self._job(), _no_optimizer(), key, precision=self.stored), params=None
            )

        state: RunState = dataclasses.replace(jax.jit(rest)(jax.random.key(0)), params=params)
        return state

    def layout(self, mesh: Mesh) -> Layout:
        """Returns the layout of a state of the run, without an optimizer."""
        return state_layout(self._job(), _no_optimizer(), mesh, precision=self.stored)

    def _job(self) -> Any:
        return language_job(self.model, batch_size=1, num_tokens=1)


def open_run(folder: str | os.PathLike[str], *, step: int | None = None) -> SavedRun:
    """Returns the run in a folder; raises if it has no checkpoint or is not a language model.

    Args:
        step: the step to read (default: the last good one).

    Example:
        >>> open_run("nowhere")
        Traceback (most recent call last):
        ...
        meshwright.errors.ConfigError: 'nowhere' holds no run...
    """
    place = Path(folder)
    if not str(folder).strip() or not os.path.isfile(place / CONFIG):
        raise ConfigError(f"{str(folder)!r} holds no run.", hint="pass the folder that holds config.yaml.")
    config = with_own_tokenizer(read_config(place / CONFIG), place)
    steps = Checkpoints(place / "checkpoints").steps()
    if not steps:
        raise CheckpointError(f"{place} has no finished checkpoint.", hint="train longer, or lower --checkpoint-every.")
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{place} has no finished step {step}.", hint=f"use one of: {', '.join(map(str, steps))}."
        )
    facts = _facts(place / "checkpoints", steps if step is None else [step])
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = _model(config, facts.get("model"), tokenizer)
    precision = facts.get("precision")
    stored = "bfloat16" if precision == "bfloat16" else "float32"
    held = facts.get("lora")
    return SavedRun(place, config, model, tokenizer, stored, step, None if held is None else LoraSettings(**held))


def _facts(folder: Path, steps: Sequence[int]) -> Mapping[str, Any]:
    """Returns the facts of the last step whose manifest can be read; `restore` passes over damaged steps as well."""
    for step in sorted(steps, reverse=True):
        try:
            return read_manifest(folder / str(step)).facts
        except CheckpointError:
            if step == min(steps):
                raise
    raise AssertionError("there are no steps")


def _model(config: TrainConfig, fact: Any, tokenizer: Tokenizer) -> LanguageModel:
    known = model_of_fact(fact)
    if known is not None:
        return known
    if config.model.job is None:
        return make_model(config.model.model, config.model.model_options, vocab_size=tokenizer.vocab_size)
    model = getattr(load_job(config.model.job), "model", None)
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            f"{config.model.job} is not a language model of Meshwright.",
            hint="use a job of mw.language_job(model, ...), or a built-in --model.",
        )
    return model


def _no_optimizer() -> Any:
    import optax

    return optax.sgd(0.0)


def mesh_to_use(model: LanguageModel, mesh: str | None, *, devices: int | None = None) -> Mesh:
    """Returns a mesh by its string, or the default: all accelerators that can split the heads; one CPU device.

    Example:
        >>> from meshwright.models import Decoder
        >>> dict(mesh_to_use(Decoder.named("tiny"), None).shape)
        {'tp': 1}
    """
    count = devices or jax.device_count()
    if mesh is not None:
        return create_mesh(mesh, devices=devices)
    heads, kv_heads = getattr(model, "num_heads", 1), getattr(model, "num_kv_heads", None)
    ways = 1
    if jax.devices()[0].platform != "cpu":
        fits = [n for n in range(1, count + 1) if heads_fit(heads, n) and heads_fit(kv_heads or heads, n, shared=True)]
        ways = max(fits)
    return create_mesh(f"tp:{ways}", devices=ways)


def precision_to_use(name: str) -> str:
    """Returns a compute precision: "auto" is float32 on CPUs and mixed elsewhere.

    Example:
        >>> precision_to_use("auto")
        'float32'
    """
    if name != "auto":
        return name
    return "float32" if jax.devices()[0].platform == "cpu" else "mixed"
