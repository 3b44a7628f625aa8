"""The hosts on which the ranks of a run were started, as far as a launcher or a scheduler says."""

from __future__ import annotations

import contextlib
import os
import re
import socket

HOSTS = "MESHWRIGHT_HOSTS"
"""Environment variable with the host of each rank, separated by commas."""
_MOST = 100_000


def expected_host(rank: int, num_processes: int) -> str | None:
    """Returns the host of a rank with its address, or None if nobody said it.

    Example:
        >>> os.environ[HOSTS] = "127.0.0.1,localhost"
        >>> expected_host(0, 2), expected_host(1, 2), expected_host(0, 3)
        ('127.0.0.1', 'localhost, 127.0.0.1', None)
        >>> del os.environ[HOSTS]
    """
    hosts = os.environ.get(HOSTS, "").split(",") if HOSTS in os.environ else _slurm_hosts()
    if len(hosts) != num_processes:
        return None
    host = hosts[rank].strip()
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0]
        return host if found == host else f"{host}, {found}"
    return f"{host}, an unknown name"


def _slurm_hosts() -> list[str]:
    """Returns the host of each rank of a Slurm step that fills one host after the other; empty if unknown."""
    env = os.environ
    if env.get("SLURM_DISTRIBUTION", "block").split(",")[0].split(":")[0] != "block":
        return []
    names = expand_hosts(env.get("SLURM_STEP_NODELIST", ""))
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part)
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) != len(names) or sum(counts) > _MOST:
        return []
    return [name for name, count in zip(names, counts, strict=True) for _ in range(count)]


def expand_hosts(text: str) -> list[str]:
    """Returns the names in Slurm's short form of a list of hosts; empty if it has another form.

    Example:
        >>> expand_hosts("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    names: list[str] = []
    for prefix, inside, suffix in re.findall(r"([^,\[\]]*)(?:\[([\d,-]+)\])?([^,\[\]]*)(?:,|$)", text):
        if not inside:
            names += [prefix + suffix] if prefix + suffix else []
            continue
        for part in inside.split(","):
            first, _, last = part.partition("-")
            if not first or not 0 <= int(last or first) - int(first) < _MOST:
                return []
            names += [f"{prefix}{n:0{len(first)}d}{suffix}" for n in range(int(first), int(last or first) + 1)]
    return names if len(names) <= _MOST else []
