"""The model, the tokenizer and the parameters of a run, for programs that use its result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from meshwright.checkpoint import Checkpoints, Restored
from meshwright.data import Tokenizer, load_tokenizer
from meshwright.errors import CheckpointError, ConfigError, LayoutError
from meshwright.layout import Layout
from meshwright.loop.folder.remote_run import read_remote
from meshwright.loop.folder.run_dir import CONFIG
from meshwright.loop.settings.choices import make_model
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.loop.weights.init_origin import model_of_fact, with_own_tokenizer
from meshwright.mesh.build import create_mesh
from meshwright.models.language import LanguageModel
from meshwright.parallel.heads import heads_fit
from meshwright.remote import is_url
from meshwright.train import LoraSettings, RunState, language_job, merged, state_layout
from meshwright.train.fine_tuning.lora import adapt_job
from meshwright.train.jobs.job_loading import load_job
from meshwright.train.state import make_state, only_trainable, params_layout, trainable_leaves, with_frozen
from meshwright.types import PyTree

WhichWeights = Literal["auto", "ema", "last"]


@dataclass(frozen=True)
class SavedRun:
    """A run with a checkpoint, before any parameter is read.

    Args:
        stored: precision in which the run stored its parameters.
        step: the step to read (default: the last good one).
        lora: settings of the run's adapters, if it has any.
        checkpoints: the run's checkpoints (default: those in its folder).
    """

    folder: Path
    config: TrainConfig
    model: LanguageModel
    tokenizer: Tokenizer
    stored: str
    step: int | None
    lora: LoraSettings | None = None
    checkpoints: Checkpoints | None = None

    def restore(self, mesh: Mesh, *, weights: WhichWeights = "auto") -> tuple[PyTree, int, Sequence[str]]:
        """Returns the parameters on a mesh, their step and everything unusual; verifies every byte first.

        Adapters of a run with `--lora` are merged into their matrices.

        Args:
            weights: "ema", the moving average that a run with `--ema` keeps; "last", the parameters themselves; "auto",
                the average if there is one.
        """
        options, adapters = self.config.adapt, self.lora
        if weights == "ema" and options.ema is None:
            raise ConfigError(
                f"{self.folder} keeps no moving average of its parameters.",
                hint="use the last ones (--weights last), or train with --ema 0.999.",
            )
        ema = None if weights == "last" else options.ema
        job = adapt_job(self._job(), freeze=options.freeze, train=options.train, adapters=adapters)
        stored = self._laid_out(job, mesh, ema=ema)
        restored, params = self._read(job, stored, has_average=ema is not None)
        if adapters is not None:
            whole = params_layout(self.layout(mesh))

            def merge(params: PyTree) -> PyTree:
                plain = merged(params, adapters)
                return jax.tree.map(lambda leaf, known: leaf.astype(known.dtype), plain, whole.abstract)

            params = jax.jit(merge, out_shardings=whole.shardings)(params)
        notes = [*restored.notes]
        if options.ema is not None:
            used = "uses the last parameters" if ema is None else f"uses their average (decay {ema:g})"
            notes.append(f"the run keeps a moving average of its parameters; this {used}")
        return params, restored.step, notes

    def _read(self, job: Any, stored: Layout, *, has_average: bool) -> tuple[Restored, PyTree]:
        """Returns the parameters of a checkpoint, with averages in place of the trained ones if it has them."""
        checkpoints = self.checkpoints or Checkpoints(self.folder / "checkpoints")
        if not has_average:
            found = checkpoints.restore(stored, step=self.step, cast=True, part="params")
            return found, found.state
        own = params_layout(stored)
        trainable = trainable_leaves(job, own.abstract)
        averages = checkpoints.restore(stored, step=self.step, cast=True, part="ema")
        params = own.abstract
        if not all(trainable):  # frozen parameters have no average
            params = checkpoints.restore(stored, step=averages.step, cast=True, part="params").state
        learned = only_trainable(own.abstract, trainable)
        cast = jax.tree.map(lambda average, leaf: average.astype(leaf.dtype), averages.state, learned)
        return averages, with_frozen(cast, params, trainable)

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
        return self._laid_out(self._job(), mesh)

    def _laid_out(self, job: Any, mesh: Mesh, **options: Any) -> Layout:
        try:
            return state_layout(job, _no_optimizer(), mesh, precision=self.stored, **options)
        except LayoutError as error:
            problems = str(error).partition("\nhint:")[0]
            hint = "use a --mesh whose axes divide them; only training stores them padded."
            raise LayoutError(f"{self.folder}: {problems}", hint=hint) from None

    def _job(self) -> Any:
        return language_job(self.model, batch_size=1, num_tokens=1)


def open_run(folder: str | os.PathLike[str], *, step: int | None = None) -> SavedRun:
    """Returns the run in a folder or at a URL; raises if it has no checkpoint or is not a language model.

    Args:
        step: the step to read (default: the last good one).

    Example:
        >>> open_run("nowhere")
        Traceback (most recent call last):
        ...
        meshwright.errors.ConfigError: 'nowhere' holds no run...
    """
    place, checkpoints = Path(folder), Checkpoints(Path(folder) / "checkpoints")
    if is_url(str(folder)):
        place, checkpoints = read_remote(str(folder))
    if not str(folder).strip() or not os.path.isfile(place / CONFIG):
        raise ConfigError(f"{str(folder)!r} holds no run.", hint="pass the folder that holds config.yaml.")
    config = with_own_tokenizer(read_config(place / CONFIG), place)
    steps = checkpoints.steps()
    if not steps:
        raise CheckpointError(
            f"{folder} has no finished checkpoint.", hint="train longer, or lower --checkpoint-every."
        )
    if step is not None and step not in steps:
        raise CheckpointError(
            f"{folder} has no finished step {step}.", hint=f"use one of: {', '.join(map(str, steps))}."
        )
    facts = _facts(checkpoints, steps if step is None else [step])
    tokenizer = load_tokenizer(config.data.tokenizer)
    model = _model(config, facts.get("model"), tokenizer)
    precision = facts.get("precision")
    stored = "bfloat16" if precision == "bfloat16" else "float32"
    held = facts.get("lora")
    lora = None if held is None else LoraSettings(**held)
    return SavedRun(place, config, model, tokenizer, stored, step, lora, checkpoints)


def _facts(checkpoints: Checkpoints, steps: Sequence[int]) -> Mapping[str, Any]:
    """Returns the facts of the last step whose manifest can be read; `restore` passes over damaged steps as well."""
    for step in sorted(steps, reverse=True):
        try:
            return checkpoints.manifest(step).facts
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
