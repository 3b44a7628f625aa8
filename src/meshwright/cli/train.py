"""`meshwright train`: options (declared in `loop/config.py`), the other processes, and the run itself."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import shlex
import sys
import traceback
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import tyro

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.config import TrainConfig, preset_options, read_options


def _field_help(group: type) -> dict[str, str]:
    """Returns the text below each field of a group of options."""
    (definition,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(item.target): inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
        for item, text in itertools.pairwise(definition.body)
        if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _command_line(group: type) -> Any:
    """Returns the options of a group as a dict type in which all are optional, so that only given ones are in it."""
    kinds, texts, fields = typing.get_type_hints(group), _field_help(group), {}
    for item in dataclasses.fields(group):
        default = shlex.join(item.default) if isinstance(item.default, tuple) else shlex.quote(str(item.default))
        about = tyro.conf.arg(help=texts[item.name], help_behavior_hint=f"(default: {default})")
        fields[item.name] = Annotated[kinds[item.name], about]
    made = typing.TypedDict(group.__name__, fields, total=False)  # type: ignore[misc]
    made.__doc__ = group.__doc__
    return made


if TYPE_CHECKING:
    Given = dict[str, dict[str, Any]]
else:
    _GROUPS = typing.get_type_hints(TrainConfig)
    Given = typing.TypedDict("Given", {name: _command_line(group) for name, group in _GROUPS.items()})


def train(
    options: Annotated[Given, tyro.conf.OmitArgPrefixes],
    preset: str | None = None,
    config: str | None = None,
    print_config: bool = False,
) -> int:
    """Train a language model on text, on all devices; ends in a report page and the command to go on.

    Without options: a small byte-level decoder on the sources of Python's standard library, in about two minutes
    on a laptop's CPU, which plays eight devices. Exits with 0 at the end, and with 75 where it was asked to stop
    (SIGTERM, Ctrl-C) and can be resumed.

    Args:
        preset: a set of options by name: small, smoke, xlstm-small, decoder-125m, decoder-1b.
        config: a YAML file of options; those on the command line win.
        print_config: print all options as a YAML file, and stop.
    """
    given = {name: value for group in options.values() for name, value in group.items()}
    chosen = TrainConfig().changed({**_base(given, preset, config), **given})
    if print_config:
        print(chosen.to_yaml(), end="")
        return 0
    return run(chosen)


def _base(given: dict[str, Any], preset: str | None, file: str | None) -> dict[str, Any]:
    """Returns the options before those of the command line: of the run to resume, a preset, a file."""
    folder, options = given.get("run"), dict[str, Any]()
    if folder is not None and not folder.strip():
        raise ConfigError("--run is empty.", hint="the folder of a run; is a shell variable not set?")
    if given.get("resume") and folder is not None:
        path = Path(folder) / "config.yaml"
        if os.path.isfile(path):  # a name that no file can have is none
            options = read_options(path)
            if given.get("or_start"):  # the command that started it is given again: what the run has become counts
                return options
        elif not given.get("or_start"):
            raise ConfigError(f"{folder} holds no run to resume.", hint="the folder with config.yaml in it.")
    if preset is not None:
        options = preset_options(preset)
    return options if file is None else {**options, **read_options(file)}


def run(config: TrainConfig) -> int:
    """Joins the other processes, if there are any, trains, and returns the exit code."""
    from meshwright.distributed import join
    from meshwright.distributed.schedulers import find_place

    together, place = config.processes, find_place()
    count = together.num_processes or (place.num_processes if place is not None else 1)
    with contextlib.suppress(RuntimeError):  # JAX may already be running, with the devices it has
        # Only the CPU backend reads this. It comes before the job's module, which may use JAX.
        jax.config.update("jax_num_cpu_devices", config.placement.devices or max(1, 8 // count))
    joined = join(together.coordinator, together.num_processes, together.process_id)
    from meshwright.loop.run import train
    from meshwright.loop.safety.preemption import EXIT_INTERRUPTED, EXIT_PREEMPTED, check_early

    check_early()
    if joined is not None and jax.process_index() == 0:
        print(joined, file=sys.stderr)
    try:
        result = train(config)
    except (Exception, KeyboardInterrupt) as error:
        if joined is None:
            raise
        # With others, an ordinary end would wait for them at JAX's barrier, and they may be waiting for this one.
        if isinstance(error, MeshwrightError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)
        else:
            traceback.print_exc()
        os._exit(1)
    if not result.saved or result.mostly_skipped:
        return 1
    return EXIT_PREEMPTED if result.why == "preempted" else 0
