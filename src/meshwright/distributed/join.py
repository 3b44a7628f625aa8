"""Joining several processes into one run."""

from __future__ import annotations

import jax

from meshwright.distributed.roll_call import Address, LaunchError, call_roll
from meshwright.distributed.schedulers import ProcessSlot, coordinator_of, find_place, local_devices


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
) -> str | None:
    """Joins this process to a multi-process run; returns a one-line summary, or None if it runs alone.

    Under mpirun or srun no arguments are needed; otherwise pass all three. Call it before anything uses a device, and
    after choosing the platform and the number of simulated devices.

    Args:
        coordinator: `host:port` of rank 0. With a loopback address (127.0.0.1), rank 0 listens on that address only.
        num_processes: number of processes.
        process_id: rank of this process.
        timeout: seconds to wait for the other processes before raising an error that names the missing ranks.

    Example:
        >>> join() is None  # no arguments, and not started by mpirun or srun
        True
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    place = find_place()
    if jax.distributed.is_initialized():
        return _already_joined(num_processes)
    if place is None and all(value is None for value in given.values()):
        return None
    number = num_processes if num_processes is not None else place.num_processes if place else None
    rank = process_id if process_id is not None else place.rank if place else None
    missing = [name for name, value in given.items() if value is None]
    if number is None or rank is None or (coordinator is None and place is None):
        raise LaunchError(
            f"this process was not started by mpirun or srun, so it also needs {' and '.join(missing)}.",
            hint="pass all three: --coordinator HOST:PORT --num-processes N --process-id I.",
        )
    if not 0 <= rank < number:
        raise LaunchError(f"process_id {rank} is out of range for {number} processes.", hint=f"use 0 to {number - 1}.")
    if number == 1:
        return None
    _require_unused()
    if coordinator is not None:
        address = Address.parse(coordinator)
    else:
        assert place is not None
        address = coordinator_of(place)
    bound = call_roll(address, number, rank, timeout=timeout)
    _start(address, bound, number, rank, place, timeout)
    by = f", started by {place.started_by}" if place is not None else ""
    return f"rank {rank} of {number}, {jax.local_device_count()} of {jax.device_count()} devices, at {address}{by}"


def _start(
    address: Address, bound: str | None, number: int, rank: int, place: ProcessSlot | None, timeout: float
) -> None:
    try:
        jax.distributed.initialize(
            str(address),
            num_processes=number,
            process_id=rank,
            # Under mpirun, JAX's detection gives each process one device, even one that is alone on its machine.
            cluster_detection_method="deactivate",
            local_device_ids=local_devices(place) if place is not None else None,
            initialization_timeout=max(1, round(timeout)),
            coordinator_bind_address=bound,
        )
    except RuntimeError as error:
        raise LaunchError(f"rank {rank} of {number} could not join at {address}: {error}") from error
    if jax.process_count() != number:
        raise LaunchError(
            f"JAX sees {jax.process_count()} of {number} processes: backend {jax.default_backend()!r} does not connect "
            "them, so each would train alone.",
            hint="set JAX_PLATFORMS to a backend for several processes: cpu, cuda or tpu.",
        )


def _already_joined(num_processes: int | None) -> str:
    number = jax.process_count()
    if num_processes is not None and num_processes != number:
        raise LaunchError(
            f"this process has already joined a run of {number} processes; it cannot join one of {num_processes}.",
            hint="remove num_processes, or the earlier call of jax.distributed.initialize.",
        )
    return f"rank {jax.process_index()} of {number}, already joined"


def _require_unused() -> None:
    from jax._src.xla_bridge import backends_are_initialized  # no public API asks without starting one

    if backends_are_initialized():
        raise LaunchError(
            f"JAX was used before join(): it has started {jax.default_backend()!r} with "
            f"{jax.local_device_count()} local device(s).",
            hint="call join() before jax.devices(), before creating arrays, and before importing modules that do.",
        )
