"""The roll call: every process gets the same answer, which names missing and wrong ranks. Threads act as processes."""

import socket
import threading
import time

import pytest

from meshwright.distributed.address import listen, own_hosts
from meshwright.distributed.roll_call import Address, LaunchError, call_roll


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def roll(calls, timeout=10.0, host="127.0.0.1", **timeouts):
    """Calls the roll with each `(rank, num_processes)`; returns for each an address, None or an error's text."""
    address, heard = Address(host, free_port()), {}

    def run(place, rank, number):
        try:
            heard[place] = call_roll(address, number, rank, timeout=timeouts.get(f"rank{rank}", timeout))
        except LaunchError as error:
            heard[place] = str(error)

    threads = [threading.Thread(target=run, args=(place, *call)) for place, call in enumerate(calls)]
    if any(rank == 0 for rank, _ in calls):
        # Once rank 0 has its answer, JAX would listen there; the other ranks wait for that.
        threads.append(threading.Thread(target=_stand_in_for_jax, args=(address, heard, calls)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[place] for place in range(len(calls))], address


def _stand_in_for_jax(address, heard, calls):
    first = next(place for place, (rank, _) in enumerate(calls) if rank == 0)
    while first not in heard:
        time.sleep(0.01)
    if heard[first] == f"127.0.0.1:{address.port}":
        with socket.create_server(("127.0.0.1", address.port)):
            while len(heard) < len(calls):
                time.sleep(0.01)


@pytest.mark.parametrize("number", [2, 5])
def test_all_processes_join(number):
    heard, address = roll([(rank, number) for rank in range(number)], host="localhost")
    assert heard == [f"127.0.0.1:{address.port}", *[None] * (number - 1)]


def test_missing_ranks_are_named_on_every_rank():
    heard, address = roll([(0, 4), (2, 4)], timeout=0.5)
    assert heard[0] == heard[1]
    assert f"2 of 4 processes did not join at {address} within 0.5 s: rank 1, 3. Joined: rank 0 (" in heard[0]
    assert f"hint: check that they were started and can reach 127.0.0.1 on port {address.port}." in heard[0]


def test_a_missing_coordinator_is_named():
    (heard,), address = roll([(1, 2)], timeout=0.5)
    assert heard.startswith(f"rank 1 of 2 on {socket.gethostname()} could not reach rank 0 at {address} within 0.5 s.")


def test_a_different_number_of_processes_is_reported_on_both():
    heard, _ = roll([(0, 2), (1, 3)])
    assert heard[0] == heard[1]
    assert "the processes disagree on their number: rank 1 (" in heard[0]
    assert "was started as one of 3, rank 0 (" in heard[0]
    assert "as one of 2" in heard[0]


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen at 127.0.0.1:{port}: port {port} is in use"):
            call_roll(Address("127.0.0.1", port), 2, 0, timeout=1)


@pytest.mark.parametrize(
    ("host", "leads_to", "wanted"),
    [
        ("localhost", None, ["127.0.0.1"]),
        ("node7", ["10.0.0.7"], ["10.0.0.7"]),
        ("node7", ["127.0.1.1"], ["127.0.1.1"]),  # Debian's default for its own name
        ("node7", ["fd00::2", "10.0.0.7", "10.0.0.7"], ["fd00::2", "10.0.0.7"]),
    ],
)
def test_a_name_stands_for_its_own_addresses_only(host, leads_to, wanted, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (one, 1)) for one in leads_to])
    assert own_hosts(host) == wanted


def test_it_listens_at_the_address_given_and_nowhere_else(monkeypatch):
    find = socket.getaddrinfo
    names = {"node7": "127.0.0.2", "elsewhere": "203.0.113.9"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **kept: find(names.get(host, host), *more, **kept))
    with listen(Address("node7", free_port()))[0] as server:
        assert server.getsockname()[0] == "127.0.0.2"
    for host in ("elsewhere", "203.0.113.9"):
        with pytest.raises(LaunchError, match=rf"cannot listen at {host}, which is not an address of this machine"):
            listen(Address(host, free_port()))
    with listen(Address("elsewhere", free_port()), bind="127.0.0.1")[0] as server:
        assert server.getsockname()[0] == "127.0.0.1"
    with pytest.raises(LaunchError, match=r"cannot resolve its own address 'no\.such\.name\.invalid'"):
        listen(Address("no.such.name.invalid", free_port()))


def test_a_coordinator_that_dies_is_reported():
    server = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", server.getsockname()[1])

    def die():
        line, _ = server.accept()
        line.sendall(b'{"meshwright": 2, "nonce": "00", "token": false}\n')
        line.recv(10)
        line.close()
        server.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(LaunchError, match=r"rank 1 of 2 on .* lost its connection to rank 0 at"):
        call_roll(address, 2, 1, timeout=2)
    thread.join()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1234", "host:x", "host:0", "host:70000", "1234"])
def test_an_address_without_host_or_port_is_rejected(text):
    with pytest.raises(LaunchError, match=r"is not a coordinator address.\nhint: use host:port"):
        Address.parse(text)
