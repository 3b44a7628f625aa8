"""The configuration of a run: frozen dataclasses, read from presets, YAML files and the command line.

Groups only order the options. Their names are unique, so a file and the command line are flat: `learning_rate: 1e-3`,
`--learning-rate 1e-3`. What comes later wins: defaults, preset, file, command line.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class ModelOptions:
    """What is trained."""

    model: str = "decoder-small"
    """A model of ours by name: decoder-SIZE or xlstm-SIZE."""
    model_options: tuple[str, ...] = ()
    """Fields of the model to change, such as num_layers=4 dropout=0.1."""
    job: str | None = None
    """A job of your own instead, as module:attribute or file.py:attribute."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _not_empty(self, "job")
        if self.job is not None and self.model_options:
            raise ConfigError("model_options change a model of ours, and a job was named.", hint="leave one out.")


@dataclass(frozen=True)
class DataOptions:
    """What it is trained on."""

    data: str | None = None
    """A file, folder or glob of text, .jsonl or .array_record. Left out: the sources of Python's standard library."""
    text_field: str = "text"
    """The field of a JSON line that holds the text."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json of Hugging Face's tokenizers."""
    batch_size: int = 16
    """Rows per step, over all devices."""
    num_tokens: int = 128
    """Tokens per row."""
    validation: float = 0.05
    """The share of the documents that is kept for evaluation."""
    epochs: int | None = None
    """Stop when every row was seen so often; without it, start again, in a new order."""
    data_cache: str | None = None
    """Where tokens are kept; a folder meshwright in the user's cache by default."""
    ledger: bool = False
    """Write down which rows each step used; `meshwright ledger RUN` proves that none was lost or repeated."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _positive(self, "batch_size", "num_tokens", "epochs")
        _not_empty(self, "data", "tokenizer", "data_cache")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"validation is {self.validation}.", hint="a share of the documents, 0 up to below 1.")


@dataclass(frozen=True)
class OptimizerOptions:
    """How it learns."""

    optimizer: Literal["adamw", "adafactor", "lion", "sgd"] = "adamw"
    """One of optax; what it keeps is split like the parameters."""
    learning_rate: float = 3e-3
    """At its highest, after the warmup."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls from there."""
    warmup: int = 20
    """Steps in which the learning rate rises to it."""
    final_learning_rate: float = 0.1
    """Where the schedule ends, as a share of the learning rate."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases are left alone."""
    beta1: float = 0.9
    """How slowly the mean of gradients moves; the momentum of sgd."""
    beta2: float = 0.95
    """How slowly the mean of their squares moves."""
    clip: float | None = 1.0
    """The largest norm of all gradients together."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        for name in ("learning_rate", "final_learning_rate", "weight_decay", "beta1", "beta2"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value}.", hint="a finite number, not below 0.")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}.", hint="a number below 1.")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}.", hint="a number of steps, 0 for none.")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip is {self.clip}.", hint="a number above 0, or null.")


@dataclass(frozen=True)
class PlacementOptions:
    """Where and how it runs."""

    mesh: str = "auto"
    """Such as dp:2,fsdp:2,tp:2; auto chooses one and says why."""
    devices: int | None = None
    """How many CPU devices to simulate in each process, where there is no accelerator; 8 in all by default."""
    view: Literal["local", "global"] = "local"
    """Who communicates: our layers, or XLA."""
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto"
    """auto: float32 on CPUs, mixed elsewhere."""
    remat: Literal["none", "dots", "full", "offload"] = "none"
    """What the backward pass computes again."""
    minibatches: int = 1
    """Parts in which a batch is computed, one after the other."""
    sync: Literal["auto", "every", "hybrid", "once"] = "auto"
    """How often the devices exchange the gradients of minibatches."""
    zero_axis: str | None = None
    """Splits the optimizer's statistics along this axis too (ZeRO-1)."""
    overlap: bool = True
    """Asks the compiler for what hides collectives behind matmuls on the chips there are."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _positive(self, "devices", "minibatches")


@dataclass(frozen=True)
class RunOptions:
    """How long it runs, and what is kept of it."""

    steps: int = 300
    """How many steps to take in all."""
    run: str | None = None
    """The run's folder; the next free runs/MODEL-NUMBER by default."""
    resume: bool = False
    """Go on with the run in that folder, from its last good checkpoint."""
    or_start: bool = False
    """With --resume: start the run where the folder holds none yet, so that one command does for a scheduler."""
    cast: bool = False
    """Resume from a checkpoint of other dtypes than the precision asks for."""
    seed: int = 0
    """For parameters, dropout and the order of the data."""
    checkpoint_every: int = 100
    """Steps between checkpoints; 0 for one at the end only."""
    keep_last: int = 3
    """How many of the last checkpoints stay."""
    keep_every: int | None = None
    """Those at multiples of this stay as well."""
    eval_every: int = 50
    """Steps between evaluations; 0 for none."""
    eval_batches: int = 4
    """Batches per evaluation, the same each time."""
    log_seconds: float = 10.0
    """Seconds between lines, where the output is not a terminal."""
    sample_tokens: int = 160
    """How much text to generate before and after; 0 for none."""
    prompt: str = "def "
    """What generated text begins with."""
    report: bool = True
    """Write the report page at the end."""
    tensorboard: bool = True
    """Write events for TensorBoard."""
    wandb: str | None = None
    """A project at Weights & Biases to log to."""
    trackio: str | None = None
    """A project of trackio to log to."""
    profile: str | None = None
    """Steps to trace with the profiler, such as 10:15."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _positive(self, "steps", "keep_last", "keep_every", "eval_batches")
        _not_negative(self, "checkpoint_every", "eval_every", "sample_tokens", "seed")
        _not_empty(self, "run", "wandb", "trackio")
        if self.or_start and not (self.resume and self.run):
            raise ConfigError("or_start belongs to --resume.", hint="--run FOLDER --resume --or-start.")
        if self.seed >= 1 << 32:
            raise ConfigError(f"seed is {self.seed}.", hint="a whole number below 2**32.")
        if self.sample_tokens and not self.prompt:
            raise ConfigError("prompt is empty.", hint="some text, or sample_tokens of 0 for no samples.")
        if self.profile is not None:
            from meshwright.loop.logging.profiler import parse_steps

            parse_steps(self.profile)
        if not 0 <= self.log_seconds < math.inf:
            raise ConfigError(f"log_seconds is {self.log_seconds}.", hint="a number of seconds.")


@dataclass(frozen=True)
class SafetyOptions:
    """What stops it, and what does not."""

    max_skipped: int = 5
    """Stop after so many steps in a row that were skipped because something was not finite."""
    rollback: float | None = None
    """Go back to the last checkpoint, and on with other data, where the loss lies above its recent median by this many
    times its usual distance from it; 8 is a good number."""
    hang: float = 600.0
    """Seconds without a step after which the stacks of all threads are written down; 0 for never."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _positive(self, "max_skipped")
        if self.rollback is not None and not 0 < self.rollback < math.inf:
            raise ConfigError(f"rollback is {self.rollback}.", hint="a number above 0, such as 8, or null.")
        if not 0 <= self.hang < math.inf:
            raise ConfigError(f"hang is {self.hang}.", hint="a number of seconds, 0 for never.")


