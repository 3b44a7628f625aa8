"""JSON lines files survive kills, full disks and rewinds."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.loop.logging.run_log import JsonLines, read_lines
from meshwright.loop.logging.trackers import plain


def written(path, count):
    lines = JsonLines(path)
    for step in range(1, count + 1):
        lines.add({"step": step, "loss": 1 / step})
    lines.close()


def test_a_torn_last_line_is_dropped_and_the_next_one_stands_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    written(path, 3)
    whole = path.read_bytes()
    for cut in range(1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = JsonLines(path)
        lines.add({"step": 9})
        lines.close()
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == [*range(1, whole[:cut].count(b"\n") + 1), 9]


def test_a_torn_line_longer_than_one_look_is_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == b'{"step": 1}\n'
    path.write_bytes(b"x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == b""


def test_a_flush_is_one_write(tmp_path, monkeypatch):
    lines, calls = JsonLines(tmp_path / "a.jsonl"), []
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, block: (calls.append(block), write(file, block))[1])
    for step in range(50):
        lines.add({"step": step})
    assert not calls
    lines.flush()
    lines.flush()
    assert len(calls) == 1
    lines.close()
    assert len(list(read_lines(lines.path))) == 50


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.add({"step": 1})
    lines.flush()
    lines.add({"step": 2})
    lines.add({"step": 3})
    write = os.write

    def half(file, block):
        # A partial write before the disk is full.
        if len(block) > 14:
            return write(file, block[:14])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        lines.flush()
    assert list(read_lines(lines.path)) == [{"step": 1}]
    monkeypatch.undo()
    lines.close()
    assert [line["step"] for line in read_lines(lines.path)] == [1, 2, 3]


def test_numbers_round_trip_exactly(tmp_path):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 500, dtype=np.uint32).view(np.float32)
    values = [*bits[np.isfinite(bits)], np.float32(0.1), np.float64(1 / 3), np.float32(np.nan), np.float32(-np.inf)]
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.add({"values": values, "jax": jnp.float32(0.1), "half": jnp.bfloat16(0.1), "count": np.int64(2**53 + 1)})
    lines.close()
    (line,) = read_lines(lines.path)
    for got, value in zip(line["values"], values, strict=True):
        assert struct.pack("d", got) == struct.pack("d", float(value))
    assert (np.float32(line["jax"]), line["half"], line["count"]) == (np.float32(0.1), 0.10009765625, 2**53 + 1)


def test_text_of_any_kind_is_kept(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    texts = ["a\nb", "\u2028 é ☃", '"\\', "\x00"]
    for text in texts:
        lines.add({"text": text})
    lines.close()
    assert [line["text"] for line in read_lines(lines.path)] == texts
    assert len(lines.path.read_bytes().split(b"\n")) == len(texts) + 1


def test_invalid_lines_are_numbered_and_dropped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\n{"step": 2}\n[3]\n{"step": 4}\n')
    lines = JsonLines(path)
    assert lines.keep(lambda line: line["step"] < 4) == (1, [2, 4])
    lines.add({"step": 5})
    lines.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 5]


def test_a_kill_during_a_rewind_leaves_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    written(path, 5)
    before = path.read_bytes()
    for name in ("fsync", "replace"):

        def killed(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, name, killed)
            lines = JsonLines(path)
            with pytest.raises(KeyboardInterrupt):
                lines.keep(lambda line: line["step"] <= 2)
        assert path.read_bytes() == before
        lines.close()
    lines = JsonLines(path)
    assert lines.keep(lambda line: line["step"] <= 2) == (3, [])
    assert lines.keep(lambda line: line["step"] <= 2) == (0, [])
    lines.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    """Three kills of a process that writes all the time."""
    code = """
        import sys, pathlib
        from meshwright.loop.logging.run_log import JsonLines, read_lines
        path = pathlib.Path(sys.argv[1])
        lines = JsonLines(path)
        step = max((line["step"] for line in read_lines(path)), default=0)
        print("ready", flush=True)
        while True:
            for _ in range(40):
                step += 1
                lines.add({"step": step, "text": "x" * 500})
            lines.flush()
    """
    path = tmp_path / "a.jsonl"
    for seconds in (0.05, 0.11, 0.02):
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path)], stdout=subprocess.PIPE)
        with process, process.stdout:
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
            process.send_signal(signal.SIGKILL)
    JsonLines(path).close()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 100


def test_plain_keeps_json_types():
    assert plain({"a": (1, "b", None, True)}) == {"a": [1, "b", None, True]}
