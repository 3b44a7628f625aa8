"""The options of `meshwright launch`: their names, defaults, help texts and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import ConfigError
from meshwright.launch.supervisor import Policy

_MOST = 1 << 16
Backend = Literal["local", "mpi", "slurm", "ray", "k8s", "skypilot"]


@dataclass(frozen=True)
class LaunchOptions:
    """Start a training run on several processes, watch it, and restart it from its last checkpoint when one dies.

    The command of the run follows after --, e.g. meshwright launch --processes 2 -- train --run runs/two. Exits with 0
    when the run is finished, with 75 when it was stopped on request and saved, and with 1 when it gave up.
    """

    backend: Backend = "local"
    """Where to start the processes: on this host, or with Open MPI, Slurm, Ray, Kubernetes or SkyPilot."""
    processes: int = 1
    """Number of processes (ranks), over all hosts."""
    devices_per_process: int | None = None
    """GPUs of each process, or CPU devices to simulate if there are none (default: all GPUs split evenly; 8 simulated
    devices over all processes)."""
    min_processes: int | None = None
    """Restart on fewer processes, down to this number, when a host is lost; the global batch stays, with more
    accumulation (default: never)."""
    max_failures: int = 5
    """Failures in a row without a new checkpoint before giving up."""
    max_preemptions: int = 100
    """Preemptions in a row without a new checkpoint before giving up."""
    backoff: float = 1.0
    """Seconds before the first restart; they double with each failure in a row."""
    quarantine_after: int = 3
    """Failures of one host (one process, with the local backend) within a day after which it is left out, if the run
    can do without it; 0 disables it."""
    silent_seconds: float = 60.0
    """Seconds without a heartbeat after which a rank counts as dead."""
    start_seconds: float = 300.0
    """Seconds for the first heartbeat of a rank."""
    grace_seconds: float = 120.0
    """Seconds to save after a request to stop, before the ranks are killed."""
    snapshot_every: int | None = None
    """Steps between snapshots of the state in host memory, from which a restart continues if they are newer than the
    checkpoint (local, mpi, ray; default: no snapshots)."""
    logs: str | None = None
    """Folder for the output of each rank (default: a temporary folder, removed after a run without failures)."""
    dry_run: bool = False
    """Print what would be started, and exit."""
    nodes: int = 1
    """Number of hosts (mpi, slurm, ray, k8s, skypilot), which share the processes evenly."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts (mpi); more than --nodes are spares. --logs must then be a folder that they share."""
    name: str = "meshwright"
    """Name of the job (slurm, k8s, skypilot)."""
    image: str | None = None
    """Container image (k8s, skypilot)."""
    accelerators: str | None = None
    """Accelerators of each host, e.g. H100:8 (skypilot)."""
    attempts: int = 10
    """Length of the array of attempts (slurm), or number of restarts (k8s)."""
    engine_args: tuple[str, ...] = ()
    """Further arguments for mpirun or sbatch, e.g. --engine-args=--partition=gpu."""

    def __post_init__(self) -> None:
        for name in ("processes", "nodes", "attempts", "devices_per_process", "min_processes", "snapshot_every"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigError(f"{name}={value} is out of range.", hint=f"use a whole number from 1 to {_MOST}.")
        for name in ("silent_seconds", "start_seconds", "grace_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range.", hint="use a number above 0.")
        if self.min_processes is not None and self.min_processes > self.processes:
            raise ConfigError(
                f"min_processes={self.min_processes} exceeds processes={self.processes}.", hint="lower --min-processes."
            )
        if self.snapshot_every is not None and self.backend not in ("local", "mpi", "ray"):
            raise ConfigError(
                f"--snapshot-every needs Meshwright's supervisor, which the {self.backend} backend does not use.",
                hint="leave it out, and save checkpoints more often: -- train --checkpoint-every N.",
            )
        if self.processes % self.nodes:
            raise ConfigError(
                f"{self.processes} processes cannot be split evenly over {self.nodes} nodes.",
                hint="use a multiple of --nodes for --processes.",
            )

    @property
    def policy(self) -> Policy:
        """What the supervisor allows."""
        return Policy(
            max_failures=self.max_failures,
            max_preemptions=self.max_preemptions,
            backoff=self.backoff,
            quarantine_after=self.quarantine_after,
            grace_seconds=self.grace_seconds,
        )

    @property
    def sizes(self) -> list[int]:
        """Numbers of processes that the run may have, the largest first.

        Example:
            >>> LaunchOptions(processes=8, min_processes=2).sizes, LaunchOptions(processes=8).sizes
            ([8, 4, 2], [8])
        """
        least = self.min_processes or self.processes
        return [size for size in range(self.processes, least - 1, -1) if self.processes % size == 0]


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the words of `meshwright launch` into its own options and the command after the first `--`.

    Example:
        >>> split_at_dashes(["--processes", "2", "--", "train", "--steps", "3"])
        (['--processes', '2'], ['train', '--steps', '3'])
    """
    place = list(words).index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])
