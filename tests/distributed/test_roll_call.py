"""Who is here: each process hears the same answer, and who is missing or wrong is named. Threads are the processes."""

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
    """Calls the roll with each `(rank, num_processes)`; returns what each heard: an address, None, an error's text."""
    address, heard = Address(host, free_port()), {}

    def run(place, rank, number):
        try:
            heard[place] = call_roll(address, number, rank, timeout=timeouts.get(f"rank{rank}", timeout))
        except LaunchError as error:
            heard[place] = str(error)

    threads = [threading.Thread(target=run, args=(place, *call)) for place, call in enumerate(calls)]
    if any(rank == 0 for rank, _ in calls):
        # JAX would listen there once rank 0 has heard the answer; who waits for it must not wait long.
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
def test_all_are_here(number):
    heard, address = roll([(rank, number) for rank in range(number)], host="localhost")
    assert heard == [f"127.0.0.1:{address.port}", *[None] * (number - 1)]


def test_the_ranks_that_never_came_are_named_to_all_that_did():
    heard, address = roll([(0, 4), (2, 4)], timeout=0.5)
    assert heard[0] == heard[1]
    assert f"2 of 4 processes never joined at {address} in 0.5 s: rank 1, 3. Here are rank 0 (" in heard[0]
    assert f"hint: look whether they were started, and whether they reach 127.0.0.1 on port {address.port}." in heard[0]


def test_a_coordinator_that_never_came_is_named():
    (heard,), address = roll([(1, 2)], timeout=0.5)
    assert heard.startswith(f"rank 1 of 2, on {socket.gethostname()}, found nobody at {address} in 0.5 s: rank 0 never")


def test_a_process_that_counts_differently_is_named_to_both():
    heard, _ = roll([(0, 2), (1, 3)])
    assert heard[0] == heard[1]
    assert "differ in their number: rank 1 (" in heard[0]
    assert "was started as one of 3, rank 0 (" in heard[0]
    assert "as one of 2" in heard[0]


def test_two_with_one_rank_are_named_to_all():
    heard, _ = roll([(0, 3), (1, 3), (1, 3)])
    assert heard[0] == heard[1] == heard[2]
    assert "two processes are rank 1: rank 1 (" in heard[0]


def test_a_port_in_use_is_told():
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
        ("node7", "127.0.1.1", ["0.0.0.0"]),  # what Debian calls itself
        ("fd00::2", "fd00::2", ["fd00::2", "::"]),
    ],
)
def test_it_listens_at_no_more_addresses_than_it_takes(host, leads_to, wanted, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (leads_to, 1))])
    assert _own_hosts(Address(host, 1)) == wanted


def test_strangers_are_left_out():
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


def test_a_coordinator_that_dies_is_told():
    server = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", server.getsockname()[1])

    def die():
        line, _ = server.accept()
        line.recv(10)
        line.close()
        server.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(LaunchError, match=r"rank 1 of 2, on .*, lost rank 0 at"):
        call_roll(address, 2, 1, timeout=2)
    thread.join()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1234", "host:x", "host:0", "host:70000", "1234"])
def test_an_address_without_host_or_port_is_refused(text):
    with pytest.raises(LaunchError, match=r"is no address of a coordinator.\nhint: host:port"):
        Address.parse(text)
