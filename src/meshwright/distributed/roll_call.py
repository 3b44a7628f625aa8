"""Who is here? Asked before JAX's own start, which ends a process without a word on who was missing.

Rank 0 listens at the coordinator's address, every other rank reports there, and all hear the same answer: go on, or
what is wrong. Then the port is free again, for JAX. A report is one line of JSON; nothing else is read there.
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
    """Processes do not become one run."""


@dataclass(frozen=True)
class Address:
    """Where the coordinator, which is rank 0, can be reached."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Returns the address that `host:port` names.

        Example:
            >>> Address.parse("[::1]:1234"), Address.parse("node7:1234").is_local
            (Address(host='::1', port=1234), False)
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise LaunchError(f"{text!r} is no address of a coordinator.", hint='host:port, such as "10.0.0.1:1234".')
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can mean it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Report:
    """What a process says about itself."""

    rank: int
    num_processes: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


def call_roll(address: Address, num_processes: int, rank: int, *, timeout: float) -> str | None:
    """Returns once all processes are here; raises `LaunchError` on each of them where one is missing or differs.

    On rank 0, returns the address to listen at from now on: the coordinator's own, or all of the machine's where that
    one is not the machine's own, as behind a translated address.
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
                line.close()  # not one of us: a port scanner, a browser
                continue
            lines.append(line)
            problem = _wrong(report, reports)
            reports.append(report)
        server.close()  # before the answer: who hears it waits for JAX to listen here
        verdict = json.dumps({"problem": problem}).encode() + b"\n"
        for line in lines:
            with contextlib.suppress(OSError):  # it died since; JAX's own start tells of it
                line.sendall(verdict)
                # Its side closes first, so that no old connection holds the port.
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
            f"rank {own.rank} of {own.num_processes}, on {own.host}, found nobody at {address} in {timeout:g} s: "
            "rank 0 never started there.",
            hint=f"start rank 0 on {address.host}; is that its address, and is port {address.port} open?",
        )
    with line:
        # What is said of missing ranks comes after rank 0's own deadline.
        line.settimeout(max(0.01, deadline - time.monotonic()) + timeout + 5)
        try:
            line.sendall(json.dumps(vars(own)).encode() + b"\n")
            verdict = _read_line(line)
        except (OSError, ValueError):
            verdict = None
    if not isinstance(verdict, dict) or "problem" not in verdict:
        raise LaunchError(
            f"rank {own.rank} of {own.num_processes}, on {own.host}, lost rank 0 at {address} while others joined.",
            hint=f"see what rank 0 said last; is something else listening on port {address.port}?",
        )
    _raise(verdict["problem"])
    # JAX tries again only after a second where nobody listens yet.
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
                    f"rank 0 cannot listen at {address}: port {address.port} is in use, by another run perhaps, or by "
                    "a second rank 0 of this one.",
                    hint="choose another port, on every process.",
                ) from None
            if error.errno != errno.EADDRNOTAVAIL:
                raise LaunchError(f"rank 0 cannot listen at {address}: {error}.", hint="another port?") from error
    raise LaunchError(f"rank 0 cannot listen at {address}.", hint="is that an address of the machine of rank 0?")


def _own_hosts(address: Address) -> list[str]:
    """Returns where to listen, in the order to try: not at more addresses than it takes."""
    if address.is_local:
        return ["127.0.0.1" if address.host == "localhost" else address.host]
    try:
        found = str(socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        found = "127."  # a name that only others know
    # Many machines know themselves by a local address, at which nobody else reaches them. And an address that is not
    # the machine's own may still lead to it, translated.
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
    """Returns what the next line says in JSON; raises `OSError` or `ValueError` where it says nothing."""
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
    """Returns what is wrong with a report, and a hint."""
    number = others[0].num_processes
    if report.num_processes != number:
        return [
            f"the processes of this run differ in their number: {report} was started as one of {report.num_processes}, "
            f"{others[0]} as one of {number}.",
            "start every process with the same num_processes.",
        ]
    for other in others:
        if other.rank == report.rank:
            return [f"two processes are rank {report.rank}: {other} and {report}.", "every process_id only once."]
    return None


def _missing(address: Address, reports: list[Report], number: int, timeout: float) -> list[str]:
    ranks = [rank for rank in range(number) if rank not in [report.rank for report in reports]]
    shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
    return [
        f"{len(ranks)} of {number} processes never joined at {address} in {timeout:g} s: rank {shown}. Here are "
        f"{', '.join(map(str, reports[:8]))}{', ...' if len(reports) > 8 else ''}.",
        f"look whether they were started, and whether they reach {address.host} on port {address.port}.",
    ]


def _raise(problem: Any) -> None:
    if problem is not None:
        raise LaunchError(str(problem[0]), hint=str(problem[1]))
