"""Reading of files that may be damaged or hostile: bounded in size and depth, from regular files only.

Every file of a run, a model folder or a data set that is parsed in Python passes through here. A FIFO or a device is
refused without waiting for it, and nothing is unpickled.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from meshwright.errors import FileFormatError

MOST_BYTES = 64 * 2**20
"""Default limit for files that are parsed as a whole."""
MOST_LINE = 64 * 2**20
"""Default limit for one line of a file that is read line by line."""
MOST_DEPTH = 64
"""Default limit for lists and objects inside one another."""

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


# --- Bytes ---


def open_regular(path: Path | str) -> BufferedReader:
    """Opens a file to read its bytes; raises `FileFormatError` unless it is a regular file, and never waits for one.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: /dev/null is a device, not a regular file.
    """
    # O_NONBLOCK: opening a FIFO would wait for a writer. It does not change reads of a regular file.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a special file")
            raise FileFormatError(f"{path} is {kind}, not a regular file.")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path | str, *, most: int = MOST_BYTES) -> bytes:
    """Returns the contents of a regular file of at most `most` bytes; raises `OSError` or `FileFormatError`.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"abcdef")
        >>> read_bytes(path)
        b'abcdef'
        >>> read_bytes(path, most=5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: .../x has more than 5 bytes.
    """
    blocks, left = list[bytes](), most + 1
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # The size is only a guess: the file may grow. Asking for `most` bytes at once would allocate them.
        while left > 0 and size <= most and (block := file.read(min(left, max(size + 1, 2**16)))):
            blocks.append(block)
            left -= len(block)
    if left <= 0 or size > most:
        raise FileFormatError(f"{path} has more than {most} bytes.")
    return b"".join(blocks)


def read_text(path: Path | str, *, most: int = MOST_BYTES) -> str:
    """Returns the UTF-8 text of a regular file of at most `most` bytes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"\\xff")
        >>> read_text(path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: .../x is not UTF-8 text: invalid start byte at byte 0.
    """
    return _decode(read_bytes(path, most=most), str(path))


def read_lines(path: Path | str, *, longest: int = MOST_LINE) -> Iterator[bytes]:
    """Yields the lines of a regular file with their ends; raises `FileFormatError` at a line above `longest` bytes.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> _ = path.write_bytes(b"one\\ntwo")
        >>> list(read_lines(path))
        [b'one\\n', b'two']
    """
    with open_regular(path) as file:
        yield from bounded_lines(file, path, longest=longest)


def bounded_lines(file: IO[bytes], path: Path | str, *, longest: int = MOST_LINE, cut: bool = False) -> Iterator[bytes]:
    """Yields the lines of an open file, as `read_lines` does.

    Args:
        cut: yield an empty line for one above `longest` bytes, instead of raising.

    Example:
        >>> import io
        >>> list(bounded_lines(io.BytesIO(b"abc\\n"), "x", longest=3))
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: x: line 1 has more than 3 bytes.
    """
    for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), start=1):
        if len(line) > longest:
            if not cut:
                raise FileFormatError(f"{path}: line {number} has more than {longest} bytes.")
            while line and not line.endswith(b"\n"):
                line = file.readline(longest)
            line = b"\n"
        yield line


# --- JSON ---


def parse_json(data: bytes | str, *, where: str, depth: int = MOST_DEPTH, unique: bool = True) -> Any:
    """Parses JSON that is nested at most `depth` deep; `where` names it in errors.

    Args:
        unique: refuse objects that give a field twice, of which `json` would silently keep the last.

    Example:
        >>> parse_json('{"a": [1, 2.5]}', where="x")
        {'a': [1, 2.5]}
        >>> parse_json("[" * 1000, where="x")
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: x is nested more than 64 deep.
    """
    require_depth(data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data, where=where, depth=depth)
    text = _decode(data, where) if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_unique_fields if unique else None)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails for half of a pair
        return value
    except FileFormatError as error:
        raise FileFormatError(f"{where} {error}") from None
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{where} is not JSON: {error}.") from None
    except ValueError as error:  # an integer of thousands of digits, or half of a surrogate pair
        raise FileFormatError(f"{where} is not JSON: {str(error).split(';')[0]}.") from None


def require_depth(data: bytes, *, where: str, depth: int = MOST_DEPTH) -> None:
    """Raises `FileFormatError` if JSON is nested more than `depth` deep; brackets in strings do not count.

    Example:
        >>> require_depth(b'["[[[["]', where="x", depth=1)
    """
    # Fewer brackets than the limit cannot exceed it; only otherwise are strings skipped to find the real depth.
    if data.count(b"[") + data.count(b"{") > depth and _json_depth(data, depth) > depth:
        raise FileFormatError(f"{where} is nested more than {depth} deep.")


def read_json(
    path: Path | str, kind: type = dict, *, most: int = MOST_BYTES, depth: int = MOST_DEPTH, unique: bool = True
) -> Any:
    """Returns the JSON value in a file, which must be of the given kind: `dict`, `list` or `object` for any.

    Raises `OSError` if the file cannot be read, and `FileFormatError` if it is not such a file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x.json"
        >>> _ = path.write_text('{"step": 3}')
        >>> read_json(path)
        {'step': 3}
    """
    value = parse_json(read_bytes(path, most=most), where=str(path), depth=depth, unique=unique)
    if not isinstance(value, kind):
        wanted = "an object of fields" if kind is dict else _JSON_NAMES[kind]
        raise FileFormatError(f"{path} holds {json_kind(value)}, not {wanted}.")
    return value


def require_fields(value: Any, fields: Mapping[str, type | tuple[type, ...]], *, where: str) -> None:
    """Raises `FileFormatError` unless `value` is an object with these fields of these types; others may be there too.

    A bool is not accepted for an int, and an infinite or undefined float is not accepted for a float.

    Example:
        >>> require_fields({"step": 3, "more": None}, {"step": int}, where="x")
        >>> require_fields({"step": True}, {"step": int}, where="x")
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: x: `step` is true or false, not a whole number.
    """
    if not isinstance(value, dict):
        raise FileFormatError(f"{where} is {json_kind(value)}, not an object.")
    for name, kinds in fields.items():
        if name not in value:
            raise FileFormatError(f"{where} has no field `{name}`.")
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        item = value[name]
        fits = type(item) in kinds or (float in kinds and type(item) is int)
        if not fits or (isinstance(item, float) and not math.isfinite(item)):
            wanted = " or ".join(_JSON_NAMES.get(kind, "a number" if kind is float else "null") for kind in kinds)
            raise FileFormatError(f"{where}: `{name}` is {json_kind(item)}, not {wanted}.")


def json_kind(value: Any) -> str:
    """Returns the kind of a JSON value in words.

    Example:
        >>> json_kind([]), json_kind(None), json_kind(0.5)
        ('a list', 'null', 'the number 0.5')
    """
    return f"the number {value!r}" if isinstance(value, float) else _JSON_NAMES.get(type(value), "null")


def _json_depth(data: bytes, most: int) -> int:
    """Returns the depth of brackets outside strings; stops counting beyond `most`."""
    depth = deepest = 0
    for found in _BRACKETS.finditer(data):
        first = found[0][0]
        if first in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > most:
                break
        elif first in b"]}":
            depth -= 1
    return deepest


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileFormatError(f"gives the field {twice[:80]!r} twice.")
    return found


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
