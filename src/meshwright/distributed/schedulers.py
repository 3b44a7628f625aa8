"""Who started this process: mpirun, srun, or a person; and what they say about it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from meshwright.distributed.roll_call import Address, LaunchError


@dataclass(frozen=True)
class ProcessSlot:
    """A process's place among those that were started together."""

    started_by: str
    rank: int
    num_processes: int
    local_rank: int
    num_local: int | None

    @property
    def on_one_machine(self) -> bool:
        """Whether all processes run on this machine."""
        return self.num_local == self.num_processes


def find_place() -> ProcessSlot | None:
    """Returns this process's place under mpirun or srun; None where it was started alone.

    Example:
        >>> find_place() is None
        True
    """
    env = os.environ
    if "OMPI_COMM_WORLD_SIZE" in env:
        place = ProcessSlot(
            "mpirun",
            int(env["OMPI_COMM_WORLD_RANK"]),
            int(env["OMPI_COMM_WORLD_SIZE"]),
            int(env["OMPI_COMM_WORLD_LOCAL_RANK"]),
            int(env["OMPI_COMM_WORLD_LOCAL_SIZE"]),
        )
    # A batch script has a job but no step of its own: only what srun started has.
    elif "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env:
        number, nodes = int(env["SLURM_NTASKS"]), int(env.get("SLURM_STEP_NUM_NODES", "0"))
        place = ProcessSlot(
            "srun", int(env["SLURM_PROCID"]), number, int(env["SLURM_LOCALID"]), number if nodes == 1 else None
        )
    else:
        return None
    return place if place.num_processes > 1 else None


def coordinator_of(place: ProcessSlot) -> Address:
    """Returns where processes that were started together meet; JAX knows, from the job's number and its first host."""
    from jax._src.clusters import ClusterEnv  # JAX has no public way to ask without starting

    found, *_ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 300)
    if found is None:
        raise LaunchError(
            f"this is process {place.rank} of {place.num_processes} under {place.started_by}, and JAX does not find "
            "out where they meet.",
            hint="pass --coordinator host:port, the same to every process.",
        )
    address = Address.parse(found)
    return Address("127.0.0.1", address.port) if place.on_one_machine else address


def local_devices(place: ProcessSlot) -> list[int] | None:
    """Returns which GPUs of its machine are this process's own; None for all that it sees.

    One each where several processes share a machine, unless the scheduler or the user has shared them out already.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None  # jax reads it itself
    alone = place.num_local == 1
    shared_out = any(
        name in os.environ and "," not in os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    )
    return None if alone or shared_out else [place.local_rank]