@dataclass(frozen=True)
class ProcessOptions:
    """Several processes that form one run; under mpirun and srun these are found out."""

    coordinator: str | None = None
    """host:port of the process that the others meet at."""
    num_processes: int | None = None
    """How many they are."""
    process_id: int | None = None
    """Which of them this is, from 0 on."""

    def check(self) -> None:
        """Raises where an option has a value that it cannot have."""
        _positive(self, "num_processes")
        _not_negative(self, "process_id")


@dataclass(frozen=True)
class TrainConfig:
    """All options of `meshwright train`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    run: RunOptions = field(default_factory=RunOptions)
    safety: SafetyOptions = field(default_factory=SafetyOptions)
    processes: ProcessOptions = field(default_factory=ProcessOptions)

    def check(self) -> None:
        """Raises where an option has a value that it cannot have.

        Example:
            >>> TrainConfig(run=RunOptions(steps=-1)).check()
            Traceback (most recent call last):
            meshwright.errors.ConfigError: steps is -1.
            hint: a whole number from 1 on.
        """
        for name, value in self.flat().items():
            if isinstance(value, int) and name != "seed" and abs(value) >= 1 << 31:
                raise ConfigError(f"{name} is {value}.", hint="a whole number below 2**31.")
        for group in dataclasses.fields(self):
            getattr(self, group.name).check()

    def flat(self) -> dict[str, Any]:
        """Returns all options by their names, as files and reports hold them.

        Example:
            >>> TrainConfig().flat()["learning_rate"]
            0.003
        """
        groups = [getattr(self, group.name) for group in dataclasses.fields(self)]
        return {item.name: _plain(getattr(group, item.name)) for group in groups for item in dataclasses.fields(group)}

    def changed(self, options: Mapping[str, Any], *, where: str = "options") -> TrainConfig:
        """Returns this configuration with some options changed, by their flat names.

        Example:
            >>> TrainConfig().changed({"steps": 10, "learning_rate": "1e-4"}).optimizer.learning_rate
            0.0001
        """
        homes = _homes()
        for name in options:
            if name not in homes:
                hint = did_you_mean(str(name), homes) or "`meshwright train --print-config` shows all of them."
                raise ConfigError(f"{where}: there is no option `{name}`.", hint=hint)
        changes: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            group, kind = homes[name]
            changes.setdefault(group, {})[name] = _checked(name, value, kind, where)
        groups = {group: dataclasses.replace(getattr(self, group), **values) for group, values in changes.items()}
        config = dataclasses.replace(self, **groups)
        config.check()
        return config

    def to_yaml(self) -> str:
        """Returns the configuration as a file, group by group."""
        yaml = _yaml()
        parts = []
        for item in dataclasses.fields(self):
            group = getattr(self, item.name)
            values = {entry.name: _plain(getattr(group, entry.name)) for entry in dataclasses.fields(group)}
            text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            parts.append(f"# {(type(group).__doc__ or '').splitlines()[0]}\n{text}")
        return "\n".join(parts)


PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "smoke": {
        "model": "decoder-tiny",
        "steps": 20,
        "batch_size": 8,
        "num_tokens": 64,
        "warmup": 5,
        "checkpoint_every": 10,
        "eval_every": 10,
        "eval_batches": 1,
        "sample_tokens": 16,
    },
    "xlstm-small": {"model": "xlstm-small"},
    "decoder-125m": {
        "model": "decoder-125m",
        "batch_size": 64,
        "num_tokens": 1024,
        "steps": 20_000,
        "learning_rate": 6e-4,
        "warmup": 1000,
        "checkpoint_every": 1000,
        "eval_every": 500,
        "eval_batches": 16,
    },
    "decoder-1b": {
        "model": "decoder-1b",
        "batch_size": 256,
        "num_tokens": 4096,
        "steps": 50_000,
        "learning_rate": 3e-4,
        "warmup": 2000,
        "remat": "dots",
        "checkpoint_every": 1000,
        "eval_every": 1000,
        "eval_batches": 16,
    },
}
"""Sets of options by name, for `meshwright train --preset NAME`."""


def preset(name: str) -> TrainConfig:
    """Returns a configuration by its name.

    Example:
        >>> preset("smoke").run.steps
        20
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"use one of: {', '.join(PRESETS)}."
        raise ConfigError(f"there is no preset {name!r}.", hint=hint)
    return TrainConfig().changed(PRESETS[name], where=f"preset {name}")


