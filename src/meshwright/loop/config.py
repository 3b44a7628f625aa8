"""The configuration of a run: frozen dataclasses, read from presets, YAML files and the command line.

Groups only order the options. Their names are unique, so a file and the command line are flat: `learning_rate: 1e-3`,
`--learning-rate 1e-3`. What comes later wins: defaults, preset, file, command line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class ProcessOptions:
    """Several processes that form one run; under mpirun and srun these are found out."""

    coordinator: str | None = None
    """host:port of the process that the others meet at."""
    num_processes: int | None = None
    """How many they are."""
    process_id: int | None = None
    """Which of them this is, from 0 on."""


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

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises if an option has a value that it cannot have; every configuration is checked when it is made.

        Example:
            >>> TrainConfig(run=RunOptions(steps=-1))
            Traceback (most recent call last):
            meshwright.errors.ConfigError: steps is -1.
            hint: a whole number from 1 on.
        """
        options, run = self.flat(), self.run
        for name, value in options.items():
            if isinstance(value, int) and name != "seed" and abs(value) >= 1 << 31:
                raise ConfigError(f"{name} is {value}.", hint="a whole number below 2**31.")
        for name in ("job", "data", "tokenizer", "data_cache", "run", "wandb", "trackio"):
            if options[name] is not None and not options[name].strip():
                hint = f"give {name} a value or leave it out; is a shell variable not set?"
                raise ConfigError(f"{name} is empty.", hint=hint)
        for names, is_fine, hint in _LIMITS:
            for name in names.split():
                if options[name] is not None and not is_fine(options[name]):
                    raise ConfigError(f"{name} is {options[name]}.", hint=hint)
        if self.model.job is not None and self.model.model_options:
            raise ConfigError("model_options change a model of ours, and a job was named.", hint="leave one out.")
        if run.or_start and not (run.resume and run.run):
            raise ConfigError("or_start belongs to --resume.", hint="--run FOLDER --resume --or-start.")
        if run.sample_tokens and not run.prompt:
            raise ConfigError("prompt is empty.", hint="some text, or sample_tokens of 0 for no samples.")
        if parse_steps(run.profile)[0] > run.steps:
            raise ConfigError(
                f"--profile {run.profile}: no such step comes, the run ends at step {run.steps}.",
                hint="name earlier steps, or ask for more with --steps.",
            )

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
        homes, changes = _homes(), dict[str, dict[str, Any]]()
        for name, value in typed_options(options, where=where).items():
            changes.setdefault(homes[name][0], {})[name] = value
        groups = {group: dataclasses.replace(getattr(self, group), **values) for group, values in changes.items()}
        return dataclasses.replace(self, **groups)

    def to_yaml(self) -> str:
        """Returns the configuration as a file, group by group."""
        import yaml

        parts = []
        for item in dataclasses.fields(self):
            group = getattr(self, item.name)
            values = {entry.name: _plain(getattr(group, entry.name)) for entry in dataclasses.fields(group)}
            text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            parts.append(f"# {(type(group).__doc__ or '').splitlines()[0]}\n{text}")
        return "\n".join(parts)


# Which numbers options may have, and the hint for others; None is left to the options' types.
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("batch_size num_tokens epochs devices minibatches", lambda value: value >= 1, "a whole number from 1 on."),
    ("steps keep_last keep_every eval_batches", lambda value: value >= 1, "a whole number from 1 on."),
    ("max_skipped num_processes", lambda value: value >= 1, "a whole number from 1 on."),
    ("checkpoint_every eval_every sample_tokens", lambda value: value >= 0, "a whole number, not below 0."),
    ("seed process_id", lambda value: value >= 0, "a whole number, not below 0."),
    ("seed", lambda value: value < 1 << 32, "a whole number below 2**32."),
    ("learning_rate final_learning_rate", lambda value: 0 <= value < math.inf, "a finite number, not below 0."),
    ("weight_decay beta1 beta2", lambda value: 0 <= value < math.inf, "a finite number, not below 0."),
    ("beta1 beta2", lambda value: value < 1, "a number below 1."),
    ("warmup", lambda value: value >= 0, "a number of steps, 0 for none."),
    ("clip", lambda value: 0 < value < math.inf, "a number above 0, or null."),
    ("validation", lambda value: 0 <= value < 1, "a share of the documents, 0 up to below 1."),
    ("log_seconds", lambda value: 0 <= value < math.inf, "a number of seconds."),
    ("rollback", lambda value: 0 < value < math.inf, "a number above 0, such as 8, or null."),
    ("hang", lambda value: 0 <= value < math.inf, "a number of seconds, 0 for never."),
)


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
    return TrainConfig().changed(preset_options(name))


def preset_options(name: str) -> dict[str, Any]:
    """Returns the options that a preset sets."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f"use one of: {', '.join(PRESETS)}."
        raise ConfigError(f"there is no preset {name!r}.", hint=hint)
    return PRESETS[name]


def read_config(path: str | Path, *, base: TrainConfig | None = None) -> TrainConfig:
    """Reads options from a YAML file, over those of `base`."""
    return (base or TrainConfig()).changed(read_options(path))


def read_options(path: str | Path) -> dict[str, Any]:
    """Returns the options that a YAML file sets."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        options = yaml.load(text, Loader=_loader(yaml, Path(path))) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(options, Mapping):
        raise ConfigError(f"{path} holds a {type(options).__name__}.", hint="write lines such as `steps: 100`.")
    return typed_options(options, where=str(path))


def typed_options(options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns options by their flat names with values of their types; raises for others, and says where they are."""
    homes = _homes()
    for name in options:
        if name not in homes:
            hint = did_you_mean(str(name), homes) or "`meshwright train --print-config` shows all of them."
            raise ConfigError(f"{where}: there is no option `{name}`.", hint=hint)
    return {name: _typed(name, value, homes[name][1], where) for name, value in options.items()}


def parse_steps(steps: str | None) -> tuple[int, int]:
    """Returns the first step of a range such as "10:15" and the one after its last; 0 and 0 for None."""
    if steps is None:
        return 0, 0
    found = re.fullmatch(r"(\d+):(\d+)", steps.strip())
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"profile {steps!r} names no steps.", hint='"10:15" traces steps 10 to 14.')
    return int(found[1]), int(found[2])


@functools.cache
def _homes() -> dict[str, tuple[str, Any]]:
    """Returns for each option its group and its type."""
    found: dict[str, tuple[str, Any]] = {}
    for group, kind in typing.get_type_hints(TrainConfig).items():
        for name, hint in typing.get_type_hints(kind).items():
            assert name not in found, f"two options are called {name}"
            found[name] = (group, hint)
    return found


def _typed(name: str, value: Any, kind: Any, where: str) -> Any:
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
