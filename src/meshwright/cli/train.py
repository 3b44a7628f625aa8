"""`meshwright train`: the main job. From text on the machine to a trained model and a page that shows how it went."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.loop.config import TrainConfig, preset, read_config


def make_train(args: Sequence[str]) -> Callable[..., int]:
    """Returns the command, whose defaults are those of the preset, the file and the run that `args` name."""
    try:
        base, problem = base_config(args), None
    except ConfigError as error:  # told when the command runs, so that `--help` always works
        base, problem = TrainConfig(), error

    def train(
        options: Annotated[TrainConfig, tyro.conf.OmitArgPrefixes] = base,
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
        del preset, config  # `base_config` used them
        if problem is not None:
            raise problem
        options.check()
        if print_config:
            print(options.to_yaml(), end="")
            return 0
        return run(options)

    return train


def base_config(args: Sequence[str]) -> TrainConfig:
    """Returns the options before those of the command line: of the run to resume, a preset, a file."""
    run_folder, resume = _value(args, "run"), "--resume" in args
    or_start = any(arg in ("--or-start", "--or_start") for arg in args)
    base = TrainConfig()
    if run_folder is not None and not run_folder.strip():
        raise ConfigError("--run is empty.", hint="the folder of a run; is a shell variable not set?")
    if resume and run_folder is not None:
        path = Path(run_folder) / "config.yaml"
        if os.path.isfile(path):  # a name that no file can have is none
            base = read_config(path)
            if or_start:  # the command that started it is given again: what the run has become since then counts
                return base
        elif not or_start:
            raise ConfigError(f"{run_folder} holds no run to resume.", hint="the folder with config.yaml in it.")
    name, file = _value(args, "preset"), _value(args, "config")
    if name is not None:
        base = preset(name)
    return base if file is None else read_config(file, base=base)


def run(config: TrainConfig) -> int:
    """Joins the other processes, if there are any, and trains."""
    from meshwright.distributed import agree, join
    from meshwright.distributed.schedulers import find_place

    together, place = config.processes, find_place()
    count = together.num_processes or (place.num_processes if place is not None else 1)
    with contextlib.suppress(RuntimeError):  # JAX may already be running, with the devices it has
        # Only the CPU backend reads this. It comes before the job's module, which may use JAX.
        jax.config.update("jax_num_cpu_devices", config.placement.devices or max(1, 8 // count))
    joined = join(together.coordinator, together.num_processes, together.process_id)
    from meshwright.loop.run import train
    from meshwright.loop.safety.preemption import EXIT_INTERRUPTED, EXIT_PREEMPTED, check_early
    from meshwright.loop.setup import shared_options
    from meshwright.train.job import load_job

    check_early()
    if joined is not None:
        if jax.process_index() == 0:
            print(joined, file=sys.stderr)
        job = load_job(config.model.job) if config.model.job is not None else None
        agree({"seed": config.run.seed, "config": shared_options(config)}, job=job)
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


def _value(args: Sequence[str], name: str) -> Any:
    """Returns what follows `--name`, or its part after the `=`."""
    for place, arg in enumerate(args):
        if arg == f"--{name}" and place + 1 < len(args):
            return args[place + 1]
        if arg.startswith(f"--{name}="):
            return arg.partition("=")[2]
    return None
