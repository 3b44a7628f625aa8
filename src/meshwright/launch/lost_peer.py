"""Recognition of errors that mean that another process of the run is gone."""

from __future__ import annotations

from collections.abc import Iterable

SIGNS = (
    "Gloo all-",
    "Gloo context initialization failed",
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "coordination service",
    "CoordinationService",
    "coordination agent",
    "heartbeat timeout",
    "NCCL operation",
    "ncclRemoteError",
    "unhandled system error",
    "Socket closed",
    "Barrier failed",
    "Barrier timed out",
    "JAX distributed service detected fatal errors",
    "another task died",
)


def is_lost_peer(lines: Iterable[str]) -> bool:
    """Returns whether the last lines of a rank that aborted say that it lost another one.

    Example:
        >>> is_lost_peer(["F1118 12:00:00 client.h:80] ... the JAX distributed service detected fatal errors ..."])
        True
    """
    return any(sign in line for line in lines for sign in SIGNS)


def lost_peer(error: BaseException) -> str | None:
    """Returns the reason in one line if an error comes from the loss of another process, else None.

    Example:
        >>> lost_peer(RuntimeError("INTERNAL: Gloo all-reduce failed: [pair.cc:553] Connection closed by peer"))
        'Gloo all-reduce failed: [pair.cc:553] Connection closed by peer'
        >>> lost_peer(ValueError("Connection refused")) is None  # only errors of the runtime count
        True
    """
    text = " ".join(str(error).split())
    if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError", "RuntimeError"):
        return None
    if not any(sign in text for sign in SIGNS):
        return None
    kind, colon, rest = text.partition(": ")
    return (rest if colon and kind.isupper() else text)[:200]
