"""`meshwright launch`: starts a run on several processes, watches it and restarts it. Imports no JAX."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.launch.backends.local import LocalRanks, find_gpus, gpus_per_process
from meshwright.launch.backends.mpi import MpiRanks
from meshwright.launch.backends.ray_ranks import RayRanks
from meshwright.launch.command import check_command, given, program
from meshwright.launch.launch_options import LaunchOptions, split_at_dashes
from meshwright.launch.memory_folder import FOLDER, SHARED_MEMORY, hold_folder, snapshot_variables
from meshwright.launch.supervisor import Supervisor
from meshwright.launch.watch import Watch

_SIMULATED = 8
PER_PROCESS = "MESHWRIGHT_DEVICES_PER_PROCESS"


def main(args: Sequence[str]) -> int:
    """Runs `meshwright launch` with the words after it, and returns its exit code."""
    import tyro

    own, command = split_at_dashes(args)
    try:
        options = tyro.cli(LaunchOptions, prog="meshwright launch", args=own)
        return launch(options, check_command(command))
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def launch(options: LaunchOptions, command: Sequence[str]) -> int:
    """Launches a command on the backend of the options, and returns the exit code."""
    if options.backend == "slurm":
        from meshwright.launch.backends.slurm import submit

        return submit(options, command)
    if options.backend == "k8s":
        from meshwright.launch.backends.jobset import apply

        return apply(options, command)
    if options.backend == "skypilot":
        from meshwright.launch.backends.skypilot import start

        return start(options, command)
    return supervise(options, command)


def supervise(options: LaunchOptions, command: Sequence[str]) -> int:
    """Runs all ranks under the supervisor: on this host, with mpirun or with Ray."""
    host = socket.gethostname()
    gpus, wanted, each = find_gpus() if options.backend == "local" else [], options.devices_per_process, None
    if options.backend == "local":
        each = gpus_per_process(len(gpus), options.processes, wanted)
    simulated = os.environ.get("JAX_PLATFORMS", "").lower() == "cpu" or (options.backend == "local" and not gpus)
    devices = each or wanted or (max(1, _SIMULATED // options.processes) if simulated else None)
    say(_describe(options, host, devices, simulated, len(gpus)))
    places = _places(options, host)
    per_place = options.processes // options.nodes if options.hosts else 1
    sizes = [size // per_place for size in options.sizes if size % per_place == 0]
    supervisor = Supervisor(places, sizes, ranks_per_place=per_place, policy=options.policy)
    with contextlib.ExitStack() as stack:
        logs, beats = _folders(options, stack)
        memory = snapshot_variables(options.snapshot_every)
        kept: dict[str, Any] = {"logs": logs, "beats": beats, "show": show, "devices": devices, "variables": memory}
        ranks: LocalRanks | MpiRanks | RayRanks
        if options.backend == "mpi":
            if not simulated and wanted:
                os.environ[PER_PROCESS] = str(wanted)
            kept |= {"devices": devices if simulated else None}
            ranks = MpiRanks(
                command, **kept, hosts=options.hosts, ranks_per_host=per_place, arguments=options.engine_args
            )
            words = ranks.words(range(sizes[0]), [])
        elif options.backend == "ray":
            ranks = RayRanks(command, **kept, gpus=not simulated, connect=not options.dry_run)
            words = [*program(), *command]
        else:
            ranks = LocalRanks(command, **kept, gpus=gpus)
            words = ranks.words(0, 1, 0, [])
        if options.dry_run:
            print(shlex.join(words))
            return 0
        if options.backend == "mpi" and shutil.which("mpirun") is None:
            raise ConfigError("mpirun is not on the PATH.", hint="install Open MPI (Debian: openmpi-bin).")
        stack.enter_context(hold_folder(memory))
        watch = Watch(
            supervisor,
            ranks,
            places,
            say,
            silent_seconds=options.silent_seconds,
            start_seconds=options.start_seconds,
            run=given(command, "--run"),
            snapshots=Path(memory[FOLDER]) if memory else None,
        )
        code = watch()
        if options.logs is None and (code != 0 or supervisor.attempt > 1):
            stack.pop_all()  # keep them
            shutil.rmtree(beats, ignore_errors=True)
            say(f"the output of each rank is in {logs}")
    return code


def _describe(options: LaunchOptions, host: str, devices: int | None, simulated: bool, num_gpus: int) -> str:
    kind = "simulated devices" if simulated else "GPUs"
    where = {"mpi": "with mpirun", "ray": "on Ray"}.get(options.backend, f"on {host}")
    if devices is None:
        return f"{options.processes} processes {where}, with all devices that they see"
    used = f" of {num_gpus}" if num_gpus else ""
    return f"{options.processes} processes {where}, {devices} {kind} each ({devices * options.processes}{used} in all)"


def _places(options: LaunchOptions, host: str) -> list[str]:
    """Returns the names of the hosts, or of the processes of this host, which can fail one by one."""
    if options.hosts:
        if len(options.hosts) < options.nodes:
            raise ConfigError(
                f"{options.nodes} nodes are wanted, but --hosts names {len(options.hosts)}.", hint="name more hosts."
            )
        return list(options.hosts)
    if options.processes == 1:
        return [host]
    kind, where = ("actor", "Ray") if options.backend == "ray" else ("process", host)
    return [f"{where} ({kind} {slot})" for slot in range(options.processes)]


def _folders(options: LaunchOptions, stack: contextlib.ExitStack) -> tuple[Path, Path]:
    """Creates the folders for output and heartbeats; `stack` removes those that nobody asked for."""
    if options.hosts and options.logs is None:
        raise ConfigError(
            "with --hosts, heartbeats need a shared folder.", hint="pass a folder that all hosts see to --logs."
        )
    try:
        logs = Path(options.logs or tempfile.mkdtemp(prefix="meshwright-launch-")).absolute()
        logs.mkdir(parents=True, exist_ok=True)
        near = SHARED_MEMORY if SHARED_MEMORY.is_dir() and not options.hosts else logs
        beats = Path(tempfile.mkdtemp(prefix="meshwright-beats-", dir=near))
    except OSError as error:
        raise ConfigError(
            f"cannot create {options.logs}: {error.strerror}.", hint="pass another folder to --logs."
        ) from None
    if options.logs is None:
        stack.callback(shutil.rmtree, logs, ignore_errors=True)
    stack.callback(shutil.rmtree, beats, ignore_errors=True)
    return logs, beats


def show(line: str) -> None:
    """Prints a line of a rank; a closed or full output does not stop the run."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints a paragraph of the launcher, as wide as the terminal."""
    text = f"launch: {text}"
    show(textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text)
