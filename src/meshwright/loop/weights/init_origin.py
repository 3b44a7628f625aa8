"""The origin of a run's weights (`--init-from`): its model, its tokenizer, and their copy in the run folder.

A resumed run uses the copy, so the original may change or disappear; weights come from its own checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.convert.config_json import CONFIG, read_model_json
from meshwright.checkpoint.convert.import_export import COPY
from meshwright.checkpoint.convert.pretrained import copy_tokenizer
from meshwright.checkpoint.manifest import model_fact
from meshwright.distributed.agreement import as_first, gather_texts, together
from meshwright.errors import CheckpointError, ConfigError, MeshwrightError
from meshwright.files import write_atomically
from meshwright.layout import Layout
from meshwright.loop.folder.run_dir import CONFIG as RUN
from meshwright.loop.settings.choices import DEFAULT_MODEL, FAMILIES, change_model
from meshwright.loop.settings.config import TrainConfig, read_config
from meshwright.loop.settings.init_options import InitOptions
from meshwright.loop.weights.initial_weights import StepWeights, Weights, choose_leaves, open_weights
from meshwright.mesh.build import create_mesh
from meshwright.models.language import LanguageModel
from meshwright.specs import round_up
from meshwright.train import LoraSettings

MODEL, TOKENIZER = "model.json", "tokenizer.json"
_CLASSES = {kind.__name__: kind for kind in FAMILIES.values()}


@dataclass(frozen=True)
class InitOrigin:
    """The model and tokenizer of `--init-from`.

    Args:
        folder: `--init-from`, or its copy in a run that is resumed.
        model: the model, or None if a checkpoint does not name a built-in one.
        pretrained: the fact about the original model folder, for exports.
        weights: the weights, or None in a run that is resumed.
        tokenizer: path of the tokenizer file, or None for bytes.
    """

    folder: Path
    model: LanguageModel | None
    pretrained: Mapping[str, Any] | None
    weights: Weights | None
    tokenizer: str | None

    def name(self, model: str) -> str:
        """Returns a short name of the model: the option `--model`, or the family."""
        if model != "auto":
            return model
        kind = type(self.model).__name__.lower()
        return kind if self.pretrained is None else str(self.pretrained["config"].get("model_type", kind))

    def changed_model(
        self,
        options: tuple[str, ...],
        *,
        vocab_size: int | None = None,
        mesh: str = "auto",
        tell: Callable[[str], None] | None = None,
    ) -> LanguageModel:
        """Returns the model with some fields changed, and a vocabulary that the tokenizer and the mesh need.

        Args:
            vocab_size: vocabulary size of the tokenizer.
            mesh: the option `--mesh`.
            tell: called with a line of text if the vocabulary grows.
        """
        if self.model is None:
            raise ConfigError("--init-from does not name a built-in model.", hint="pass --model or --job.")
        model = change_model(self.model, options, vocab_size=vocab_size, name="the model of --init-from")
        if self.weights is not None and mesh != "auto":  # a resumed run keeps its vocabulary
            ways = create_mesh(mesh).shape.get("tp", 1)
            if model.vocab_size % ways:
                model = dataclasses.replace(model, vocab_size=round_up(model.vocab_size, math.lcm(128, ways)))
        if tell is not None and model.vocab_size != self.model.vocab_size:
            old, new = self.model.vocab_size, model.vocab_size
            tell(f"vocabulary: {old} tokens, padded to {new}; logits of padding start at 0")
        return model

    def copy_to(self, run: Path) -> None:
        """Writes the copy that a resumed run uses."""
        if self.weights is None:  # this is the copy
            return
        target = run / COPY
        target.mkdir(parents=True, exist_ok=True)
        if self.pretrained is not None:
            copy_tokenizer(self.folder, target)
            write_atomically(target / CONFIG, json.dumps(self.pretrained["config"], indent=1) + "\n")
        if self.tokenizer is not None:  # a run's own tokenizer may be another than its origin's
            write_atomically(target / TOKENIZER, Path(self.tokenizer).read_text(encoding="utf-8"))
        fact = None if self.model is None else model_fact(self.model)
        write_atomically(target / MODEL, json.dumps({"model": fact, "pretrained": self.pretrained}, indent=1) + "\n")


def without_auto(config: TrainConfig, origin: InitOrigin | None) -> tuple[TrainConfig, str | None]:
    """Returns the options with `auto` resolved, so that a resumed run keeps them, and the origin's tokenizer if used.

    Example:
        >>> config, _ = without_auto(TrainConfig(), None)
        >>> config.model.model, config.data.tokenizer
        ('decoder-small', 'bytes')
    """
    if config.model.job is not None:
        return config, None
    if origin is None and config.model.model == "auto":
        config = config.changed({"model": DEFAULT_MODEL})
    if config.data.tokenizer != "auto":
        return config, None
    tokenizer = None if origin is None else origin.tokenizer
    return config.changed({"tokenizer": tokenizer or "bytes"}), tokenizer


def copy_of_tokenizer(run: Path) -> Path:
    """Returns the path of the tokenizer that `Origin.copy_to` writes.

    Example:
        >>> copy_of_tokenizer(Path("/runs/a"))
        PosixPath('/runs/a/init/tokenizer.json')
    """
    return (run / COPY / TOKENIZER).absolute()


def find_origin(config: TrainConfig) -> InitOrigin | None:
    """Returns the origin of a run, from the run's copy if it is resumed, or None without `--init-from`.

    All processes call it. Weights that they choose or fetch together are opened outside of `together`.
    """
    if config.init.init_from is None:
        return None
    copied = together("reading the copy of --init-from", lambda: _copied(config))
    if all(gather_texts("" if copied is None else "copied")):
        return copied
    weights = open_weights(config.init)
    return together("reading --init-from", lambda: _origin_of(weights))


def _copied(config: TrainConfig) -> InitOrigin | None:
    copy = None if config.run.run is None else Path(config.run.run) / COPY
    if not config.run.resume or copy is None or not (copy / MODEL).is_file():
        return None
    held = read_model_json(copy / MODEL)
    return InitOrigin(copy, model_of_fact(held.get("model")), held.get("pretrained"), None, _tokenizer_in(copy))


def _origin_of(weights: Weights) -> InitOrigin:
    folder = weights.folder
    model = weights.model if isinstance(weights.model, LanguageModel) else model_of_fact(weights.model)
    tokenizer = _tokenizer_in(folder)
    if isinstance(weights, StepWeights):
        run = next((place for place in (folder, *folder.absolute().parents[:2]) if (place / RUN).is_file()), None)
        if run is not None:
            folder, tokenizer = run / COPY, _tokenizer_of(run)
    return InitOrigin(folder, model, weights.pretrained, weights, tokenizer)


def _tokenizer_in(folder: Path) -> str | None:
    return str(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None


def _tokenizer_of(run: Path) -> str | None:
    """Returns the path of a run's tokenizer, or None for bytes."""
    named = with_own_tokenizer(read_config(run / RUN), run).data.tokenizer
    if named in ("auto", "bytes"):
        return None
    if not Path(named).is_file():
        raise ConfigError(
            f"--init-from: the tokenizer of {run}, {named}, does not exist.", hint="pass it with --tokenizer."
        )
    return named


