"""Files of one JSON object per line, which can only be whole lines or a torn last one, and are cut back at once.

A process can be killed at any instant. Lines are therefore appended in one write; what a kill leaves of the last one is
dropped when the file is opened again; cutting a file back makes a new one and puts it in the old one's place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.files import write_atomically


class JsonLines:
    """Appends objects to a file.

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
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def add(self, line: Mapping[str, Any]) -> None:
        """Keeps a line for the next `flush`."""
        self._waiting.append(json.dumps(plain(line), ensure_ascii=False))

    def flush(self, *, durable: bool = False) -> None:
        """Writes what waits, in one write; `durable` also waits for the disk. If that fails, all still waits."""
        if self._waiting:
            block = "".join(line + "\n" for line in self._waiting).encode()
            before = os.fstat(self._file).st_size
            try:
                while block:  # one write; a system that took only a part of it gets the rest
                    block = block[os.write(self._file, block) :]
            except OSError:
                os.ftruncate(self._file, before)
                raise
            self._waiting.clear()
        if durable:
            os.fsync(self._file)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> tuple[int, list[int]]:
        """Drops lines that are not wanted, all at once; returns how many, and the numbers of lines that are no JSON.

        Those are dropped as well: a disk that lost power can leave them. A kill on the way leaves the file as it was.
        """
        self.flush()
        kept, dropped, broken = [], 0, []
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _parse(raw)
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

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        if self._file >= 0:
            try:
                self.flush()
            finally:
                os.close(self._file)
                self._file = -1

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _drop_torn_line(file)
        return file


def read_lines(path: Path | str, *, broken: list[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file, also while it is being written; a torn last line is left out.

    Args:
        broken: gets the numbers of lines that are no JSON object; 0 for the torn last one.
    """
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            is_whole = raw.endswith(b"\n")
            line = _parse(raw) if is_whole else None
            if line is not None:
                yield line
            elif broken is not None:
                broken.append(number if is_whole else 0)


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: numbers of numpy and jax as Python's, which lose nothing.

    Numbers that are not finite are written as Python writes them, `NaN` and `Infinity`, which `json.loads` reads.

    Example:
        >>> plain({"loss": np.float32(0.1), "seconds": {"step": 2}, "mesh": ("dp", 8)})
        {'loss': 0.10000000149011612, 'seconds': {'step': 2}, 'mesh': ['dp', 8]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        # numpy has no way from bfloat16 to Python's numbers but through a wider one, which holds it exactly.
        return (array if array.dtype.kind in "biuf" else array.astype(np.float32)).tolist()
    return str(value) if isinstance(value, Path) else value


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


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
