"""Packed token files: `.bin` files of token ids that another program wrote, mapped into memory.

A file holds unsigned little-endian integers of 2 or 4 bytes, one per token, after an optional header. Documents follow
one another, each with its end token. The dtype is in a sidecar file `NAME.bin.json`, or stated by the caller, because
nothing in the file tells uint16 from uint32.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bounded_reader import read_json
from meshwright.data.cache_folder import FORMAT, HashedFile, Tell, cache_errors, known_content, mapped, open_or_build
from meshwright.data.formats.part import blocks, read_errors
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError, FileFormatError, did_you_mean

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BIN_SUFFIX, SIDECAR_SUFFIX = ".bin", ".bin.json"
_KEYS = ("dtype", "vocab_size", "end", "header_bytes")
_SCANNED = 1 << 22  # tokens to look at at once


@dataclass(frozen=True)
class BinFile:
    """A packed token file and the facts of its sidecar."""

    path: Path
    dtype: np.dtype[Any]
    vocab_size: int | None
    end: int | None
    header_bytes: int
    num_tokens: int

    def read(self) -> np.ndarray:
        """Returns the token ids, mapped into memory."""
        found = np.memmap(self.path, self.dtype, mode="r", offset=self.header_bytes, shape=(self.num_tokens,))
        return found.view(np.ndarray)


def open_bin_tokens(
    path: str | os.PathLike[str] | Sequence[Path],
    tokenizer: Tokenizer,
    *,
    folder: str | os.PathLike[str],
    dtype: str | None = None,
    tell: Tell | None = None,
) -> Tokens:
    """Returns the tokens of packed `.bin` files; they are scanned once for the ends of documents.

    Args:
        path: a `.bin` file, or several.
        tokenizer: the tokenizer that made the files. Its vocabulary must be that of the sidecars, and its end token
            ends documents unless a sidecar names another.
        folder: the cache folder, for the ends of documents.
        dtype: "uint16" or "uint32", for files without a sidecar.
        tell: called with a line of text about progress.

    Example:
        >>> import tempfile
        >>> from meshwright.data import load_tokenizer
        >>> path = Path(tempfile.mkdtemp()) / "data.bin"
        >>> np.array([72, 105, 0, 72, 111, 0], "<u2").tofile(path)
        >>> tokens = open_bin_tokens(path, load_tokenizer("bytes"), folder=path.parent / "cache", dtype="uint16")
        >>> tokens.num_documents, tokens.read(3, 6)[0].tolist()
        (2, [72, 111, 0])
    """
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else list(path)
    files = [_open(each, dtype) for each in paths]
    for file in files:
        if file.vocab_size not in (None, tokenizer.vocab_size):
            raise DataError(
                f"{file.path} has a vocabulary of {file.vocab_size} tokens; the tokenizer has {tokenizer.vocab_size}.",
                hint="pass the tokenizer.json that made the file; sources of a mixture must share one tokenizer.",
            )
    tell, place = tell or (lambda line: None), Path(folder)
    ends = [tokenizer.end if file.end is None else file.end for file in files]
    facts = [[file.dtype.str, file.header_bytes, end] for file, end in zip(files, ends, strict=True)]
    with cache_errors(folder):
        content = known_content(place, [_stamp(file.path) for file in files], facts, lambda: _hash(files, facts))
        fingerprint = hashlib.sha256(f"{FORMAT} bin {content} {tokenizer.vocab_size}".encode()).hexdigest()

        def write(target: Path) -> dict[str, Any]:
            return _write_bounds(files, ends, target, tell)

        target, meta = open_or_build(place, fingerprint, write, tell=tell)
        bounds = mapped(target / "bounds.bin", np.dtype("<i8"))
    if meta["largest"] >= tokenizer.vocab_size:
        raise DataError(
            f"{files[0].path} has token {meta['largest']}; the tokenizer has {tokenizer.vocab_size} tokens, 0 to "
            f"{tokenizer.vocab_size - 1}.",
            hint="pass the tokenizer.json that made the file, and check the dtype.",
        )
    values: Any = files[0].read() if len(files) == 1 else JoinedTokens([file.read() for file in files])
    return Tokens(values, bounds[:-1], bounds, meta["largest"], tokenizer.vocab_size, fingerprint)


class JoinedTokens:
    """Token ids of several files as if they were one array, for indices in an array."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        numbers = np.searchsorted(self._ends, places, side="right")
        found = np.zeros(len(places), np.uint32)
        for number in np.unique(numbers):
            mine = numbers == number
            found[mine] = self.parts[number][places[mine] - (self._ends[number - 1] if number else 0)]
        return found


