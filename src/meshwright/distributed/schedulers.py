"""Detection of mpirun, srun and Slurm from the environment variables that they set."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshwright.distributed.address import Address
from meshwright.errors import LaunchError

PER_PROCESS = "MESHWRIGHT_DEVICES_PER_PROCESS"
"""Variable with the number of GPUs of each process, if several share a machine."""
ALL_DEVICES = "MESHWRIGHT_DEVICES"
"""Variable with the number of devices of the whole run, which is checked."""


@dataclass(frozen=True)
class ProcessSlot:
    """A process's rank under a launcher; `num_local` counts the processes on this machine (None if unknown)."""

    started_by: str
    rank: int
    num_processes: int
    local_rank: int
    num_local: int | None

    @property
    def on_one_machine(self) -> bool:
        return self.num_local == self.num_processes


def find_place() -> ProcessSlot | None:
    """Returns this process's slot under mpirun or srun, or None if it was started alone.

    Example:
        >>> find_place() is None
        True
    """
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        place = ProcessSlot("mpirun", *(int(env[f"OMPI_COMM_WORLD_{name}"]) for name in names))
    # A batch script runs in a job but not in a step; srun starts steps.
    elif "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env:
        number, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "0"))
        num_local = number if nodes == 1 else _tasks_on_each(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
        place = ProcessSlot("srun", int(env["SLURM_PROCID"]), number, int(env["SLURM_LOCALID"]), num_local)
    else:
        return None
    return place if place.num_processes > 1 else None


def _tasks_on_each(text: str) -> int | None:
    """Returns the number of tasks on each node from Slurm's `2(x3)`, or None if nodes differ.

    >>> _tasks_on_each("1(x2)"), _tasks_on_each("8"), _tasks_on_each("2(x3),1"), _tasks_on_each("")
    (1, 8, None, None)
    """
    count = text.partition("(")[0]
    return int(count) if count.isdigit() and "," not in text else None


def on_slurm() -> bool:
    """Returns whether this is one of several processes in a Slurm job, started by srun or by mpirun inside the job.

    A batch script is not: it runs alone, although Slurm sets `SLURM_NTASKS` for it too.

    Example:
        >>> on_slurm()
        False
    """
    return "SLURM_JOB_ID" in os.environ and find_place() is not None


def coordinator_of(place: ProcessSlot) -> Address:
    """Returns the coordinator address, which JAX derives from the job's id and first host."""
    from jax._src.clusters import ClusterEnv  # no public API finds it without initializing

    found, *_ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 300)
    if found is None:
        raise LaunchError(
            f"JAX found no coordinator address for process {place.rank} of {place.num_processes} under "
            f"{place.started_by}.",
            hint="pass the same --coordinator HOST:PORT to every process.",
        )
    address = Address.parse(found)
    return Address("127.0.0.1", address.port) if place.on_one_machine else address


def local_devices(place: ProcessSlot) -> list[int] | None:
    """Returns the ids of the GPUs of this machine that this process uses, or None for all visible ones.

    Processes that share a machine take one GPU each, or `MESHWRIGHT_DEVICES_PER_PROCESS`, unless the scheduler or the
    user has already assigned them.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None  # JAX reads it
    if "SLURM_GPUS_PER_TASK" in os.environ:
        return None  # Slurm shows each task its own
    alone = place.num_local == 1
    assigned = any(
        name in os.environ and "," not in os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    )
    each = int(os.environ.get(PER_PROCESS, "1"))
    return None if alone or assigned else list(range(place.local_rank * each, (place.local_rank + 1) * each))


def check_device_count(found: int) -> None:
    """Raises if the run does not have the number of devices that its launcher asked for in `MESHWRIGHT_DEVICES`.

    Example:
        >>> check_device_count(8)  # nothing was asked for
    """
    wanted = os.environ.get(ALL_DEVICES, "")
    if wanted.isdigit() and int(wanted) != found:
        raise LaunchError(
            f"the launcher asked for {wanted} devices, but the processes see {found}.",
            hint="check the GPUs of each host (`meshwright doctor`) and of each process (CUDA_VISIBLE_DEVICES).",
        )
