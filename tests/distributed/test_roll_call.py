"""The roll call: every process gets the same answer, which names missing and wrong ranks. Threads act as processes."""

import json
import socket
import threading
import time

import pytest

from meshwright.distributed.roll_call import Address, LaunchError, _own_hosts, call_roll


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


def test_a_duplicate_rank_is_reported_on_all():
    heard, _ = roll([(0, 3), (1, 3), (1, 3)])
    assert heard[0] == heard[1] == heard[2]
    assert "two processes have rank 1: rank 1 (" in heard[0]


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen at 127.0.0.1:{port}: port {port} is in use"):
            call_roll(Address("127.0.0.1", port), 2, 0, timeout=1)


@pytest.mark.parametrize(
    ("host", "leads_to", "wanted"),
    [
        ("localhost", None, ["127.0.0.1"]),
        ("127.0.0.1", None, ["127.0.0.1"]),
        ("::1", None, ["::1"]),
        ("node7", "10.0.0.7", ["10.0.0.7", "0.0.0.0"]),
        ("node7", "127.0.1.1", ["0.0.0.0"]),  # Debian's default for its own name
        ("fd00::2", "fd00::2", ["fd00::2", "::"]),
    ],
)
def test_it_listens_on_as_few_interfaces_as_possible(host, leads_to, wanted, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (leads_to, 1))])
    assert _own_hosts(Address(host, 1)) == wanted


def test_strangers_are_ignored():
    address, heard = Address("127.0.0.1", free_port()), []
    thread = threading.Thread(target=lambda: heard.append(call_roll(address, 2, 0, timeout=10)))
    thread.start()
    for said in (b"GET / HTTP/1.1\r\n\r\n\n", b"[]\n", b'{"rank": "x"}\n', b"\xff" * 5000, b""):
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", address.port), timeout=5) as stranger:
                    stranger.sendall(said)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    with socket.create_connection(("127.0.0.1", address.port), timeout=5) as friend:
        friend.sendall(b'{"rank": 1, "num_processes": 2, "host": "h", "pid": 1}\n')
        assert json.loads(friend.recv(100)) == {"problem": None}
    thread.join()
    assert heard == [f"127.0.0.1:{address.port}"]


def test_a_coordinator_that_dies_is_reported():
    server = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", server.getsockname()[1])

    def die():
        line, _ = server.accept()
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
