"""The coordinator's address, and the socket that listens there and nowhere else."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from meshwright.errors import LaunchError

_BACKLOG = 4096  # thousands of ranks start at the same moment


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
        if not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or not 0 < int(port) < 65536:
            raise LaunchError(f"{text!r} is not a coordinator address.", hint='use host:port, e.g. "10.0.0.1:1234".')
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def is_local(self) -> bool:
        """Whether this is a loopback address; a host name other than localhost is not, whatever it resolves to."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Returns whether an IP address is a loopback address; a name is not.

    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.7"), is_loopback("localhost")
        (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_hosts(host: str) -> list[str]:
    """Returns the IP addresses that a host stands for, in the order to try; never a wildcard that was not asked for.

    Example:
        >>> own_hosts("localhost"), own_hosts("10.0.0.7")
        (['127.0.0.1'], ['10.0.0.7'])
    """
    if host == "localhost":
        return ["127.0.0.1"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LaunchError(
            f"rank 0 cannot resolve its own address {host!r}.",
            hint="pass an IP address of the machine of rank 0, or set --bind to the address to listen on.",
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def listen(address: Address, bind: str | None = None) -> tuple[socket.socket, str]:
    """Returns a socket that listens at the coordinator's address, and the IP address and port that it has.

    Args:
        bind: host to listen on instead, if this machine does not have the coordinator's address, as behind NAT;
            "0.0.0.0" stands for all interfaces.

    Example:
        >>> with listen(Address("localhost", 0))[0] as server:
        ...     server.getsockname()[0]
        '127.0.0.1'
    """
    for host in own_hosts(bind or address.host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server((host, address.port), family=family, backlog=_BACKLOG)
            return server, str(Address(host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise LaunchError(
                    f"rank 0 cannot listen at {address}: port {address.port} is in use, perhaps by another run or "
                    "by a second rank 0 of this one.",
                    hint="pass another port to every process.",
                ) from None
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise LaunchError(f"rank 0 cannot listen at {address}: {error}.", hint="try another port.") from error
    raise LaunchError(
        f"rank 0 cannot listen at {bind or address.host}, which is not an address of this machine.",
        hint="start rank 0 on that machine; behind NAT, also set --bind to a local address (0.0.0.0 for all).",
    )
