"""The log of a run: metrics and events as JSON lines, also sent to trackers.

The log survives a kill at any point: each flush is one append, opening a file drops a torn last line, and `rewind`
replaces the file atomically. Each line ends with a checksum of itself, so that damage to a line is noticed; lines that
are removed or repeated as a whole are not.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from meshwright.bounded_reader import bounded_lines, open_regular, parse_json
from meshwright.errors import FileFormatError
from meshwright.files import write_atomically
from meshwright.loop.logging.trackers import OnlineRun, TensorBoard, Tracker, plain

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_LONGEST = 16 * 2**20  # bytes in a line
_CHECKSUM = re.compile(rb'(.*), "crc": "([0-9a-f]{8})"\}\s*', re.DOTALL)


class RunLog:
    """Writes `metrics.jsonl` and `events.jsonl` into a run folder on rank 0; on other ranks it does nothing.

    Metrics are buffered for `flush_seconds` or until `flush`. Flush before a checkpoint: a resumed run recomputes only
    the steps after it. Events are written at once, from any thread.

    Args:
        tensorboard: also write TensorBoard event files (needs tensorboardX).
        wandb, trackio: project name, or a dict of options for their `init`. A resumed run continues the same online
            run, and does not send steps again.
        tell: called with a line of text when writing starts to fail, e.g. on a full disk, and when it works again.
            The run continues, and unwritten lines stay buffered.
        flush_seconds: seconds between writes of metrics.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with RunLog(folder, tensorboard=False) as log:
        ...     for step in (1, 2, 3):
        ...         log.metrics(step, {"loss": 1 / step})
        ...     log.event("checkpoint", 2, "saved")
        ...     log.rewind(2)  # as a run resumed from step 2 does
        1
        >>> [line["step"] for line in read_lines(folder / "metrics.jsonl")]
        [1, 2]
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int = 0,
        tensorboard: bool = True,
        wandb: str | Mapping[str, Any] | None = None,
        trackio: str | Mapping[str, Any] | None = None,
        tell: Callable[[str], None] | None = None,
        flush_seconds: float = 1.0,
    ) -> None:
        self.folder = Path(folder)
        self.writes = rank == 0
        self._tell = tell
        self._flush_seconds = flush_seconds
        self._last_flush = time.monotonic()
        # Checkpoint saves and the watchdog log events from their own threads.
        self._lock = threading.RLock()
        self._trackers: list[Tracker] = []
        self._unsent: list[Callable[[Tracker], None]] = []
        self._problems: dict[str, str] = {}
        if not self.writes:
            return
        self._metrics = JsonLines(self.folder / METRICS)
        self._events = JsonLines(self.folder / EVENTS)
        if tensorboard:
            self._trackers.append(TensorBoard(self.folder / "tensorboard"))
        if wandb is not None:
            self._trackers.append(OnlineRun("wandb", self.folder, wandb))
        if trackio is not None:
            self._trackers.append(OnlineRun("trackio", self.folder, trackio))

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the metrics of a step; waits for values that are JAX arrays."""
        if not self.writes:
            return
        with self._lock:
            line = {"step": int(step), "time": time.time(), **values}
            self._metrics.add(line)
            self._unsent.append(lambda tracker: tracker.metrics(int(step), line))
            if time.monotonic() - self._last_flush >= self._flush_seconds:
                self.flush()

    def event(self, kind: str, step: int, text: str, **facts: Any) -> None:
        """Logs an event and flushes."""
        if not self.writes:
            return
        with self._lock:
            self._events.add({"time": time.time(), "step": int(step), "kind": kind, "text": text, **facts})
            self._unsent.append(lambda tracker: tracker.event(kind, step, text))
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Writes buffered lines; `durable` also waits until they are on disk."""
        if not self.writes:
            return
        with self._lock:
            self._last_flush = time.monotonic()
            self._try(METRICS, lambda: self._metrics.flush(durable=durable))
            self._try(EVENTS, lambda: self._events.flush(durable=durable))
            # Write files first: `rewind` reads from them which steps the trackers have seen.
            unsent, self._unsent = self._unsent, []
            for tracker in self._trackers:
                self._try(tracker.label, functools.partial(_send, tracker, unsent))

    def _try(self, what: str, act: Callable[[], Any]) -> None:
        """Runs `act`, and reports when it starts to fail or works again, without stopping the run."""
        try:
            act()
        except Exception as error:  # an online tracker can raise anything
            if what not in self._problems and self._tell is not None:
                self._tell(f"cannot write {what}: {error}. Training continues.")
            self._problems[what] = str(error)
        else:
            if self._problems.pop(what, None) and self._tell is not None:
                self._tell(f"writing {what} works again.")

    def rewind(self, step: int) -> int:
        """Drops the metrics after a step, which will be recomputed, and returns their number; events stay."""
        if not self.writes:
            return 0
        with self._lock:
            self.flush()
            seen = step

            def wanted(line: dict[str, Any]) -> bool:
                nonlocal seen
                at = int(line.get("step", 0))
                seen = max(seen, at)
                return at <= step

            dropped, broken = self._metrics.keep(wanted)
            for tracker in self._trackers:
                self._try(tracker.label, functools.partial(tracker.rewind, step, seen))
            if broken:
                lines = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
                self.event("error", step, f"dropped {len(broken)} unreadable line(s) of {METRICS}: {lines}")
            return dropped

    def lost_after(self, step: int) -> list[dict[str, Any]]:
        """Returns the time of the steps that `rewind(step)` is about to drop; see `lost_steps`."""
        from meshwright.loop.logging.goodput import lost_steps

        if not self.writes:
            return []
        self.flush()
        return lost_steps(read_lines(self.folder / METRICS), step)

    def close(self) -> None:
        """Writes buffered lines and closes the trackers."""
        if not self.writes:
            return
        with self._lock:
            self.flush()
            self.writes = False  # ignore late events of other threads
            self._try(METRICS, self._metrics.close)
            self._try(EVENTS, self._events.close)
            for tracker in self._trackers:
                self._try(tracker.label, tracker.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _send(tracker: Tracker, what: list[Callable[[Tracker], None]]) -> None:
    for send in what:
        send(tracker)


# --- JSON lines ---


class JsonLines:
    """Appends JSON objects to a file, one per line.

    Example:
        >>> import tempfile
        >>> lines = JsonLines(Path(tempfile.mkdtemp()) / "metrics.jsonl")
        >>> lines.add({"step": 1, "loss": 2.5})
        >>> lines.flush()
        >>> list(read_lines(lines.path))
        [{'step': 1, 'loss': 2.5}]
        >>> lines.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []
        self._is_checked = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def add(self, line: Mapping[str, Any]) -> None:
        self._waiting.append(with_checksum(json.dumps(plain(line), ensure_ascii=False)))

    def flush(self, *, durable: bool = False) -> None:
        """Writes buffered lines in one write; if that fails, they stay buffered. `durable` also waits for the disk."""
        if self._waiting:
            self._add_checksums()
            block = "".join(line + "\n" for line in self._waiting).encode()
            before = os.fstat(self._file).st_size
            try:
                while block:  # usually one write, more after a partial write
                    block = block[os.write(self._file, block) :]
            except OSError:
                os.ftruncate(self._file, before)
                raise
            self._waiting.clear()
        if durable:
            os.fsync(self._file)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[int, list[int]]:
        """Keeps only wanted lines, atomically; returns how many were dropped, and the numbers of invalid lines.

        Invalid lines, which a power loss can leave, are dropped too.
        """
        self.flush()
        kept, dropped, broken, checked = [], 0, [], has_checksums(self.path)
        with open_regular(self.path) as file:
            for number, raw in enumerate(bounded_lines(file, self.path, longest=_LONGEST, cut=True), start=1):
                line = _parse(raw, checked=checked)
                if line is None:
                    broken.append(number)
                elif wanted(line):
                    kept.append(raw)
                else:
                    dropped += 1
        if dropped or broken:
            write_atomically(self.path, b"".join(kept))
            os.close(self._file)
            self._file = self._open()
        return dropped, broken

    def _add_checksums(self) -> None:
        """Adds checksums to the lines of an older release, once, so that a file has them on all lines or on none."""
        if self._is_checked or not os.fstat(self._file).st_size or has_checksums(self.path):
            self._is_checked = True
            return
        with open_regular(self.path) as file:
            lines = [raw.rstrip() for raw in file]
        text = [with_checksum(raw.decode()) if _parse(raw, checked=False) else raw.decode("latin-1") for raw in lines]
        write_atomically(self.path, "".join(line + "\n" for line in text))
        os.close(self._file)
        self._file = self._open()
        self._is_checked = True

    def close(self) -> None:
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileFormatError(f"{self.path} is not a regular file.", hint="move it elsewhere.")
        _drop_torn_line(file)
        return file


def read_lines(path: Path | str, *, broken: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file, also while it is being written; skips damaged lines and a torn last line.

    Args:
        broken: list that receives the numbers of invalid lines; 0 stands for a torn last line.
    """
    checked = has_checksums(path)
    with open_regular(path) as file:
        for number, raw in enumerate(bounded_lines(file, path, longest=_LONGEST, cut=True), start=1):
            is_whole = raw.endswith(b"\n")
            line = _parse(raw, checked=checked) if is_whole else None
            if line is not None:
                yield line
            elif broken is not None:
                broken.append(number if is_whole else 0)


def _drop_torn_line(file: int) -> None:
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(file, end)


def with_checksum(text: str) -> str:
    """Returns the text of a JSON object with a last field `crc`, the CRC-32 of the text before it.

    Example:
        >>> with_checksum('{"step": 1}')
        '{"step": 1, "crc": "3daa833a"}'
    """
    body = text[:-1]
    return f'{body}, "crc": "{zlib.crc32(body.encode()):08x}"}}'


def has_checksums(path: Path | str) -> bool:
    """Returns whether the lines of a file have checksums; those of older releases have none."""
    with open_regular(path) as file:
        return any(_CHECKSUM.fullmatch(raw) for raw in bounded_lines(file, path, longest=_LONGEST, cut=True))


def _parse(raw: bytes, *, checked: bool) -> dict[str, Any] | None:
    if checked:
        found = _CHECKSUM.fullmatch(raw)
        if found is None or zlib.crc32(found[1]) != int(found[2], 16):
            return None
        raw = found[1] + b"}"
    try:
        line = parse_json(raw, where="the line")
    except FileFormatError:
        return None
    return line if isinstance(line, dict) else None