def with_own_tokenizer(config: TrainConfig, run: Path) -> TrainConfig:
    """Returns the options of a run whose folder may have moved: its copy of the tokenizer is in the folder itself."""
    named, own = Path(config.data.tokenizer), copy_of_tokenizer(run)
    if named.parts[-2:] == own.parts[-2:] and not named.is_file() and own.is_file():
        return config.changed({"tokenizer": str(own)})
    return config


def as_on_first(config: TrainConfig) -> TrainConfig:
    """Returns the options as if all processes had the run folder of process 0, which they may not."""
    own, tokenizer = config.run.run, config.data.tokenizer
    if own is None:
        return config
    first = as_first(own)
    inside = tokenizer == str(copy_of_tokenizer(Path(own)))
    tokenizer = str(copy_of_tokenizer(Path(first))) if inside else tokenizer
    return config.changed({"run": first, "tokenizer": tokenizer, "local_run": None})


def compare_weights(origin: InitOrigin, layout: Layout, options: InitOptions, lora: LoraSettings | None) -> None:
    """Raises if the weights do not fit the run's parameters; a whole state is compared when it is restored.

    Args:
        lora: the settings of the run's adapters, if it has any.
    """
    assert origin.weights is not None
    held = origin.weights.lora
    if options.init_adapters is not None and (held is not None or options.init_part == "all"):
        raise ConfigError(
            "--init-adapters needs a base model without adapters in --init-from.",
            hint="pass the base model, or merge with `meshwright checkpoint convert`, or leave out --init-adapters.",
        )
    if held is not None and lora is None:
        raise ConfigError(
            "--init-from holds adapters, but this run has none.",
            hint="merge them with `meshwright checkpoint convert RUN FOLDER` and start from FOLDER, or add --lora.",
        )
    if held is not None and lora is not None and (held["rank"], held["alpha"]) != (lora.rank, lora.alpha):
        raise ConfigError(
            f"--init-from holds adapters with rank={held['rank']},alpha={held['alpha']:g}; --lora has "
            f"rank={lora.rank},alpha={lora.alpha:g}.",
            hint="use the same rank and alpha, or merge the adapters with `meshwright checkpoint convert`.",
        )
    if options.init_part == "params":
        choose_leaves(origin.weights, layout, options)


def model_of_fact(fact: Any) -> LanguageModel | None:
    """Returns the built-in model with this fact, or None for others.

    Example:
        >>> from meshwright.models import Decoder
        >>> model_of_fact(model_fact(Decoder.named("tiny"))) == Decoder.named("tiny")
        True
    """
    if not isinstance(fact, Mapping) or fact.get("class") not in _CLASSES:
        return None
    kind = _CLASSES[fact["class"]]
    known = {field.name for field in dataclasses.fields(kind)}
    fields = fact.get("fields", {})
    try:
        if set(fields) - known:
            raise TypeError(f"unknown fields {', '.join(sorted(set(fields) - known))}")
        return kind(**fields)
    except (TypeError, MeshwrightError) as error:
        raise CheckpointError(f"the checkpoint names a model that cannot be made: {error}") from None
