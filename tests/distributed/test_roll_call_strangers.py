"""Strangers at the roll call: refused one by one while the ranks of the run join. Threads act as processes."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from meshwright.distributed import roll_desk
from meshwright.distributed.roll_call import Address, LaunchError, call_roll
from meshwright.distributed.roll_report import Report, parse_message, signed_report
from meshwright.distributed.token import TOKEN, TOKEN_FILE, create_token, find_token
from meshwright.loop.launch_facts import launch_facts
from meshwright.loop.settings.config import TrainConfig

SECRET = "a token of this test"
GOOD = {"rank": 1, "num_processes": 3, "host": "h", "pid": 1, "facts": {}, "nonce": "00", "proof": ""}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Launch:
    """Rank 0 of a run in a thread; `rank` adds others, and `result` waits for all."""

    def __init__(self, number, *, token=SECRET, facts=None, timeout=10.0):
        self.address, self.number, self.timeout = Address("127.0.0.1", free_port()), number, timeout
        self.heard, self.told, self.threads = {}, [], []
        self.opened = threading.Event()
        self.rank(0, token=token, facts=facts, tell=self.told.append, opened=lambda _: self.opened.set())
        assert self.opened.wait(5)

    def rank(self, rank, *, name=None, token=SECRET, number=None, **options):
        def run():
            began = time.monotonic()
            try:
                number_ = self.number if number is None else number
                options.setdefault("timeout", self.timeout)
                call_roll(self.address, number_, rank, token=token, await_jax=False, **options)
                text = None
            except LaunchError as error:
                text = str(error)
            self.heard[rank if name is None else name] = (text, time.monotonic() - began)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def connect(self):
        line = socket.create_connection(("127.0.0.1", self.address.port), timeout=5)
        return line, parse_message(read_line(line), {"nonce": str})["nonce"]

    def result(self):
        for thread in self.threads:
            thread.join()
        return {name: text for name, (text, _) in self.heard.items()}


def read_line(line):
    """Returns the next line, or all until the end of the connection."""
    data = b""
    while not data.endswith(b"\n") and (more := line.recv(4096)):
        data += more
    return data


def forged(**changes):
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


PAYLOADS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    "empty line": b"\n",
    "nothing": b"",
    "list": b"[]\n",
    "null": b"null\n",
    "no proof": forged(proof=""),
    "false proof": forged(proof="0" * 64),
    "proof of another type": forged(proof=7),
    "rank as text": forged(rank="1"),
    "rank as float": forged(rank=1.0),
    "rank as bool": forged(rank=True),
    "nan": forged(rank=float("nan")),
    "huge integer": b'{"rank": 1' + b"0" * 6000 + b"}\n",
    "deep": b"[" * 20000 + b"]" * 20 + b"\n",
    "deep facts": forged(facts={"a": {"b": {"c": {"d": {}}}}}),
    "huge": b"\xff" * 200_000,
    "twice": b'{"rank": 1, "rank": 2}\n',
    "old report": b'{"rank": 1, "num_processes": 3, "host": "h", "pid": 1}\n',
    "not text": b"\xff\xfe\x00\n",
}


def test_payloads_of_strangers_are_refused_and_the_launch_continues(monkeypatch):
    monkeypatch.setattr(roll_desk, "PATIENCE", 0.5)
    launch = Launch(3)
    silent = [launch.connect()[0] for _ in range(20)]
    refused = 0
    for name, payload in PAYLOADS.items():
        line, _ = launch.connect()
        with line, contextlib.suppress(OSError):
            line.sendall(payload)
            line.shutdown(socket.SHUT_WR)
            answer = read_line(line)
            assert answer in (b"", b'{"refused": "token"}\n'), name
            refused += 1
    assert refused > 15  # the others were cut off while they still sent
    for line in silent:  # dropped after the time limit
        assert read_line(line) == b""
        line.close()
    launch.rank(1)
    launch.rank(2)
    assert launch.result() == {0: None, 1: None, 2: None}
    assert "roll call: refused a connection from 127.0.0.1: a wrong token." in launch.told
    assert len(launch.told) <= 20


def test_a_report_cannot_be_used_again():
    launch = Launch(3)
    line, nonce = launch.connect()
    report = signed_report(Report(1, 3, "h", 1), SECRET, server=nonce, nonce="00")
    other, _ = launch.connect()
    with line, other:
        other.sendall(report)  # as a listener on the network would
        assert read_line(other) == b'{"refused": "token"}\n'
    launch.rank(1)
    launch.rank(2)
    assert launch.result() == {0: None, 1: None, 2: None}


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ((SECRET, "another token of a test"), (None, "refused this process, because it has another token")),
        ((SECRET, None), (None, "rank 0 has a token, this process has none")),
        ((None, SECRET), (None, "this process has a token, rank 0 has none")),
    ],
)
def test_a_wrong_or_missing_token_is_refused_at_once(tokens, texts):
    first, other = tokens
    launch = Launch(2, token=first)
    launch.rank(1, name="stranger", token=other)
    while "stranger" not in launch.heard:
        time.sleep(0.01)
    assert texts[1] in launch.heard["stranger"][0]
    assert launch.heard["stranger"][1] < 8  # at once, not when the 10 s of the launch end
    launch.rank(1, token=first)
    assert {name: launch.result()[name] for name in (0, 1)} == {0: None, 1: None}


def test_a_false_coordinator_is_recognized():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pose():
            line, _ = server.accept()
            with line, line.makefile("rb") as stream:
                line.sendall(b'{"meshwright": 2, "nonce": "11", "token": true}\n')
                nonce = json.loads(stream.readline())["nonce"]
                line.sendall(json.dumps({"problem": None, "nonce": nonce, "proof": "0" * 64}).encode() + b"\n")

        thread = threading.Thread(target=pose)
        thread.start()
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(LaunchError, match="does not know this run's token"):
            call_roll(address, 2, 1, timeout=5, token=SECRET)
        thread.join()


def test_impostor_ranks_are_refused_and_the_launch_continues():
    launch = Launch(4)
    launch.rank(1)
    for name, rank in (("zero", 0), ("high", 4), ("negative", -1), ("huge", 10**12)):
        line, nonce = launch.connect()
        with line:
            line.sendall(signed_report(Report(rank, 4, "h", 1), SECRET, server=nonce, nonce="22"))
            problem = json.loads(read_line(line))["problem"][0]
            assert ("two processes have rank 0" if rank == 0 else "is out of range for 4") in problem, name
    launch.rank(2)
    launch.rank(3)
    assert launch.result() == {0: None, 1: None, 2: None, 3: None}


def test_a_duplicate_rank_is_refused_and_the_launch_continues():
    launch = Launch(3)
    launch.rank(1)
    for name in ("second", "third"):
        launch.rank(1, name=name)
    while len(launch.heard) < 2:  # of three processes, one stays
        time.sleep(0.01)
    launch.rank(2)
    heard = launch.result()
    refused = [text for name, text in heard.items() if name in (1, "second", "third") and text is not None]
    assert len(refused) == 2
    assert all("two processes have rank 1: rank 1 (" in text for text in refused)
    assert heard[0] is heard[2] is None


def test_a_rank_that_leaves_can_join_again():
    launch = Launch(3)
    line, nonce = launch.connect()
    line.sendall(signed_report(Report(1, 3, "h", 1), SECRET, server=nonce, nonce="33"))
    line.close()
    launch.rank(1)
    launch.rank(2)
    assert launch.result() == {0: None, 1: None, 2: None}


def test_slow_and_late_ranks_join():
    launch = Launch(3)
    line, nonce = launch.connect()
    message = signed_report(Report(1, 3, "h", 1), SECRET, server=nonce, nonce="44")
    launch.rank(2)
    for place in range(0, len(message), 20):
        line.sendall(message[place : place + 20])
        time.sleep(0.01)
    with line:
        assert json.loads(read_line(line))["problem"] is None
    assert launch.result() == {0: None, 2: None}


def test_a_rank_that_rank_0_dropped_reports_again(monkeypatch):
    monkeypatch.setattr(roll_desk, "PATIENCE", 0.2)
    send, delays = socket.socket.sendall, [0.6]

    def late(self, data):
        if data.startswith(b'{"facts"') and delays:
            time.sleep(delays.pop())
        return send(self, data)

    monkeypatch.setattr(socket.socket, "sendall", late)
    launch = Launch(2)
    launch.rank(1)
    assert launch.result() == {0: None, 1: None}
    assert launch.told == ["roll call: refused a connection from 127.0.0.1: no report within 0.2 s."]


# --- Ranks that differ, hosts that never join ---


@pytest.mark.parametrize(("fact", "value"), [("seed", 5), ("code", "sha256:1"), ("config", {"a": 1}), ("data", "x")])
def test_ranks_that_differ_stop_with_the_rank_named(fact, value, monkeypatch):
    monkeypatch.setattr(roll_desk, "GRACE", 0.2)
    facts = {"seed": 0, "code": "sha256:0", "config": {"a": 0}, "data": "y"}
    launch = Launch(5, facts=facts, timeout=60)
    for rank in (1, 2, 3):  # rank 4 never joins, and need not
        launch.rank(rank, facts={**facts, fact: value} if rank == 2 else facts)
    heard = launch.result()
    assert len(set(heard.values())) == 1
    assert f"the processes of this run differ in `{fact}`: rank 2 (" in heard[0]
    assert max(seconds for _, seconds in launch.heard.values()) < 40  # not when the 60 s of the launch end


def test_the_facts_of_a_run_show_its_options_code_and_data(tmp_path):
    for name, text in (("a", "some text"), ("b", "some next"), ("c", "some text")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.txt").write_text(text)
    config = TrainConfig()
    facts = [launch_facts(config.changed({"data": str(tmp_path / name), "process_id": 1})) for name in "abc"]
    assert facts[0]["data files"] == facts[2]["data files"] != facts[1]["data files"]
    assert "process_id" not in facts[0]
    assert launch_facts(config.changed({"seed": 7}))["seed"] == 7
    assert "data files" not in launch_facts(config.changed({"data": str(tmp_path / "missing")}))


def test_a_host_that_never_joins_is_named_with_its_address_and_the_time(monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOSTS", "localhost,127.0.0.9,localhost")
    launch = Launch(3, timeout=0.4)
    launch.rank(1)
    heard = launch.result()
    assert heard[0] == heard[1]
    assert "1 of 3 processes did not join at 127.0.0.1:" in heard[0]
    assert "within 0.4 s: rank 2 (localhost, 127.0.0.1). Joined: rank 0 (" in heard[0]


def test_refused_connections_are_in_the_error_about_missing_ranks():
    launch = Launch(2, timeout=0.5)
    launch.rank(1, token="another token of a test")
    heard = launch.result()
    assert "Also: refused a connection from 127.0.0.1: a wrong token." in heard[0]


def test_hundred_ranks_with_slow_late_and_wrong_ones_join(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import roll_call

    figures = roll_call.launch_ranks(100, slow=2, late=2, wrong=2, seconds_late=0.5)
    assert figures.joined == 100
    assert figures.refused == 2
    assert figures.messages_per_rank == 1
    assert sum(figures.cpu_seconds) < 5  # 0.3 usually; the clock says more about the machine than about the roll call


# --- The token ---


def test_a_token_file_must_be_private(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text(create_token() + "\n")
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN_FILE, str(path))
    assert find_token() == path.read_text().strip()
    path.chmod(0o640)
    with pytest.raises(LaunchError, match=r"other users can read or change .* \(mode 640"):
        find_token()
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN, SECRET)
    with pytest.raises(LaunchError, match="both MESHWRIGHT_TOKEN and MESHWRIGHT_TOKEN_FILE are set"):
        find_token()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "cannot read .*: No such file"),
        (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
        (lambda path: (path.write_text("short"), path.chmod(0o600)), "has 5 characters; it needs 16 to 1024"),
        (lambda path: (path.write_bytes(b"\xff" * 40), path.chmod(0o600)), "is not text"),
        (lambda path: (path.write_bytes(b"x" * 5000), path.chmod(0o600)), "has 4097 characters"),
    ],
)
def test_a_token_file_that_is_none_is_an_error(make, text, tmp_path, monkeypatch):
    path = tmp_path / "token"
    make(path)
    monkeypatch.setenv(TOKEN_FILE, str(path))
    with pytest.raises(LaunchError, match=text):
        find_token()
