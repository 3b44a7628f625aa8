"""The token cache: documents are tokenized once, and found again by a hash of texts and tokenizer.

The folder of a hash holds `tokens.bin` and `bounds.bin`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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

        target, meta = open_or_build(place, fingerprint, write, tell=tell)
        values, bounds = mapped(target / "tokens.bin", np.dtype(meta["dtype"])), mapped(target / "bounds.bin", BOUNDS)
    return Tokens(values, bounds[:-1], bounds, meta["largest"], meta["vocab_size"], fingerprint)


def write_tokens(documents: Documents, tokenizer: Tokenizer, folder: Path, *, tell: Tell) -> dict[str, Any]:
    """Writes `tokens.bin` and `bounds.bin` into a folder and returns their description for `meta.json`.

    The memory it needs does not grow with the data.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    num_tokens = num_documents = num_empty = 0
    largest = tokenizer.end
    end = np.array([tokenizer.end], dtype)
    started = told = time.monotonic()
    with HashedFile(folder / "tokens.bin") as values, HashedFile(folder / "bounds.bin") as bounds:
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
    skipped = f"; skipped {num_empty:,} empty documents" if num_empty else ""
    tell(f"tokenized {num_documents:,} documents: {num_tokens:,} tokens in {time.monotonic() - started:.1f} s{skipped}")
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
