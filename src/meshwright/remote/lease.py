"""One writer at a time: a lease on a store, by numbered objects that are only ever created once.

The holder of the lease is whoever created the object with the highest number. Creating one is a single conditional
request ("put if absent"), so two processes never get the same number. The holder rewrites its object every few seconds.
A process that finds an object first watches it: if it changes, its holder is alive and the process gives up; if it does
not change for `LEASE_SECONDS`, the holder is dead, and the process creates the next number. No clocks are compared.

A holder that was suspended for longer than that notices the higher number and stops. Numbers are never reused, so they
also tell which session of a run was the last.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import StoreError
from meshwright.remote.object_store import ObjectStore

FOLDER = ".writers"
LEASE_SECONDS = 60.0
"""A holder that does not renew its lease for this long may lose it."""
BEAT_SECONDS = 10.0
"""Seconds between renewals."""


class Lease:
    """The right to write below a URL, renewed by a thread until `release`; `take_lease` makes it.

    Attributes:
        number: number of this session; higher than those of all earlier ones.
        before: number of the session before, or 0.
    """

    def __init__(self, store: ObjectStore, number: int, before: int, record: Mapping[str, Any]) -> None:
        self.number, self.before = number, before
        self._store, self._record = store, dict(record)
        self._lost: str | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> str | None:
        """Who took the lease over, or None while it is held, as far as known."""
        return self._lost

    def check(self) -> None:
        """Asks the store, and raises `StoreError` if another process took the lease over."""
        newest, record = _newest(self._store)
        if newest != self.number and self._lost is None:
            self._lost = _owner(record)
        if self._lost is not None:
            raise StoreError(
                f"{self._store} was taken over by {self._lost}, because this process did not renew its lease for "
                f"{LEASE_SECONDS:.0f} s.",
                hint="let the other process finish, or stop it and resume.",
            )

    def keep(self, *, seconds: float = BEAT_SECONDS) -> None:
        """Starts the thread that renews the lease."""
        self._thread = threading.Thread(target=self._renew, args=(seconds,), name="meshwright-lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Ends the lease, so that another process may start at once."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._lost is None:
            self._write(released=True)

    def _renew(self, seconds: float) -> None:
        while not self._over.wait(seconds) and self._lost is None:
            try:
                self.check()
                self._write()
            except StoreError:  # unreachable now, or lost: `check` says so before the next commit
                continue

    def _write(self, **more: Any) -> None:
        self._record["renewed"] += 1
        self._store.put(_name(self.number), json.dumps(self._record | more).encode())


def take_lease(
    store: ObjectStore,
    *,
    place: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda text: None,
    seconds: float | None = None,
) -> Lease:
    """Returns the lease on a store; raises `StoreError` if another process holds it.

    Args:
        place: identifies something that only one live process can hold, such as a locked local file. If the last holder
            named the same place, it is dead, and nobody has to wait.
        tell: called with a line of text before waiting.
        seconds: how long to watch a lease that may belong to a dead process (default: `LEASE_SECONDS`).

    Example:
        >>> from meshwright.remote import open_store
        >>> store = open_store("memory://bucket/leased")
        >>> lease = take_lease(store)
        >>> lease.release()
        >>> take_lease(store).before
        1
    """
    seconds = LEASE_SECONDS if seconds is None else seconds
    before, record = _newest(store)
    if record and not record.get("released") and (place is None or record.get("place") != dict(place)):
        tell(f"{store} is in use by {_owner(record)}; watching for up to {seconds:.0f} s whether it still is")
        _watch(store, before, record, seconds)
    number = before + 1
    mine = {"owner": f"process {os.getpid()} on {socket.gethostname()}", "token": secrets.token_hex(8), "renewed": 0}
    mine |= {} if place is None else {"place": dict(place)}
    data = json.dumps(mine).encode()
    # A request that is repeated after a lost answer finds its own object.
    if not store.put_new(_name(number), data) and store.read(_name(number)) != data:
        raise _held(store, _newest(store)[1])
    if store.put_new(_name(number), data):
        raise StoreError(
            f"{store}: the server ignores the condition of a conditional write (If-None-Match), so two runs could "
            "write there at once.",
            hint="update the server, or use a store with conditional writes.",
        )
    newest, other = _newest(store)
    if newest != number:
        raise _held(store, other)
    return Lease(store, number, before, mine)


def last_session(store: ObjectStore) -> int:
    """Returns the number of the last session that wrote to a store, or 0."""
    return max(_numbers(store), default=0)


def _watch(store: ObjectStore, number: int, record: Mapping[str, Any], seconds: float) -> None:
    """Returns once a lease has not been renewed for some seconds; raises if it is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 10))
        newest, now = _newest(store)
        if newest == number and now.get("released"):
            return
        if newest != number or now != record:
            raise _held(store, now)


def _held(store: ObjectStore, record: Mapping[str, Any]) -> StoreError:
    return StoreError(
        f"another process is training in {store}: {_owner(record)}.", hint="wait until it ends, or use another --run."
    )


def _newest(store: ObjectStore) -> tuple[int, dict[str, Any]]:
    number = last_session(store)
    data = store.read(_name(number)) if number else None
    try:
        record = json.loads(data or b"{}")
    except ValueError:
        record = {"owner": "an unknown process", "damaged": repr(data)}
    return number, record if isinstance(record, dict) else {"owner": "an unknown process"}


def _numbers(store: ObjectStore) -> list[int]:
    names = [name.removeprefix(f"{FOLDER}/") for name in store.list(FOLDER)]
    return [int(name) for name in names if name.isdecimal()]


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06}"


def _owner(record: Mapping[str, Any]) -> str:
    return str(record.get("owner", "an unknown process"))
