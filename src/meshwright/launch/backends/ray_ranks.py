"""Ranks as child processes of Ray actors, one actor per rank, so that a dead rank or node is a result, not a crash."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.launch import memory_folder, pulse
from meshwright.launch.backends.local import token_variables
from meshwright.launch.command import given, program
from meshwright.launch.events import Ending
from meshwright.launch.messages import shorten
from meshwright.launch.relay import Reader, last_message

_PASSED_ON = ("MESHWRIGHT_", "JAX_", "XLA_", "NCCL_", "PYTHONPATH", "AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
_START_SECONDS = 300.0  # a cluster may have to start a node


class Host:
    """The actor of one rank: starts it as a process, and returns how it ended."""

    def __init__(self) -> None:
        self._child: Any = None

    def address(self) -> str:
        """Returns the address of this node with a free port."""
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(self, words: list[str], variables: dict[str, str], log: str) -> tuple[int, str]:
        """Runs a rank to its end; returns its exit code and its last line."""
        import subprocess

        with open(log, "ab") as file:
            own = {**os.environ, **variables, pulse.PARENT: str(os.getpid())}
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=own
            )
            code = self._child.wait()
        with open(log, "rb") as file:
            lines = file.read()[-4096:].decode(errors="replace").strip().splitlines()
        return code, last_message(lines)

    def remove(self, folder: str) -> None:
        """Removes the snapshots from the memory of this node."""
        import shutil

        shutil.rmtree(folder, ignore_errors=True)

    def stop(self, number: int) -> None:
        """Sends a signal to the rank."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


class RayRanks:
    """The ranks of one attempt on a Ray cluster.

    Args:
        devices: GPUs of each rank, or simulated devices if `gpus` is false.
        connect: whether to connect to the cluster, or start one on this host.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        logs: Path,
        beats: Path,
        show: Callable[[str], None],
        devices: int | None = None,
        gpus: bool = False,
        connect: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.logs, self.beats = tuple(command), logs, beats
        self._show, self._devices, self._gpus = show, devices, gpus
        self._variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        self._variables |= {**token_variables(), **(variables or {}), pulse.FOLDER: str(beats)}
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}
        self._first = logs / "rank-0.log"
        self._reader, self._shown = Reader(self._first), 0
        self._ray: Any = _connect() if connect else None

    def start(self, slots: Sequence[int], extra: Sequence[str]) -> None:
        """Starts an actor for each slot, and a rank in each actor."""
        for old in [*self.beats.glob("*.beat"), *self.beats.glob(pulse.STOP)]:
            old.unlink()
        resources = {"num_cpus": 1, "num_gpus": self._devices or 1} if self._gpus else {"num_cpus": 1}
        make = self._ray.remote(Host).options(**resources, max_concurrency=2)
        self._actors = {rank: make.remote() for rank in range(len(slots))}
        asked = self._actors[0].address.remote()
        if not self._ray.wait([asked], timeout=_START_SECONDS)[0]:
            raise ConfigError(
                f"Ray did not start the actor of rank 0 within {_START_SECONDS:.0f} s; it needs {resources}.",
                hint="check `ray status` for free CPUs and GPUs.",
            )
        address = self._ray.get(asked)
        for rank, actor in self._actors.items():
            words = [*program(), *self.command, *extra]
            if self._devices is not None and given(self.command, "--devices") is None:
                words += ["--devices", str(self._devices)]
            words += ["--coordinator", address, "--num-processes", str(len(slots)), "--process-id", str(rank)]
            variables = self._variables | {pulse.RANK: str(rank)}
            self._waiting[actor.run.remote(words, variables, str(self.logs / f"rank-{rank}.log"))] = rank

    def poll(self) -> dict[int, Ending]:
        """Returns the ranks that ended since the last call; shows what rank 0 has printed."""
        self._show_first()
        if not self._waiting:
            return {}
        done, _ = self._ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        found = {}
        for future in done:
            rank = self._waiting.pop(future)
            try:
                code, message = self._ray.get(future)
                found[rank] = Ending(code=code, message=message) if code >= 0 else Ending(signal=-code, message=message)
            except self._ray.exceptions.RayError as error:  # the actor or its node died
                found[rank] = Ending(message=shorten(str(error)))
        return found

    def _show_first(self) -> None:
        try:
            with self._first.open("rb") as file:
                file.seek(self._shown)
                text = file.read()
        except OSError:  # not there yet, or on another node
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            for shown in self._reader.feed(line):
                self._show(shown)

    def stop(self, *, force: bool) -> None:
        """Kills all ranks with their actors, or asks the ranks to save and stop."""
        import signal

        if not force:
            (self.beats / pulse.STOP).touch()
            return
        for rank in self._waiting.values():
            self._actors[rank].stop.remote(signal.SIGKILL)

    def close(self) -> None:
        """Kills the remaining ranks and removes the actors."""
        self.stop(force=True)
        if self._waiting:
            self._ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=5)
        folder = self._variables.get(memory_folder.FOLDER)
        if folder is not None and self._actors:
            cleared = [actor.remove.remote(folder) for actor in self._actors.values()]
            self._ray.wait(cleared, num_returns=len(cleared), timeout=5)
        for actor in self._actors.values():
            self._ray.kill(actor)


def _connect() -> Any:
    """Returns the module `ray`, connected to the cluster of `RAY_ADDRESS` or to a new one on this host."""
    address = os.environ.get("RAY_ADDRESS")
    if address is None:  # a cluster of our own, to which strangers cannot submit work; Ray reads these on import
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
    except ImportError:
        raise ConfigError("Ray is not installed.", hint="pip install ray, with the same Python.") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="warning")
        except (RuntimeError, ConnectionError, OSError) as error:
            raise ConfigError(f"Ray did not start: {error}", hint="check RAY_ADDRESS and `ray status`.") from None
    return ray
