"""Ranks as processes on this host: started, polled and stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright.launch import pulse
from meshwright.launch.command import given, program
from meshwright.launch.events import EXIT_DONE, EXIT_LOST_PEER, EXIT_RESUME, Ending
from meshwright.launch.lost_peer import is_lost_peer
from meshwright.launch.relay import Relay

_GPUS = Path("/proc/driver/nvidia/gpus")
_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


class LocalRanks:
    """The ranks of one attempt on this host.

    Args:
        command: the command of every rank, such as `train --steps 10`.
        logs: folder for their output.
        beats: folder for their heartbeats.
        show: called with each line of rank 0 for the terminal.
        devices: simulated devices of each rank, if there is no accelerator.
        gpus: ids of this host's GPUs, to split between the ranks.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        logs: Path,
        beats: Path,
        show: Callable[[str], None],
        devices: int | None = None,
        gpus: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.logs, self.beats, self._show = tuple(command), logs, beats, show
        self._devices, self._gpus = devices, tuple(gpus)
        self._variables = {**token_variables(), **(variables or {})}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._relays: dict[int, Relay] = {}
        self._oom_kills = 0
        self._port: socket.socket | None = None  # held for rank 0

    def start(self, slots: Sequence[int], extra: Sequence[str]) -> None:
        """Starts one rank for each slot; a slot has the same GPUs in every attempt."""
        for old in self.beats.glob("*.beat"):
            old.unlink()
        self._oom_kills = count_oom_kills()
        if self._port is not None:
            self._port.close()
        self._port = free_port()
        port = int(self._port.getsockname()[1])
        for rank, slot in enumerate(slots):
            process = subprocess.Popen(
                self.words(rank, len(slots), port, extra),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(rank, slot),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which decides
            )
            assert process.stdout is not None
            show = self._show if rank == 0 else None
            self._processes[rank] = process
            self._relays[rank] = Relay(process.stdout, self.log(rank), show)

    def words(self, rank: int, number: int, port: int, extra: Sequence[str]) -> list[str]:
        """Returns the command line of one of `number` ranks."""
        words = [*program(), *self.command, *extra]
        if self._devices is not None and given(self.command, "--devices") is None:
            words += ["--devices", str(self._devices)]
        if number > 1:
            words += ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(number), "--process-id", str(rank)]
        return words

    def poll(self) -> dict[int, Ending]:
        """Returns the ranks that ended since the last call."""
        ended = {rank: code for rank, process in self._processes.items() if (code := process.poll()) is not None}
        for rank, code in ended.items():
            process = self._processes.pop(rank)
            if code not in (EXIT_DONE, EXIT_RESUME):  # its children would keep running, and its output open
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        return {rank: self._ending(rank, code) for rank, code in ended.items()}

    def stop(self, *, force: bool) -> None:
        """Kills all ranks and their children, or asks them to save and stop."""
        for process in self._processes.values():
            try:
                if force:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.send_signal(signal.SIGTERM)
            except ProcessLookupError:
                pass
        if force:
            for relay in self._relays.values():
                relay.silence()

    def log(self, rank: int) -> Path:
        """Returns the file with all output of a rank."""
        return self.logs / f"rank-{rank}.log"

    def close(self) -> None:
        """Kills the remaining ranks and waits for them."""
        self.stop(force=True)
        for process in self._processes.values():
            process.wait()
        for relay in self._relays.values():
            relay.finish()
        if self._port is not None:
            self._port.close()

    def _environment(self, rank: int, slot: int) -> dict[str, str]:
        own = {pulse.FOLDER: str(self.beats), pulse.RANK: str(rank), pulse.PARENT: str(os.getpid())}
        if self._gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(share(self._gpus, slot, self._devices or 1))
        return {**os.environ, **self._variables, **own}

    def _ending(self, rank: int, code: int) -> Ending:
        relay = self._relays.pop(rank)
        relay.finish()
        if code >= 0:
            return Ending(code=code, message=relay.message)
        if code == -signal.SIGABRT and is_lost_peer(relay.tail):  # JAX aborts a rank whose coordinator is gone
            return Ending(code=EXIT_LOST_PEER, message=relay.message)
        by_kernel = code == -signal.SIGKILL and count_oom_kills() > self._oom_kills
        return Ending(signal=-code, message=relay.message, out_of_memory=by_kernel)


def token_variables(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variable with a new token, which the ranks of a run must know; empty if the user has set one.

    Example:
        >>> len(token_variables({})["MESHWRIGHT_TOKEN"]), token_variables({"MESHWRIGHT_TOKEN_FILE": "secret.txt"})
        (64, {})
    """
    if "MESHWRIGHT_TOKEN" in variables or "MESHWRIGHT_TOKEN_FILE" in variables:
        return {}
    return {"MESHWRIGHT_TOKEN": secrets.token_hex(32)}


def free_port() -> socket.socket:
    """Returns a socket that holds a free port of this host, which rank 0 can still listen at, but nobody is given.

    Example:
        >>> with free_port() as held, socket.create_server(held.getsockname()) as server:
        ...     server.getsockname() == held.getsockname()
        True
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def find_gpus(variables: Mapping[str, str] = os.environ, folder: Path = _GPUS) -> list[str]:
    """Returns the ids of the GPUs that this process may use, without starting a runtime.

    Example:
        >>> find_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}), find_gpus({"JAX_PLATFORMS": "cpu"})
        (['2', '3'], [])
    """
    if variables.get("JAX_PLATFORMS", "").strip().lower() == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [name.strip() for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(sorted(folder.glob("*")))]


def gpus_per_process(num_gpus: int, processes: int, wanted: int | None) -> int | None:
    """Returns the number of GPUs for each process; raises if a GPU would stay unused or be missing.

    Example:
        >>> gpus_per_process(8, 2, None), gpus_per_process(0, 2, None)
        (4, None)
    """
    if not num_gpus:
        return None
    each = wanted if wanted is not None else max(1, num_gpus // processes)
    if each * processes > num_gpus:
        raise ConfigError(
            f"{processes} processes with {each} GPUs each need {each * processes}; this host has {num_gpus}.",
            hint="start fewer processes, or set CUDA_VISIBLE_DEVICES or --devices-per-process.",
        )
    if wanted is None and each * processes != num_gpus:
        raise ConfigError(
            f"{num_gpus} GPUs cannot be split evenly over {processes} processes; "
            f"{num_gpus - each * processes} would be idle.",
            hint="choose another number of processes, or pass --devices-per-process to leave GPUs unused.",
        )
    return each


def share(gpus: Sequence[str], slot: int, each: int) -> Sequence[str]:
    """Returns the GPUs of a slot.

    Example:
        >>> share(["0", "1", "2", "3"], 1, 2)
        ['2', '3']
    """
    return gpus[slot * each : (slot + 1) * each]


def count_oom_kills(path: Path = _MEMORY_EVENTS) -> int:
    """Returns how many processes of this control group the kernel has killed for memory; 0 if it does not say."""
    try:
        lines = path.read_text().split("\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
