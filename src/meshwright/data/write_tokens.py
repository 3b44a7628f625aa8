"""Writing tokens: documents in, two files out, in memory that does not grow with the data."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.documents import Document, Documents
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError

# Texts that a tokenizer gets at once, so that it can use all cores.
_GROUP_DOCUMENTS = 1024
_GROUP_BYTES = 1 << 22
_TELL_SECONDS = 5.0


def write_tokens(
    documents: Documents, tokenizer: Tokenizer, folder: Path, *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Writes `tokens.bin` and `bounds.bin` into a folder and returns what `meta.json` says about them."""
    dtype = np.dtype("<u1" if tokenizer.vocab_size <= 1 << 8 else "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    num_tokens = num_documents = num_empty = 0
    largest = tokenizer.end
    end = np.array([tokenizer.end], dtype)
    started = told = time.monotonic()
    with _HashedFile(folder / "tokens.bin") as values, _HashedFile(folder / "bounds.bin") as bounds:
        bounds.write(np.zeros(1, "<i8"))
        for pieces in _encoded(documents, tokenizer):
            size = 0
            for ids in pieces:
                if len(ids):
                    largest = max(largest, int(ids.max()))
                    values.write(ids.astype(dtype))
                    size += len(ids)
            if not size:
                num_empty += 1
                continue
            values.write(end)
            num_tokens += size + 1
            num_documents += 1
            bounds.write(np.array([num_tokens], "<i8"))
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                tell(f"tokenizing: {num_documents:,} documents, {num_tokens:,} tokens so far")
    if not num_tokens:
        raise DataError(
            f"the data is empty: {num_empty} documents in {len(documents.files)} files have no text.", hint="add text."
        )
    left_out = f"; {num_empty:,} empty documents are left out" if num_empty else ""
    tell(
        f"tokenized {num_documents:,} documents: {num_tokens:,} tokens in {time.monotonic() - started:.1f} s{left_out}"
    )
    return {
        "dtype": dtype.str,
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "num_empty": num_empty,
        "largest": largest,
        "vocab_size": tokenizer.vocab_size,
        "files": {file.name: file.facts() for file in (values, bounds)},
    }


def _encoded(documents: Documents, tokenizer: Tokenizer) -> Iterator[Iterable[np.ndarray]]:
    """Gives for each document its ids, in pieces."""
    if tokenizer.in_pieces:
        for document in documents.stream():
            yield _by_piece(document, tokenizer)
        return
    group: list[str | bytes] = []
    size = 0
    for document in documents.stream():
        text = _checked(document.text(), tokenizer, document.where)
        group.append(text)
        size += len(text)
        if len(group) >= _GROUP_DOCUMENTS or size >= _GROUP_BYTES:
            yield from ([ids] for ids in tokenizer.encode_all(group))
            group, size = [], 0
    if group:
        yield from ([ids] for ids in tokenizer.encode_all(group))


def _by_piece(document: Document, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    done = 0
    for piece in document.pieces():
        where = document.where + (f", after byte {done}" if done else "")
        yield tokenizer.encode(_checked(piece, tokenizer, where))
        done += len(piece)


def _checked(text: str | bytes, tokenizer: Tokenizer, where: str) -> str | bytes:
    try:
        return tokenizer.check(text)
    except DataError as error:
        raise DataError(f"{where}: {str(error).partition(chr(10))[0]}", hint=error.hint) from None


class _HashedFile:
    """A file that is being written, with the hash of what is in it."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
