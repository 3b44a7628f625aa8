"""`meshwright train`: parses options (declared in `loop/settings/config.py`), joins processes and trains."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import shlex
import sys
import threading
import time
import traceback
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import tyro

from meshwright.cli import simulate_devices
from meshwright.cli.stdout import print_checked
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.settings.config import TrainConfig, parse_options, read_options
from meshwright.loop.settings.presets import preset_options


def _field_help(group: type) -> dict[str, str]:
    """Returns the docstring below each field of an option group."""
    (definition,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        ast.unparse(item.target): inspect.cleandoc(ast.literal_eval(text.value)).replace("\n", " ")
        for item, text in itertools.pairwise(definition.body)
        if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _command_line(group: type) -> Any:
    """Returns a group of options as a `TypedDict` that holds only the options given on the command line."""
    kinds, texts, fields = typing.get_type_hints(group), _field_help(group), {}
    for item in dataclasses.fields(group):
        default = shlex.join(item.default) if isinstance(item.default, tuple) else shlex.quote(str(item.default))
        hint = "" if "(default:" in texts[item.name] else f"(default: {default or 'none'})"
        about = tyro.conf.arg(help=texts[item.name], help_behavior_hint=hint)
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
    """Train a language model on text, on all devices, and write a report page.

    Without options, trains a small byte-level decoder on the source of Python's standard library, in about two minutes
    on a laptop CPU that simulates eight devices. Exits with 0 when finished, and with 75 when stopped by SIGTERM,
    SIGHUP or Ctrl-C; resume such a run with --resume.

    Args:
        preset: named set of options: small, smoke, xlstm-small, decoder-125m, decoder-1b.
        config: YAML file of options; the command line overrides it.
        print_config: print all options as a YAML file and exit.
    """
    given = {name: value for group in options.values() for name, value in group.items()}
    chosen = TrainConfig().changed({**_base(given, preset, config), **given})
    if print_config:
        print_checked(chosen.to_yaml())
        return 0
    return run(chosen)


def _base(given: dict[str, Any], preset: str | None, file: str | None) -> dict[str, Any]:
    """Returns the options that the command line overrides: of the run to resume, a preset, a file."""
    folder, options = given.get("run"), dict[str, Any]()
    if folder is not None and not folder.strip():
        raise ConfigError("--run is empty.", hint="pass a run folder; is a shell variable unset?")
    if given.get("resume") and folder is not None:
        found = _options_of_run(folder)
        if found is not None:
            options = found
            if given.get("or_start"):  # the command is repeated, so the run's saved options replace preset and file
                from meshwright.loop.folder.run_dir import NOT_OF_THE_RUN

                own = {} if file is None else read_options(file)
                return {**options, **{name: own[name] for name in NOT_OF_THE_RUN if name in own}}
        elif not given.get("or_start"):
            raise ConfigError(f"{folder} holds no run to resume.", hint="name the folder that holds config.yaml.")
    if preset is not None:
        options = preset_options(preset)
    return options if file is None else {**options, **read_options(file)}


def _options_of_run(run: str) -> dict[str, Any] | None:
    """Returns the options that a run was started with, or None if there is no run."""
    from meshwright.remote import is_url, open_store

    if is_url(run):
        data = open_store(run, writes=True).read("config.yaml")
        return None if data is None else parse_options(data, f"{run}/config.yaml")
    path = Path(run) / "config.yaml"
    # Unlike `Path.is_file`, False for invalid names.
    return read_options(path) if os.path.isfile(path) else None


def run(config: TrainConfig) -> int:
    """Joins the other processes, if any, trains, and returns the exit code."""
    from meshwright.distributed import join
    from meshwright.distributed.schedulers import check_device_count, find_place
    from meshwright.launch.events import EXIT_LOST_PEER
    from meshwright.launch.lost_peer import lost_peer
    from meshwright.loop.launch_facts import launch_facts

    together, place = config.processes, find_place()
    count = together.num_processes or (place.num_processes if place is not None else 1)
    simulate_devices(config.placement.devices or max(1, 8 // count))  # before importing the job, which may use JAX
    facts = launch_facts(config) if count > 1 else None
    joined = join(together.coordinator, together.num_processes, together.process_id, bind=together.bind, facts=facts)
    from meshwright.loop.run import train
    from meshwright.loop.safety.preemption import EXIT_INTERRUPTED, EXIT_PREEMPTED, check_early
    from meshwright.plan.compiled.fp8_matmuls import inspect_fp8

    check_early()
    if joined is not None and jax.process_index() == 0:
        print(joined, file=sys.stderr)
    try:
        check_device_count(jax.device_count())
        result = train(config, inspect_fp8=inspect_fp8)
    except (Exception, KeyboardInterrupt) as error:
        if joined is None:
            raise
        # A normal exit would wait for the other processes at JAX's barrier while they may wait for this one.
        if isinstance(error, MeshwrightError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(EXIT_INTERRUPTED)
        elif (why := lost_peer(error)) is not None:
            print(f"rank {jax.process_index()} stopped: it lost another rank ({why})", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST_PEER)
        else:
            traceback.print_exc()
        os._exit(1)
    code = EXIT_PREEMPTED if result.why == "preempted" else 0
    if not result.saved or result.mostly_skipped:
        code = 1
    if joined is not None:
        _end_soon(code)
    return code


def _end_soon(code: int, seconds: float = 300.0) -> None:
    """Ends this process if its exit takes too long, at a barrier that a dead or failed process never reaches."""

    def end() -> None:
        time.sleep(seconds if code != 1 else 2.0)  # after a failure, nobody may be waiting at the other side
        os._exit(code)

    threading.Thread(target=end, name="meshwright-exit", daemon=True).start()