def read_config(path: str | Path, *, base: TrainConfig | None = None) -> TrainConfig:
    """Reads options from a YAML file, over those of `base`."""
    yaml, path = _yaml(), Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        options = yaml.load(text, Loader=_loader(yaml, path)) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(options, Mapping):
        raise ConfigError(f"{path} holds a {type(options).__name__}.", hint="write lines such as `steps: 100`.")
    return (base or TrainConfig()).changed(options, where=str(path))


def _homes() -> dict[str, tuple[str, Any]]:
    """Returns for each option its group and its type."""
    found: dict[str, tuple[str, Any]] = {}
    for group, kind in typing.get_type_hints(TrainConfig).items():
        for name, hint in typing.get_type_hints(kind).items():
            assert name not in found, f"two options are called {name}"
            found[name] = (group, hint)
    return found


def _checked(name: str, value: Any, kind: Any, where: str) -> Any:
    """Returns a value of a file as the type of its option; YAML reads 1e-3 as text and has no tuples."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for each in kinds:
        if each is type(None) and value is None:
            return None
        if typing.get_origin(each) is Literal and value in typing.get_args(each):
            return value
        if typing.get_origin(each) is tuple and isinstance(value, (list, tuple)):
            return tuple(str(item) for item in value)
        if each is bool and isinstance(value, bool):
            return value
        if each is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if each is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except (ValueError, OverflowError):
                continue
        if each is str and isinstance(value, str):
            return value
    raise ConfigError(f"{where}: {name} is {value!r}.", hint=f"give {_kind_name(kinds)}.")


def _kind_name(kinds: tuple[Any, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    named = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            named.append("one of " + ", ".join(map(str, typing.get_args(kind))))
        else:
            named.append(words.get(kind, "a list of texts"))
    return " or ".join(named)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _positive(group: Any, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}.", hint="a whole number from 1 on.")


def _not_empty(group: Any, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and not value.strip():
            raise ConfigError(
                f"{name} is empty.", hint=f"give {name} a value or leave it out; is a shell variable not set?"
            )


def _not_negative(group: Any, *names: str) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}.", hint="a whole number, not below 0.")


def _loader(yaml: Any, path: Path) -> Any:
    """Returns a reader of YAML that refuses a key which comes twice: which of the two counts, nobody would see."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[Any, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key.value, str) and seen.setdefault(key.value, line) != line:
                    raise ConfigError(
                        f"{path} gives `{key.value}` twice, in lines {seen[key.value]} and {line}.",
                        hint="leave one of them out.",
                    )
            return super().construct_mapping(node, deep=deep)

    return Loader


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("configuration files need PyYAML.", hint="pip install pyyaml") from None
    return yaml
