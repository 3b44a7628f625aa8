"""A roll call before `jax.distributed.initialize`, which does not name the missing ranks when it aborts.

Rank 0 listens at the coordinator address, every other rank reports there, and all receive the same verdict: continue,
or an error. The port is then free for JAX. A report is one line of JSON; anything else is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from meshwright.errors import MeshwrightError

_LONGEST_LINE = 4096


class LaunchError(MeshwrightError):
    """The processes could not form one run."""


@dataclass(frozen=True)
class Address:
    """The address of the coordinator, which is rank 0."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parses `host:port`.

        Example:
            >>> Address.parse("[::1]:1234"), Address.parse("node7:1234").is_local
            (Address(host='::1', port=1234), False)
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(f"{text!r} is not a coordinator address.", hint='use host:port, e.g. "10.0.0.1:1234".')
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_local(self) -> bool:
        """Whether this is a loopback address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Report:
    """The line that a process sends to rank 0."""

    rank: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


def call_roll(address: Address, num_processes: int, rank: int, *, timeout: float) -> str | None:
    """Waits until all processes have reported; raises `LaunchError` on all of them if one is missing or inconsistent.

    On rank 0, returns the address to listen on from now on: the coordinator's, or all interfaces if this machine does
    not have that address, as behind NAT.
    """
    own = Report(rank, num_processes, socket.gethostname(), os.getpid())
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _ask(address, own, deadline, timeout)
    _answer(address, own, deadline, timeout)
    return None


def _ask(address: Address, own: Report, deadline: float, timeout: float) -> str:
    server, bound = _listen(address)
    reports, lines = [own], list[socket.socket]()
    try:
        problem = None
        while problem is None and len(reports) < own.num_processes:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line, _ = server.accept()
            except TimeoutError:
                problem = _missing(address, reports, own.num_processes, timeout)
                break
            report = _read_report(line)
            if report is None:
                line.close()  # a stranger, such as a port scanner
                continue
            lines.append(line)
            problem = _wrong(report, reports)
            reports.append(report)
        server.close()  # before the verdict, after which the other ranks wait for JAX to listen here
        verdict = json.dumps({"problem": problem}).encode() + b"\n"
        for line in lines:
            with contextlib.suppress(OSError):  # it has died, which JAX will report
                line.sendall(verdict)
                # Let the other side close first, so that no old connection holds the port.
                line.settimeout(1.0)
                line.recv(1)
    finally:
        for line in lines:
            line.close()
        server.close()
    _raise(problem)
    return bound


def _answer(address: Address, own: Report, deadline: float, timeout: float) -> None:
    line = _connect(address, deadline)
    if line is None:
        raise LaunchError(
            f"rank {own.rank} of {own.num_processes} on {own.host} could not reach rank 0 at {address} within "
            f"{timeout:g} s.",
            hint=f"start rank 0 on {address.host}, and check that port {address.port} is open there.",
        )
    with line:
        # Rank 0 reports missing ranks only after its own deadline.
        line.settimeout(max(0.01, deadline - time.monotonic()) + timeout + 5)
        try:
            line.sendall(json.dumps(vars(own)).encode() + b"\n")
            verdict = _read_line(line)
        except (OSError, ValueError):
            verdict = None
    if not isinstance(verdict, dict) or "problem" not in verdict:
        raise LaunchError(
            f"rank {own.rank} of {own.num_processes} on {own.host} lost its connection to rank 0 at {address}.",
            hint=f"read the last output of rank 0, and check that no other program uses port {address.port}.",
        )
    _raise(verdict["problem"])
    # Wait until JAX listens, since its client retries only once a second.
    again = _connect(address, time.monotonic() + timeout)
    if again is not None:
        again.close()


def _listen(address: Address) -> tuple[socket.socket, str]:
    for host in _own_hosts(address):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, address.port), family=family, backlog=1024)
            return server, str(Address(host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"rank 0 cannot listen at {address}: port {address.port} is in use, perhaps by another run or "
                    "by a second rank 0 of this one.",
                    hint="pass another port to every process.",
                ) from None
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(f"rank 0 cannot listen at {address}: {error}.", hint="try another port.") from error
    raise LaunchError(f"rank 0 cannot listen at {address}.", hint="pass an address of the machine that runs rank 0.")


def _own_hosts(address: Address) -> list[str]:
    """Returns the hosts to listen on, in the order to try, on as few interfaces as possible."""
    if address.is_local:
        return ["127.0.0.1" if address.host == "localhost" else address.host]
    try:
        found = str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        found = "127."  # a name that only other machines can resolve
    # Many machines resolve their own name to a loopback address, and NAT hides the address that others use.
    everywhere = "::" if ":" in found else "0.0.0.0"
    return [everywhere] if Address(found, address.port).is_local else [found, everywhere]


def _connect(address: Address, deadline: float) -> socket.socket | None:
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((address.host, address.port), timeout=min(left, 5.0))
        except OSError:
            time.sleep(0.1)
    return None


def _read_line(line: socket.socket) -> Any:
    """Parses the next line as JSON; raises `OSError` or `ValueError` if there is none."""
    with line.makefile("rb") as stream:
        return json.loads(stream.readline(_LONGEST_LINE))


def _read_report(line: socket.socket) -> Report | None:
    line.settimeout(5.0)
    try:
        said = _read_line(line)
        return Report(int(said["rank"]), int(said["num_processes"]), str(said["host"])[:255], int(said["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _wrong(report: Report, others: list[Report]) -> list[str] | None:
    """Returns the problem with a report and a hint, or None."""
    number = others[0].num_processes
    if report.num_processes != number:
        return [
            f"the processes disagree on their number: {report} was started as one of {report.num_processes}, "
            f"{others[0]} as one of {number}.",
            "start every process with the same num_processes.",
        ]
    for other in others:
        if other.rank == report.rank:
            return [f"two processes have rank {report.rank}: {other} and {report}.", "use every process_id once."]
    return None


def _missing(address: Address, reports: list[Report], number: int, timeout: float) -> list[str]:
    ranks = [rank for rank in range(number) if rank not in [report.rank for report in reports]]
    shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return [
        f"{len(ranks)} of {number} processes did not join at {address} within {timeout:g} s: rank {shown}. Joined: "
        f"{', '.join(map(str, reports[:8]))}{', ...' if len(reports) > 8 else ''}.",
        f"check that they were started and can reach {address.host} on port {address.port}.",
    ]


def _raise(problem: Any) -> None:
    if problem is not None:
        raise LaunchError(str(problem[0]), hint=str(problem[1]))
