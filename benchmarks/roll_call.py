"""Thousands of ranks join one coordinator on this machine, with slow, late and wrong ones among them.

Every rank runs the client code of the real roll call in a thread of one process; rank 0 has a process of its own. Some
ranks send their report a few bytes at a time, some start late, and some present a wrong token first, are refused, and
come back with the right one.

    python benchmarks/roll_call.py --ranks 2000
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from meshwright.distributed import roll_call as client
from meshwright.distributed.address import Address
from meshwright.distributed.token import create_token
from meshwright.errors import LaunchError

FACTS = {f"option_{n}": n for n in range(60)} | {"code": "sha256:" + "0" * 16, "data files": "sha256:" + "1" * 16}
_SERVER = """
import json, resource, sys, time
sys.path[:0] = json.loads(sys.argv[1])
from meshwright.distributed import roll_desk
from meshwright.distributed.roll_call import Address, call_roll
address, number, token, facts = json.loads(sys.argv[2])
told, lines = [], []
parse = roll_desk.parse_report
def counting(*args):
    found = parse(*args)
    lines.append(found[0].rank)
    return found
roll_desk.parse_report = counting
opened = lambda bound: print("listening", flush=True)
problem, began = None, time.process_time()
try:
    options = {"timeout": 60, "token": token, "facts": facts, "tell": told.append, "opened": opened}
    call_roll(Address("127.0.0.1", address), number, 0, **options)
except ValueError as error:
    problem = str(error)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
used = time.process_time() - began
print(json.dumps({"told": told, "messages": lines, "bytes": peak, "cpu": used, "problem": problem}), flush=True)
"""


@dataclass(frozen=True)
class Figures:
    """The outcome of one launch; `num_bytes` and `cpu_seconds` are of rank 0, and of all other ranks together."""

    joined: int
    refused: int
    seconds: float
    messages_per_rank: float
    num_bytes: tuple[int, int]
    cpu_seconds: tuple[float, float]


class _SlowSocket(socket.socket):
    """Sends a few bytes at a time, over about two seconds."""

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        size = max(1, len(data) // 20)
        for place in range(0, len(data), size):
            super().sendall(data[place : place + size], flags)
            time.sleep(0.1)


def launch_ranks(number: int, *, slow: int, late: int, wrong: int, seconds_late: float = 3.0) -> Figures:
    """Lets `number` ranks join; of them, `slow` are slow, `late` are late, and `wrong` begin with a wrong token."""
    _allow_files(number + 512)
    token, port = create_token(), _free_port()
    arguments = [json.dumps(sys.path), json.dumps([port, number, token, FACTS])]
    server = subprocess.Popen([sys.executable, "-c", _SERVER, *arguments], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    address, heard = Address("127.0.0.1", port), dict[int, str | None]()
    refused: collections.Counter[str] = collections.Counter()
    kinds = dict(enumerate(["slow"] * slow + ["late"] * late + ["wrong"] * wrong, start=1))

    def call(rank: int, secret: str) -> None:
        client.call_roll(address, number, rank, timeout=60, token=secret, facts=FACTS, await_jax=False)

    def run(rank: int) -> None:
        kind = kinds.get(rank)
        try:
            if kind == "late":
                time.sleep(seconds_late)
            if kind == "wrong":
                try:
                    call(rank, create_token())
                except LaunchError as error:
                    refused["another token" in str(error)] += 1
            call(rank, token)
            heard[rank] = None
        except LaunchError as error:
            heard[rank] = str(error)

    with _slow_connections(kinds):
        began, used = time.monotonic(), time.process_time()
        # 2,000 threads share one GIL here; real ranks do not, so keep them from handing it around.
        sys.setswitchinterval(0.05)
        threading.stack_size(256 * 1024)
        threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(1, number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds, used = time.monotonic() - began, time.process_time() - used
        threading.stack_size(0)
        sys.setswitchinterval(0.005)
    answer = json.loads(server.stdout.read())
    server.stdout.close()
    server.wait()
    assert answer["problem"] is None, answer["problem"]
    wrong_answers = {rank: text for rank, text in heard.items() if text is not None}
    assert not wrong_answers, next(iter(wrong_answers.values()))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    each = collections.Counter(answer["messages"])
    return Figures(
        len(heard) + 1, refused[True], seconds, max(each.values()), (answer["bytes"], own), (answer["cpu"], used)
    )


@contextlib.contextmanager
def _slow_connections(kinds: dict[int, str]):
    """Gives the threads of slow ranks a socket that sends slowly."""
    connect = client._connect

    def connect_slowly(address: Address, deadline: float) -> socket.socket | None:
        line = connect(address, deadline)
        name = threading.current_thread().name
        if line is None or not name.isdigit() or kinds.get(int(name)) != "slow":
            return line
        return _SlowSocket(fileno=line.detach())

    client._connect = connect_slowly
    try:
        yield
    finally:
        client._connect = connect


def _allow_files(number: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(number, hard), hard))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    share = options.ranks // 100
    print(f"{options.ranks} ranks, of which {share} slow, {share} late, {share} with a wrong token first")
    for _ in range(options.repeat):
        found = launch_ranks(options.ranks, slow=share, late=share, wrong=share)
        met = found.seconds <= 15 and max(found.num_bytes) < 500e6 and found.messages_per_rank == 1
        pairs = zip(found.num_bytes, found.cpu_seconds, strict=True)
        server, others = (f"{size / 1e6:.0f} MB and {used:.1f} CPU s" for size, used in pairs)
        print(
            f"{found.joined} joined in {found.seconds:.1f} s, {found.refused} refused; {found.messages_per_rank} "
            f"message per rank; {server} (rank 0), {others} (all other ranks): {'met' if met else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
