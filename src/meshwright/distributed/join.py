"""Several processes as one run: they find each other."""

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
    """Makes this process a part of a run of several; returns a line about it, or None where it runs alone.

    Under mpirun or srun no argument is needed: what these started together is one run. Elsewhere pass all three.
    Call it first, before anything uses a device; the platform and how many devices to simulate are set before it.

    Args:
        coordinator: `host:port` of rank 0. An address of this machine only (127.0.0.1) is only listened at there.
        timeout: how many seconds processes wait for each other. Then each that is there says who is not.

    Example:
        >>> join() is None  # neither asked to nor started by mpirun or srun
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
            f"this process was not started by mpirun or srun, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given.",
            hint="--coordinator HOST:PORT --num-processes N --process-id I, all three.",
        )
    if not 0 <= rank < number:
        raise LaunchError(f"process {rank} of {number} cannot be.", hint=f"ids go from 0 to {number - 1}.")
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
            # All is known: what JAX would still find out under mpirun is one device for each process, also on machines
            # with a single process and many.
            cluster_detection_method="deactivate",
            local_device_ids=local_devices(place) if place is not None else None,
            initialization_timeout=max(1, round(timeout)),
            coordinator_bind_address=bound,
        )
    except RuntimeError as error:
        raise LaunchError(f"rank {rank} of {number} cannot join at {address}: {error}") from error
    if jax.process_count() != number:
        raise LaunchError(
            f"JAX sees {jax.process_count()} of {number} processes: backend {jax.default_backend()!r} does not know of "
            "the others, and each would train alone.",
            hint="JAX_PLATFORMS must name a backend that runs over several processes: cpu, cuda, tpu.",
        )


def _already_joined(num_processes: int | None) -> str:
    number = jax.process_count()
    if num_processes is not None and num_processes != number:
        raise LaunchError(
            f"this process has joined a run of {number} processes before; it cannot join one of {num_processes}.",
            hint="leave out num_processes, or jax.distributed.initialize.",
        )
    return f"rank {jax.process_index()} of {number}, joined before"


def _require_unused() -> None:
    from jax._src.xla_bridge import backends_are_initialized  # JAX has no public way to ask without starting one

    if backends_are_initialized():
        raise LaunchError(
            f"JAX was used before this process could join a run: it has started {jax.default_backend()!r} with "
            f"{jax.local_device_count()} device(s) of its own.",
            hint="join first: before jax.devices(), before any array, and before importing what makes one.",
        )
