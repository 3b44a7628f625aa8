"""Rank 0's side of the roll call: one thread serves all connections, each with a limit in bytes and seconds."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from meshwright.distributed.address import Address, listen
from meshwright.distributed.expected_hosts import expected_host
from meshwright.distributed.roll_report import (
    LONGEST_LINE,
    Report,
    challenge,
    disagreement,
    new_nonce,
    parse_report,
    signed_verdict,
    some,
)
from meshwright.errors import FileFormatError, LaunchError

PATIENCE = 5.0
"""Seconds that a connection has to send its report."""
GRACE = 2.0
"""Seconds to wait for more ranks after two differ, so that the error can name the minority."""
_SPARE = 256  # connections beyond one per rank before the oldest is dropped
_TOLD = 20
_LONGEST_PROBLEM = 4000


class _Line:
    """A connection; `report` is None until it has reported."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer
        self.since = time.monotonic()
        self.data = bytearray()
        self.server, self.nonce = new_nonce(), ""
        self.report: Report | None = None


class RollDesk:
    """Takes the reports of all other ranks and gives them one verdict.

    A stranger, a slow client, a rank outside the run and a second process with the same rank are refused and counted;
    the launch continues. If a process that has reported disconnects, its rank is free again.
    """

    def __init__(
        self,
        address: Address,
        own: Report,
        *,
        token: str | None,
        timeout: float,
        bind: str | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.address, self.own, self.token, self.timeout = address, own, token, timeout
        self._tell = tell
        _allow_connections(own.num_processes)
        self._server, self.bound = listen(address, bind)
        self._server.setblocking(False)
        self._deadline = time.monotonic() + timeout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._pending: dict[_Line, None] = {}  # in the order of their arrival
        self._joined: dict[int, _Line] = {}
        self._refusals: list[str] = []
        self._differ_since: float | None = None
        self._problem: list[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for line in [*self._pending, *self._joined.values()]:
            line.sock.close()
        self._server.close()
        self._selector.close()

    def call(self) -> str:
        """Waits for all ranks, sends the verdict, and returns the address that this desk had."""
        while self._problem is None and len(self._joined) + 1 < self.own.num_processes:
            if time.monotonic() >= self._deadline:
                self._problem = self._differences() or self._missing()
            elif self._differ_since is not None and time.monotonic() >= self._differ_since + GRACE:
                break
            else:
                self._serve(self._next_time())
                self._expire()
        problem = self._problem or self._differences()
        if problem is not None:
            problem = [text[:_LONGEST_PROBLEM] for text in problem]
        self._selector.unregister(self._server)
        self._server.close()  # before the verdict, after which the other ranks wait for JAX to listen here
        self._announce(problem)
        if problem is not None:
            raise LaunchError(problem[0], hint=problem[1])
        return self.bound

    # --- Connections ---

    def _serve(self, until: float) -> None:
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if key.data is None:
                self._accept()
            elif key.data.sock.fileno() >= 0:  # not closed since
                self._read(key.data)

    def _next_time(self) -> float:
        times = [self._deadline]
        if self._differ_since is not None:
            times.append(self._differ_since + GRACE)
        if self._pending:
            times.append(next(iter(self._pending)).since + PATIENCE)
        return min(times)

    def _accept(self) -> None:
        for _ in range(256):  # then read, so that strangers cannot keep this loop busy
            try:
                sock, peer = self._server.accept()
            except BlockingIOError:
                return
            except OSError:  # too many open files
                if not self._pending:
                    time.sleep(0.05)
                    return
                self._refuse(next(iter(self._pending)), "too many connections")
                continue
            sock.setblocking(False)
            line = _Line(sock, str(peer[0]))
            self._pending[line] = None
            self._selector.register(sock, selectors.EVENT_READ, line)
            if not _send(sock, challenge(line.server, self.token)):
                self._drop(line)
            if len(self._pending) > self.own.num_processes + _SPARE:
                self._refuse(next(iter(self._pending)), "too many connections")

    def _read(self, line: _Line) -> None:
        try:
            data = line.sock.recv(LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if line.report is not None:  # a joined rank says nothing more, so this is its end
            self._note(f"{line.report} left")
            self._drop(line)
            return
        line.data += data
        said, newline, _ = bytes(line.data).partition(b"\n")
        if newline and len(said) < LONGEST_LINE:
            self._handle(line, said)
        elif len(line.data) >= LONGEST_LINE:
            self._refuse(line, f"more than {LONGEST_LINE} bytes")
        elif not data:
            self._drop(line)

    def _expire(self) -> None:
        now = time.monotonic()
        for line in list(self._pending):
            if now < line.since + PATIENCE:
                break
            self._refuse(line, f"no report within {PATIENCE:g} s")

    def _drop(self, line: _Line) -> None:
        self._pending.pop(line, None)
        if line.report is not None and self._joined.get(line.report.rank) is line:
            del self._joined[line.report.rank]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        line.sock.close()

    # --- Reports ---

    def _handle(self, line: _Line, said: bytes) -> None:
        try:
            report, line.nonce = parse_report(said, self.token, line.server)
        except PermissionError:
            _send(line.sock, b'{"refused": "token"}\n')
            self._refuse(line, "a wrong token")
            return
        except (FileFormatError, ValueError, TypeError):  # whatever a stranger sends must not end the launch
            self._refuse(line, "not a report")
            return
        number = self.own.num_processes
        if report.num_processes != number:
            self._problem = [
                f"the processes disagree on their number: {report} was started as one of {report.num_processes}, "
                f"{self.own} as one of {number}.",
                "start every process with the same num_processes.",
            ]
        elif not 0 <= report.rank < number:
            problem = [f"{report} is out of range for {number} processes.", f"use process_id 0 to {number - 1}."]
            self._turn_away(line, problem)
            return
        elif (other := self._holder(report.rank)) is not None:
            text = f"two processes have rank {report.rank}: {other} and {report}. The first stays in the run."
            self._turn_away(line, [text, "use every process_id once."])
            return
        del self._pending[line]
        line.report = report
        self._joined[report.rank] = line
        if self._differ_since is None and report.facts != self.own.facts:
            self._differ_since = time.monotonic()

    def _holder(self, rank: int) -> Report | None:
        """Returns the process that has a rank, if it is still connected."""
        if rank == 0:
            return self.own
        line = self._joined.get(rank)
        if line is None:
            return None
        try:
            line.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return line.report
        except OSError:
            pass
        self._drop(line)  # it has closed, or says more than it may
        return None

    def _turn_away(self, line: _Line, problem: list[str]) -> None:
        _send(line.sock, signed_verdict(problem, self.token, server=line.server, nonce=line.nonce))
        self._refuse(line, problem[0].rstrip("."))

    def _refuse(self, line: _Line, why: str) -> None:
        self._note(f"refused a connection from {line.peer}: {why}")
        self._drop(line)

    def _note(self, text: str) -> None:
        self._refusals.append(text)
        del self._refusals[10 * _TOLD :]
        if self._tell is not None and len(self._refusals) <= _TOLD:
            self._tell(f"roll call: {text}.")

    # --- The verdict ---

    def _differences(self) -> list[str] | None:
        return disagreement(self._reports())

    def _reports(self) -> list[Report]:
        found = [self.own, *(line.report for line in self._joined.values() if line.report is not None)]
        return sorted(found, key=lambda report: report.rank)

    def _missing(self) -> list[str]:
        number, address = self.own.num_processes, self.address
        ranks = [rank for rank in range(1, number) if rank not in self._joined]
        shown = some([f"{rank}{_at(expected_host(rank, number))}" for rank in ranks])
        joined, refused = self._reports(), self._refusals
        return [
            f"{len(ranks)} of {number} processes did not join at {address} within {self.timeout:g} s: rank {shown}. "
            f"Joined: {some(joined)}." + (f" Also: {'; '.join(refused[:5])}." if refused else ""),
            f"check that they were started and can reach {address.host} on port {address.port}.",
        ]

    def _announce(self, problem: Sequence[str] | None) -> None:
        """Sends the verdict and lets the other side close first, so that no old connection holds the port."""
        waiting = set()
        for line in list(self._joined.values()):
            if _send(line.sock, signed_verdict(problem, self.token, server=line.server, nonce=line.nonce)):
                waiting.add(line)
        for line in list(self._pending):
            self._drop(line)
        deadline = time.monotonic() + 2.0
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                waiting.discard(key.data)
                self._selector.unregister(key.fileobj)


def _allow_connections(num_processes: int) -> None:
    """Raises the limit on open files to what the ranks need, here and later in JAX's service."""
    try:
        import resource
    except ImportError:  # not POSIX
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_processes + 2 * _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if most < num_processes + 64:
        raise LaunchError(
            f"rank 0 may open {hard} files, but {num_processes} processes need a connection each.",
            hint="raise the hard limit on open files (ulimit -Hn).",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _send(sock: socket.socket, data: bytes) -> bool:
    """Sends a short message without waiting; returns whether the system took all of it."""
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False


def _at(host: Any) -> str:
    return "" if host is None else f" ({host})"
