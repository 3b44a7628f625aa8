"""Ranks under Open MPI: one `mpirun` per attempt, which starts them on its hosts and passes on their exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwright.launch import memory_folder, pulse
from meshwright.launch.backends.local import token_variables
from meshwright.launch.command import given, program
from meshwright.launch.events import EXIT_LOST_PEER, EXIT_RESUME, Ending
from meshwright.launch.relay import Relay

_PASSED_ON = ("MESHWRIGHT_", "JAX_", "XLA_", "NCCL_", "PYTHONPATH", "LIBTPU_", "AWS_", "GOOGLE_", "AZURE_", "FSSPEC_")
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_CODE = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
_LINE = re.compile(r"-{20,}")


class MpiRanks:
    """The ranks of one attempt under mpirun.

    Args:
        hosts: all hosts; empty for this one.
        ranks_per_host: ranks on each host.
        arguments: further arguments for mpirun.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        logs: Path,
        beats: Path,
        show: Callable[[str], None],
        hosts: Sequence[str] = (),
        ranks_per_host: int = 1,
        devices: int | None = None,
        arguments: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.command, self.logs, self.beats = tuple(command), logs, beats
        self._show, self._hosts, self._per_host = show, tuple(hosts), ranks_per_host
        self._devices, self._arguments = devices, tuple(arguments)
        self._environment = {**os.environ, **token_variables(), **(variables or {}), pulse.FOLDER: str(beats)}
        self._process: subprocess.Popen[bytes] | None = None
        self._relay: Relay | None = None
        self._number, self._banner = 0, False

    def words(self, slots: Sequence[int], extra: Sequence[str]) -> list[str]:
        """Returns the command line of mpirun for these hosts.

        Example:
            >>> ranks = MpiRanks(["train"], logs=Path(), beats=Path("b"), show=print, hosts=["a", "b"], devices=4)
            >>> " ".join(ranks.words([0, 1], [])).split(" -m ")[1]
            'meshwright train --devices 4'
        """
        number = len(slots) * self._per_host
        words = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", str(number)]
        if self._hosts:
            words += ["--host", ",".join(f"{self._hosts[slot]}:{self._per_host}" for slot in slots)]
            words += ["--map-by", f"ppr:{self._per_host}:node"]
        else:
            words += ["--oversubscribe"]
        for name in sorted(self._environment):
            if name.startswith(_PASSED_ON):
                words += ["-x", name]
        words += [*self._arguments, *program(), *self.command, *extra]
        if self._devices is not None and given(self.command, "--devices") is None:
            words += ["--devices", str(self._devices)]
        return words

    def start(self, slots: Sequence[int], extra: Sequence[str]) -> None:
        """Starts mpirun on the hosts with these numbers."""
        for old in [*self.beats.glob("*.beat"), *self.beats.glob(pulse.STOP)]:
            old.unlink()
        self._number = len(slots) * self._per_host
        self._process = subprocess.Popen(
            self.words(slots, extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._relay = Relay(self._process.stdout, self.logs / "mpirun.log", self._show_line)

    def poll(self) -> dict[int, Ending]:
        """Returns how all ranks ended once mpirun has ended."""
        if self._process is None or self._relay is None or (code := self._process.poll()) is None:
            return {}
        self._relay.finish()
        tail, message = "\n".join(self._relay.tail), self._relay.message
        self._process = None
        return read_endings(code, tail, message, self._number)

    def stop(self, *, force: bool) -> None:
        """Kills mpirun and all ranks, or asks the ranks to save and stop."""
        if self._process is None or self._relay is None:
            return
        if not force:
            (self.beats / pulse.STOP).touch()
            return
        self._relay.silence()
        for number in (signal.SIGTERM, signal.SIGKILL):  # mpirun needs a moment to kill the ranks on other hosts
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=5)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def close(self) -> None:
        """Kills the remaining ranks, and removes their snapshots from the memory of other hosts."""
        self.stop(force=True)
        folder = self._environment.get(memory_folder.FOLDER)
        if folder is not None and self._hosts:
            words = ["mpirun", *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", str(len(self._hosts))]
            words += ["--host", ",".join(self._hosts), "--map-by", "ppr:1:node", "rm", "-rf", "--", folder]
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # a host may be gone
                subprocess.run(words, env=self._environment, capture_output=True, timeout=20)

    def _show_line(self, line: str) -> None:
        """Shows a line, but not the banners that mpirun puts between two rules."""
        if _LINE.fullmatch(line.strip()):
            self._banner = not self._banner
        elif not self._banner and not line.startswith("[") and line.strip():
            self._show(line)


def read_endings(code: int, tail: str, message: str, number: int) -> dict[int, Ending]:
    """Returns the endings of all ranks from mpirun's exit code and its last lines, which name the rank that failed.

    Example:
        >>> said = "mpirun noticed that process rank 1 with PID 0 on node n7 exited on signal 9 (Killed)."
        >>> read_endings(137, said, "", 2)
        {0: Ending(code=76, ...), 1: Ending(code=None, signal=9, message='', out_of_memory=False)}
        >>> read_endings(75, "", "", 1)[0].code
        75
    """
    if code in (0, EXIT_RESUME):
        return {rank: Ending(code=code) for rank in range(number)}
    endings = {rank: Ending(code=EXIT_LOST_PEER) for rank in range(number)}
    # mpirun breaks its lines.
    flat = " ".join(tail.split())
    if found := _SIGNAL.search(flat):
        endings[int(found[1])] = Ending(signal=int(found[3]))  # mpirun mixes the output of all ranks
    elif found := _CODE.search(flat):
        endings[int(found[1])] = Ending(code=int(found[2]), message=message)
    else:
        endings[0] = Ending(code=code if code > 0 else None, signal=None if code > 0 else -code, message=message)
    return endings
