"""The configuration of a run: frozen dataclasses, read from presets, YAML files and the command line.

Option names are unique across groups, so files and the command line are flat: `learning_rate: 1e-3`,
`--learning-rate 1e-3`. Later sources override earlier ones: defaults, preset, file, command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.bounded_reader import read_bytes
from meshwright.bounded_yaml import MOST_BYTES, parse_yaml
from meshwright.errors import ConfigError, FileFormatError, did_you_mean
from meshwright.loop.settings.adapt_options import AdaptOptions
from meshwright.loop.settings.init_options import InitOptions
from meshwright.loop.settings.mixture_options import parse_sources, parse_weights
from meshwright.loop.settings.options import (
    OPTIMIZERS,
    SCHEDULES,
    DataOptions,
    ModelOptions,
    OptimizerOptions,
    PlacementOptions,
    ProcessOptions,
    RunOptions,
    SafetyOptions,
)
from meshwright.loop.settings.store_options import StoreOptions
from meshwright.mesh.simulate import MOST_CPU_DEVICES
from meshwright.remote.object_store import check_scheme, is_url
from meshwright.train.fine_tuning.lora_settings import LoraSettings
from meshwright.train.precision import Precision


@dataclass(frozen=True)
class TrainConfig:
    """All options of `meshwright train`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    init: InitOptions = field(default_factory=InitOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    adapt: AdaptOptions = field(default_factory=AdaptOptions)
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    run: RunOptions = field(default_factory=RunOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    safety: SafetyOptions = field(default_factory=SafetyOptions)
    processes: ProcessOptions = field(default_factory=ProcessOptions)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises `ConfigError` if an option has an invalid value; the constructor calls it.

        Example:
            >>> TrainConfig(run=RunOptions(steps=-1))
            Traceback (most recent call last):
            meshwright.errors.ConfigError: steps=-1 is out of range.
            hint: use a whole number of at least 1.
        """
        options, run = self.flat(), self.run
        for name, value in options.items():
            if isinstance(value, int) and name != "seed" and abs(value) >= 1 << 31:
                raise ConfigError(f"{name}={value} is out of range.", hint="use a whole number below 2**31.")
        for name in _TEXTS.split():
            values = options[name] if isinstance(options[name], list) else [options[name]]
            if any(value is not None and not value.strip() for value in values):
                raise ConfigError(f"{name} is empty.", hint=f"set {name} or leave it out; is a shell variable unset?")
            for value in values:
                url = re.sub(r"^\w+=", "", value or "")  # NAME=URL is a source of a mixture
                if not is_url(url):
                    continue
                if name not in ("run", "data", "init_from", "tokenizer"):
                    runs = " A job is code, which is not run from a store." if name == "job" else ""
                    raise ConfigError(
                        f"{name}={value} is a URL; only --run, --data, --init-from and --tokenizer may be one.{runs}",
                        hint="copy it to a local path first.",
                    )
                check_scheme(url, writes=name == "run")
        _check_name(run.run or "")
        for names, is_fine, hint in _LIMITS:
            for name in names.split():
                if options[name] is not None and not is_fine(options[name]):
                    raise ConfigError(f"{name}={options[name]} is out of range.", hint=hint)
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if options[name] is not None and options[name] not in known and ":" not in options[name]:
                hint = f"use one of {', '.join(known)}, or module:attribute."
                raise ConfigError(f"{name} is {options[name]!r}.", hint=hint)
        mixture = parse_sources(self.data.data)
        if mixture is None and (self.data.mixture_weights or self.data.mixture_temperature is not None):
            name = "mixture_weights" if self.data.mixture_weights else "mixture_temperature"
            raise ConfigError(f"{name} has no effect: the data is not a mixture.", hint="use --data NAME=PATH ...")
        if parse_weights(self.data.mixture_weights) and self.data.mixture_temperature is not None:
            raise ConfigError(
                "mixture_weights and mixture_temperature exclude each other.",
                hint="leave one out; on resume, pass --mixture-temperature None, or --mixture-weights with no value.",
            )
        if self.model.job is not None and self.model.model_options:
            raise ConfigError("model_options apply to built-in models, not to a job.", hint="leave one of them out.")
        if self.adapt.lora is not None:
            LoraSettings.parse(self.adapt.lora)
            if self.placement.precision == "fp8":
                raise ConfigError("adapters do not run in fp8.", hint="use --precision mixed with --lora.")
        self.dtypes(self.placement.precision)
        if self.init.init_from is None and self.init != InitOptions():
            raise ConfigError("the options --init-... have no effect without --init-from.", hint="add --init-from.")
        if self.adapt.eval_ema and self.adapt.ema is None:
            raise ConfigError("--eval-ema needs an average to evaluate.", hint="add --ema 0.999.")
        if run.or_start and not (run.resume and run.run):
            raise ConfigError("--or-start needs --run and --resume.", hint="pass --run FOLDER --resume --or-start.")
        if run.sample_tokens and not run.prompt:
            raise ConfigError("prompt is empty.", hint="set a prompt, or disable samples with --sample-tokens 0.")
        parse_monitor(run.monitor)
        if run.patience is not None and not run.eval_every:
            raise ConfigError("--patience needs evaluations, but --eval-every is 0.", hint="set --eval-every.")
        if run.patience is None and run.monitor != "loss:min":
            raise ConfigError(f"--monitor {run.monitor} has no effect without --patience.", hint="set --patience.")
        if parse_steps(run.profile)[0] > run.steps:
            raise ConfigError(
                f"--profile {run.profile} starts after the last step ({run.steps}).",
                hint="profile earlier steps, or raise --steps.",
            )

    def dtypes(self, precision: str) -> Precision:
        """Returns a precision by name ("auto" as float32) with the options for fp8; raises if they do not fit it."""
        options = {name: getattr(self.placement, f"fp8_{name}") for name in ("matmuls", "scaling", "least_dim")}
        return Precision.with_fp8("float32" if precision == "auto" else precision, options)

    def flat(self) -> dict[str, Any]:
        """Returns all options as one flat dict, as in config files and reports.

        Example:
            >>> TrainConfig().flat()["learning_rate"]
            0.003
        """
        return {name: _plain(value) for group in dataclasses.asdict(self).values() for name, value in group.items()}

    def changed(self, options: Mapping[str, Any], *, where: str = "options") -> TrainConfig:
        """Returns a copy with some options changed, given by their flat names; errors name `where`.

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
        """Returns the configuration as the text of a YAML file."""
        import yaml

        parts = []
        for group, options in dataclasses.asdict(self).items():
            values = {name: _plain(value) for name, value in options.items()}
            text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
            parts.append(f"# {(getattr(self, group).__doc__ or '').splitlines()[0]}\n{text}")
        return "\n".join(parts)


_COUNTS = (
    "batch_size num_tokens epochs devices minibatches microbatches pipeline_rounds steps keep_last keep_every "
    "keep_local upload_every eval_batches patience max_skipped"
)
_RATES = "learning_rate final_learning_rate weight_decay beta1 beta2"
# Options that must not be empty texts.
_TEXTS = "job data tokenizer data_cache run local_run wandb trackio init_from init_adapters compile_cache fp8_matmuls"
# Options, a condition on their values unless None, and the hint.
_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (f"{_COUNTS} num_processes", lambda value: value >= 1, "use a whole number of at least 1."),
    (
        "checkpoint_every eval_every sample_tokens predict_rows init_step",
        lambda value: value >= 0,
        "use a whole number of at least 0.",
    ),
    ("devices", lambda value: value <= MOST_CPU_DEVICES, f"use at most {MOST_CPU_DEVICES:,} simulated devices."),
    ("sample_tokens predict_rows", lambda value: value <= 1 << 16, "use at most 65,536; it is only a glimpse."),
    ("seed process_id", lambda value: value >= 0, "use a whole number of at least 0."),
    ("seed", lambda value: value < 1 << 32, "use a whole number below 2**32."),
    (_RATES, lambda value: 0 <= value < math.inf, "use a finite number of at least 0."),
    ("beta1 beta2", lambda value: value < 1, "use a number below 1."),
    ("ema", lambda value: 0 < value < 1, "use a decay above 0 and below 1, e.g. 0.999."),
    ("warmup", lambda value: value >= 0, "use a number of steps, or 0 for no warmup."),
    ("clip", lambda value: 0 < value < math.inf, "use a number above 0, or null for no clipping."),
    ("mixture_temperature", lambda value: 0 < value < math.inf, "use a number above 0; 1 follows the sizes."),
    ("validation", lambda value: 0 <= value < 1, "use a fraction of the documents, at least 0 and below 1."),
    ("log_seconds", lambda value: 0 <= value < math.inf, "use a number of seconds."),
    ("upload_seconds", lambda value: 0 < value < math.inf, "use a number of seconds above 0."),
    ("rollback", lambda value: 0 < value < math.inf, "use a number above 0, e.g. 8, or null."),
    ("hang", lambda value: 0 <= value < math.inf, "use a number of seconds, or 0 for no watchdog."),
)


def _check_name(folder: str) -> None:
    """Raises if a run folder's name is not one for this file system, or cannot be written into the run's files."""
    try:
        fits = b"\0" not in os.fsencode(folder) + folder.encode()
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ConfigError(
            f"run={folder!r} cannot be a file name here ({sys.getfilesystemencoding()}).",
            hint="use letters that the file system can encode.",
        )


def read_config(path: str | Path, *, base: TrainConfig | None = None) -> TrainConfig:
    """Returns `base` (default: all defaults) with the options of a YAML file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "run.yaml"
        >>> _ = path.write_text("learning_rate: 1e-4")
        >>> read_config(path, base=TrainConfig()).optimizer.learning_rate
        0.0001
    """
    return (base or TrainConfig()).changed(read_options(path))


def read_options(path: str | Path) -> dict[str, Any]:
    """Returns the options that a YAML file sets."""
    try:
        data = read_bytes(path, most=MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except FileFormatError as error:
        raise ConfigError(str(error).partition("\nhint:")[0], hint=error.hint) from None
    return parse_options(data, str(path))


def parse_options(data: bytes, path: str) -> dict[str, Any]:
    """Returns the options in the contents of a YAML file; errors name its path."""
    try:
        options = parse_yaml(data.decode(), where=path) or {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except FileFormatError as error:
        raise ConfigError(str(error).partition("\nhint:")[0], hint=error.hint) from None
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        raise ConfigError(f"{path} holds a {kind}, not options.", hint="write lines such as `steps: 100`.")
    return typed_options(options, where=path)


def typed_options(options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Returns options, given by their flat names, with values converted to their types; errors name `where`."""
    homes = _homes()
    for name in options:
        if name not in homes:
            hint = did_you_mean(str(name)[:80], homes) or "list all options with `meshwright train --print-config`."
            raise ConfigError(f"{where}: there is no option `{str(name)[:80]}`.", hint=hint)
    return {name: _typed(name, value, homes[name][1], where) for name, value in options.items()}


def parse_steps(steps: str | None) -> tuple[int, int]:
    """Parses a half-open range of steps: "10:15" gives (10, 15), None gives (0, 0)."""
    if steps is None:
        return 0, 0
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", steps.strip())
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigError(f"profile {steps!r} is not a range of steps.", hint='use "10:15" for steps 10 to 14.')
    return int(found[1]), int(found[2])


def parse_monitor(monitor: str) -> tuple[str, bool]:
    """Parses a metric and its better direction: "accuracy:max" gives ("accuracy", True)."""
    name, _, direction = monitor.strip().rpartition(":")
    if not name or direction not in ("min", "max"):
        raise ConfigError(
            f"monitor {monitor!r} does not say whether lower or higher is better.",
            hint='use NAME:min or NAME:max, e.g. "accuracy:max".',
        )
    return name.removeprefix("eval/"), direction == "max"


@functools.cache
def _homes() -> dict[str, tuple[str, Any]]:
    """Returns the group and the type of each option."""
    found: dict[str, tuple[str, Any]] = {}
    for group, kind in typing.get_type_hints(TrainConfig).items():
        for name, hint in typing.get_type_hints(kind).items():
            assert name not in found, f"two options are called {name}"
            found[name] = (group, hint)
    return found


def _typed(name: str, value: Any, kind: Any, where: str) -> Any:
    """Converts a value to the type of its option; YAML reads 1e-3 as text and has no tuples."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    kinds = typing.get_args(kind) if is_union else (kind,)
    wanted = []
    for each in kinds:
        if typing.get_origin(each) is Literal:
            if value in typing.get_args(each):
                return value
            wanted.append("one of " + ", ".join(map(str, typing.get_args(each))))
        elif typing.get_origin(each) is tuple:
            if isinstance(value, (list, tuple)):
                return tuple(str(item) for item in value)
            if isinstance(value, Mapping):  # `data: {web: PATH}` in YAML
                return tuple(f"{key}={item}" for key, item in value.items())
            wanted.append("a list of strings")
        else:
            if each is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
                with contextlib.suppress(ValueError, OverflowError):
                    return float(value)
            elif type(value) is each:
                return value
            wanted.append(_TYPE_NAMES[each])
    shown = repr(value) if len(repr(value)) < 200 else f"{repr(value)[:200]}..."
    raise ConfigError(f"{where}: {name} is {shown}.", hint=f"use {' or '.join(wanted)}.")


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
