"""The token cache: documents are tokenized once, and found again by a hash of texts and tokenizer.

The folder of a hash holds `tokens.bin`, `bounds.bin` and, for conversations, `mask.bin`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshwright.data.cache_folder import FORMAT, HashedFile, Tell, cache_errors, known_content, mapped, open_or_build
from meshwright.data.documents import Documents
from meshwright.data.formats.part import Document
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError

# Texts per call of the tokenizer, enough for it to use all cores.
_GROUP_DOCUMENTS = 1024
_GROUP_BYTES = 1 << 22
_TELL_SECONDS = 5.0
BOUNDS = np.dtype("<i8")


def prepare_tokens(
    documents: Documents, tokenizer: Tokenizer, *, folder: str | os.PathLike[str], tell: Tell | None = None
) -> Tokens:
    """Returns the tokens of documents, memory-mapped from a cache that is built on first use.

    Any number of processes may call this at once with the same folder. Empty documents are skipped.

    Args:
        folder: the cache folder; created if missing.
        tell: called with a line of text about progress, and if a cache is damaged.

    Example:
        >>> import tempfile
        >>> from meshwright.data import load_tokenizer, open_documents
        >>> documents = open_documents(os.__file__)
        >>> tokens = prepare_tokens(documents, load_tokenizer("bytes"), folder=tempfile.mkdtemp())
        >>> tokens.num_tokens == len(documents[0]) + 1  # the document and its end token
        True
    """
    tell, place = tell or (lambda line: None), Path(folder)
    with cache_errors(folder):
        content = known_content(place, documents.stamps(), documents.text_field, lambda: documents.fingerprint)
        fingerprint = hashlib.sha256(f"{FORMAT} {content} {tokenizer.fingerprint}".encode()).hexdigest()

        def write(target: Path) -> dict[str, Any]:
            return write_tokens(documents, tokenizer, target, tell=tell)

        return open_tokens(place, fingerprint, write, tell=tell)


def open_tokens(
    folder: Path, fingerprint: str, write: Callable[[Path], dict[str, Any]], *, tell: Tell, masked: bool = False
) -> Tokens:
    """Returns the tokens of a fingerprint, which `write` writes into a folder if the cache does not have them."""
    target, meta = open_or_build(folder, fingerprint, write, tell=tell)
    values, bounds = mapped(target / "tokens.bin", np.dtype(meta["dtype"])), mapped(target / "bounds.bin", BOUNDS)
    mask = mapped(target / "mask.bin", np.dtype("u1")) if masked else None
    return Tokens(values, bounds[:-1], bounds, meta["largest"], meta["vocab_size"], fingerprint, mask)


def write_tokens(documents: Documents, tokenizer: Tokenizer, folder: Path, *, tell: Tell) -> dict[str, Any]:
    """Writes `tokens.bin` and `bounds.bin` into a folder and returns their description for `meta.json`.

    The memory it needs does not grow with the data.
    """
    num_empty, started = 0, time.monotonic()
    with TokenWriter(folder, tokenizer, "documents", tell=tell) as writer:
        for pieces in _encoded(documents, tokenizer):
            num_empty += not writer.add(pieces, end=tokenizer.end)
    if not writer.num_tokens:
        raise DataError(
            f"the data is empty: {num_empty} documents in {len(documents.files)} files have no text.", hint="add text."
        )
    skipped = f"; skipped {num_empty:,} empty documents" if num_empty else ""
    tell(f"tokenized {writer.so_far} in {time.monotonic() - started:.1f} s{skipped}")
    return {**writer.facts(), "num_empty": num_empty}


class TokenWriter:
    """Writes the tokens of documents into a folder, one document at a time; a context manager.

    Args:
        kind: what the documents are called in messages.
        masked: whether each document comes with a mask.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, kind: str, *, tell: Tell, masked: bool = False) -> None:
        self.vocab_size, self.kind, self.tell = tokenizer.vocab_size, kind, tell
        self.dtype = smallest_dtype(tokenizer.vocab_size)
        self.num_tokens = self.num_documents = self.largest = 0
        self._values, self._bounds = HashedFile(folder / "tokens.bin"), HashedFile(folder / "bounds.bin")
        self._masks = HashedFile(folder / "mask.bin") if masked else None
        self._files = [self._values, *([self._masks] if self._masks else []), self._bounds]
        self._stack, self._told = contextlib.ExitStack(), time.monotonic()

    def __enter__(self) -> Self:
        for file in self._files:
            self._stack.enter_context(file)
        self._bounds.write(np.zeros(1, BOUNDS))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, pieces: Iterable[np.ndarray], *, mask: np.ndarray | None = None, end: int | None = None) -> bool:
        """Writes a document, followed by the token `end`; returns False for an empty one, which is left out."""
        size = 0
        for ids in pieces:
            if len(ids):
                self.largest = max(self.largest, int(ids.max()))
                self._values.write(ids.astype(self.dtype))
                size += len(ids)
        if not size:
            return False
        if end is not None:
            self._values.write(np.array([end], self.dtype))
            self.largest, size = max(self.largest, end), size + 1
        if self._masks is not None:
            assert mask is not None
            self._masks.write(mask.astype(np.uint8))
        self.num_tokens += size
        self.num_documents += 1
        self._bounds.write(np.array([self.num_tokens], BOUNDS))
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            self.tell(f"tokenizing: {self.num_documents:,} {self.kind}, {self.num_tokens:,} tokens so far")
        return True

    @property
    def so_far(self) -> str:
        return f"{self.num_documents:,} {self.kind}: {self.num_tokens:,} tokens"

    def facts(self) -> dict[str, Any]:
        """Returns the description of the files for `meta.json`."""
        return {
            "dtype": self.dtype.str,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "largest": self.largest,
            "vocab_size": self.vocab_size,
            "files": {file.name: file.facts() for file in self._files},
        }


def _encoded(documents: Documents, tokenizer: Tokenizer) -> Iterator[Iterable[np.ndarray]]:
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


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the smallest dtype that holds all token ids."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")
