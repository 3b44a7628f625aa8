"""Joining several processes into one run."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from meshwright.distributed.address import Address, is_loopback
from meshwright.distributed.roll_call import call_roll
from meshwright.distributed.schedulers import ProcessSlot, coordinator_of, find_place, local_devices
from meshwright.distributed.token import TOKEN, find_token
from meshwright.errors import LaunchError, MeshwrightWarning


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
    bind: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> str | None:
    """Joins this process to a multi-process run; returns a one-line summary, or None if it runs alone.

    Under mpirun or srun no arguments are needed; otherwise pass all three. Call it before anything uses a device, and
    after choosing the platform and the number of simulated devices.

    With a token in the environment (`MESHWRIGHT_TOKEN` or `MESHWRIGHT_TOKEN_FILE`), only processes that know it can
    join. A launcher sets one; without it, anybody who reaches the port can, and a warning says so unless the address is
    a loopback address.

    Args:
        coordinator: `host:port` of rank 0, which listens on that address and no other.
        num_processes: number of processes.
        process_id: rank of this process.
        timeout: seconds to wait for the other processes before raising an error that names the missing ranks.
        bind: host for rank 0 to listen on, if its machine does not have the coordinator's address, as behind NAT;
            "0.0.0.0" listens on all interfaces.
        facts: values that must be equal on all ranks, such as the configuration. If they are not, all ranks raise an
            error that names the ranks which differ.

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
    token = find_token()
    has_mtls()  # raises before the others wait
    bound = call_roll(
        address,
        number,
        rank,
        timeout=timeout,
        token=token,
        bind=bind,
        facts=facts,
        tell=_tell,
        opened=lambda bound: _warn_if_open(address, bound, number, token),
    )
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


MTLS = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
"""Environment variables with which newer versions of JAX secure their coordination service."""


def _warn_if_open(address: Address, bound: str, number: int, token: str | None) -> None:
    """Warns on rank 0 about ports that strangers can use, and about an address that other machines cannot reach."""
    host = Address.parse(bound).host
    if is_loopback(host):
        if not address.is_local:
            text = f"{address.host} is {host} on the machine of rank 0, so only processes on that machine can join"
            warnings.warn(
                f"{text}.\nhint: pass its IP address to reach it from others.", MeshwrightWarning, stacklevel=2
            )
        return
    if token is None:
        text = f"the roll call of {number} processes at {bound} has no token: anybody who reaches the port could join"
        warnings.warn(
            f"{text}.\nhint: set {TOKEN} to the same secret for every process.", MeshwrightWarning, stacklevel=2
        )
    if not has_mtls():
        warnings.warn(
            f"JAX's coordination service at {bound} is neither authenticated nor encrypted: anybody who reaches the "
            f"port can read and change its data.\nhint: use a private network or a firewall{_mtls_hint()}.",
            MeshwrightWarning,
            stacklevel=2,
        )


def has_mtls() -> bool:
    """Returns whether JAX's coordination service uses mutual TLS; raises if it is asked for, but JAX has none.

    Example:
        >>> has_mtls()
        False
    """
    if not hasattr(jax.config, "jax_mtls_cert_file"):
        asked = [name for name in MTLS if os.environ.get(name)]
        if asked:
            raise LaunchError(
                f"{asked[0]} is set, but jax {jax.__version__} has no mTLS, so its service would not be secured.",
                hint="update jax to a version with mTLS, such as 0.12, or unset it.",
            )
        return False
    return bool(jax.config.jax_mtls_cert_file)


def _mtls_hint() -> str:
    return f", or set {', '.join(MTLS)}" if hasattr(jax.config, "jax_mtls_cert_file") else ""


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