def _open(path: Path, dtype: str | None) -> BinFile:
    with read_errors(path):
        size = path.stat().st_size
    sidecar = path.with_name(f"{path.name}.json")
    facts: dict[str, Any] = {}
    if sidecar.is_file():
        try:
            facts = read_json(sidecar, object)
        except (OSError, FileFormatError) as error:
            raise DataError(f"cannot read {sidecar}: {error}") from None
        if not isinstance(facts, dict):
            raise DataError(f"{sidecar} is not an object.", hint='write {"dtype": "uint16"}.')
    for name in facts:
        if name not in _KEYS:
            raise DataError(f"{sidecar} has an unknown field {name!r}.", hint=did_you_mean(name, list(_KEYS)))
    if dtype is not None and facts.get("dtype", dtype) != dtype:
        raise DataError(f"{sidecar} says {facts['dtype']}, but the options say {dtype}.", hint="leave one of them out.")
    stated = facts.get("dtype", dtype)
    if not isinstance(stated, str) or stated not in DTYPES:
        why = "does not state its dtype" if stated is None else f"has the dtype {stated!r}"
        raise DataError(
            f"{path} {why}.",
            hint=f'pass --token-dtype uint16 or uint32, or write {{"dtype": "uint16"}} to {sidecar.name} beside it.',
        )
    for name in _KEYS[1:]:
        if name in facts and (type(facts[name]) is not int or facts[name] < 0):
            raise DataError(f"{sidecar}: {name} is {facts[name]!r}.", hint="use a whole number of at least 0.")
    kind, header = DTYPES[stated], facts.get("header_bytes", 0)
    rest = size - header
    if rest < kind.itemsize or rest % kind.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, {header:,} of them a header; the rest is not a number of {stated} tokens.",
            hint="check that the file is complete, and pass the right --token-dtype.",
        )
    return BinFile(path, kind, facts.get("vocab_size"), facts.get("end"), header, rest // kind.itemsize)


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def _hash(files: Sequence[BinFile], facts: Any) -> str:
    total = hashlib.sha256(json.dumps(facts).encode())
    for file in files:
        digest = hashlib.sha256()
        for block in blocks(file.path):
            digest.update(block)
        total.update(digest.digest())
    return total.hexdigest()


def _write_bounds(files: Sequence[BinFile], ends: Sequence[int], target: Path, tell: Tell) -> dict[str, Any]:
    """Writes the ends of documents to `bounds.bin`; a file whose last document has no end token ends it."""
    largest = done = last = 0
    with HashedFile(target / "bounds.bin") as bounds:
        bounds.write(np.zeros(1, "<i8"))
        for file, end in zip(files, ends, strict=True):
            values = file.read()
            for start in range(0, len(values), _SCANNED):
                block = values[start : start + _SCANNED]
                largest = max(largest, int(block.max()))
                places = np.flatnonzero(block == end) + done + start + 1
                bounds.write(places.astype("<i8"))
                last = int(places[-1]) if len(places) else last
            done += len(values)
            if last < done:
                bounds.write(np.array([done], "<i8"))
                last = done
    tell(f"found the documents of {done:,} packed tokens")
    return {"largest": largest, "num_tokens": done, "files": {"bounds.bin": bounds.facts()}}
