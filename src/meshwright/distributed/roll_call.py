"""A roll call before `jax.distributed.initialize`, which does not name the missing ranks when it aborts.

Rank 0 listens at the coordinator's address, every other rank reports there once, and all receive the same verdict:
continue, or an error. The port is then free for JAX. Strangers, slow clients and ranks that cannot belong to the run
are refused, each for itself, while the others continue. See `roll_report` for the messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.distributed.address import Address
from meshwright.distributed.roll_desk import RollDesk
from meshwright.distributed.roll_report import (
    LONGEST_LINE,
    Report,
    describe_fact,
    is_genuine,
    new_nonce,
    parse_message,
    signed_report,
)
from meshwright.errors import FileFormatError, LaunchError

__all__ = ["Address", "LaunchError", "call_roll"]

_FIRST_LINE = 10.0
"""Seconds that a rank waits for the first line of rank 0."""
_AGAIN = 5.0
"""Seconds that a rank tries to connect again after it lost rank 0."""


def call_roll(
    address: Address,
    num_processes: int,
    rank: int,
    *,
    timeout: float,
    token: str | None = None,
    facts: Mapping[str, Any] | None = None,
    bind: str | None = None,
    tell: Callable[[str], None] | None = None,
    opened: Callable[[str], None] | None = None,
    await_jax: bool = True,
) -> str | None:
    """Waits until all processes have reported; raises `LaunchError` on all of them if one is missing or inconsistent.

    On rank 0, returns the address to listen on from now on.

    Args:
        token: secret of the run; without one, anybody who reaches the port can report.
        facts: values that must be equal on all ranks, by name.
        bind: host for rank 0 to listen on, if not the coordinator's.
        tell: on rank 0, called with a line about each refused connection.
        opened: on rank 0, called with the address once it listens there.
        await_jax: whether the other ranks wait until rank 0 listens again, as it does with JAX's service.
    """
    described = {name: describe_fact(value) for name, value in (facts or {}).items()}
    own = Report(rank, num_processes, socket.gethostname(), os.getpid(), described)
    if rank == 0:
        with RollDesk(address, own, token=token, timeout=timeout, bind=bind, tell=tell) as desk:
            if opened is not None:
                opened(desk.bound)
            return desk.call()
    deadline = time.monotonic() + timeout
    _answer(address, own, token, deadline, timeout)
    if await_jax:  # its client retries only once a second
        line = _connect(address, time.monotonic() + timeout)
        if line is not None:
            line.close()
    return None


def _answer(address: Address, own: Report, token: str | None, deadline: float, timeout: float) -> None:
    """Reports to rank 0 and waits for its verdict; connects again if rank 0 drops the connection before."""
    me = f"rank {own.rank} of {own.num_processes} on {own.host}"
    until, verdict, failure = deadline, None, None
    while verdict is None:
        line = _connect(address, until)
        if line is None:
            raise failure or LaunchError(
                f"{me} could not reach rank 0 at {address}{_resolved(address)} within {timeout:g} s.",
                hint=f"start rank 0 on {address.host}, and check that port {address.port} is open there.",
            )
        with line:
            verdict = _exchange(line, address, own, token, me, deadline, timeout)
        failure = _lost(me, address)
        until = min(deadline, time.monotonic() + _AGAIN)
    problem = verdict["problem"]
    if problem is not None:
        raise LaunchError(str(problem[0]), hint=str(problem[1]))


def _exchange(
    line: socket.socket, address: Address, own: Report, token: str | None, me: str, deadline: float, timeout: float
) -> dict[str, Any] | None:
    """Returns rank 0's verdict, or None if the connection ended without one."""
    with line.makefile("rb") as stream:
        line.settimeout(_FIRST_LINE)
        try:
            first = stream.readline(LONGEST_LINE)
        except OSError:
            first = b""
        if not first:
            return None
        try:
            said = parse_message(first, {"meshwright": int, "nonce": str, "token": bool})
        except FileFormatError:
            raise _lost(me, address) from None
        if said["token"] != (token is not None):
            which, other = ("rank 0", "this process") if said["token"] else ("this process", "rank 0")
            raise LaunchError(
                f"{me}: {which} has a token, {other} has none.",
                hint="set MESHWRIGHT_TOKEN or MESHWRIGHT_TOKEN_FILE to the same token for every process.",
            )
        nonce = new_nonce()
        message = signed_report(own, token, server=said["nonce"], nonce=nonce)
        if len(message) > LONGEST_LINE:
            raise LaunchError(f"{me}: its report has {len(message)} bytes; at most {LONGEST_LINE} are possible.")
        # Rank 0 reports missing ranks only after its own deadline.
        line.settimeout(max(0.01, deadline - time.monotonic()) + timeout + 5)
        try:
            line.sendall(message)
            answer = stream.readline(LONGEST_LINE)
        except OSError:
            return None
        if not answer:
            return None
        try:
            verdict = parse_message(answer, {})
        except FileFormatError:
            raise _lost(me, address) from None
    if verdict.get("refused") == "token":
        raise LaunchError(
            f"{me}: rank 0 at {address} refused this process, because it has another token.",
            hint="set MESHWRIGHT_TOKEN or MESHWRIGHT_TOKEN_FILE to the same token for every process.",
        )
    if not is_genuine(verdict, token, "verdict", said["nonce"]) or verdict.get("nonce") != nonce:
        raise LaunchError(
            f"{me}: the program at {address} does not know this run's token.",
            hint=f"check that no other program uses port {address.port}.",
        )
    problem = verdict.get("problem", 0)
    if problem is not None and not (isinstance(problem, list) and len(problem) == 2):
        raise _lost(me, address)
    return verdict


def _lost(me: str, address: Address) -> LaunchError:
    return LaunchError(
        f"{me} lost its connection to rank 0 at {address}.",
        hint=f"read the last output of rank 0, and check that no other program uses port {address.port}.",
    )


def _connect(address: Address, deadline: float) -> socket.socket | None:
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError, UnicodeError):
            return socket.create_connection((address.host, address.port), timeout=min(left, 5.0))
        time.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
    return None


def _resolved(address: Address) -> str:
    """Returns the IP address behind a host name, in brackets, or nothing."""
    with contextlib.suppress(OSError, UnicodeError):
        found = str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
        return "" if found == address.host else f" ({found})"
    return " (its name cannot be resolved here)"
