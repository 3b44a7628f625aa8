"""The token cache: documents are tokenized once, and found again by a hash of texts and tokenizer.

A cache folder holds a folder for each hash, with three files: `tokens.bin`, `bounds.bin` and `meta.json`. It is written
under a temporary name and renamed when complete, so readers never see a partial cache. If several processes start at
once, one writes and the others wait for its lock. The lock only saves work: on a file system without locks, each writes
its own copy and the first to finish wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.documents import Document, Documents
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError
from meshwright.files import write_atomically

Tell = Callable[[str], None]

FORMAT = 1
# Files up to this size are hashed whenever a cache is opened (about a second); larger ones are only checked for size.
HASHED_BYTES = 1 << 30
# A file written this shortly before its time stamp was read may change again and keep that time stamp.
_RACY_NS = 2_000_000_000
# An unfinished folder that was not touched for this long belongs to a dead process.
_DEAD_SECONDS = 3600
# Texts per call of the tokenizer, enough for it to use all cores.
_GROUP_DOCUMENTS = 1024
_GROUP_BYTES = 1 << 22
_TELL_SECONDS = 5.0


def prepare_tokens(
    documents: Documents, tokenizer: Tokenizer, *, folder: str | os.PathLike[str], tell: Tell | None = None
) -> Tokens:
    """Returns the tokens of documents, memory-mapped from a cache that is built on first use.

    Any number of processes may call this at once with the same folder. Empty documents are skipped.

    Args:
        folder: the cache folder; created if missing.
        tell: called with a line of text about progress, and if a cache is damaged.

    Example:
        >>> from meshwright.data import load_tokenizer, open_documents
        >>> documents = open_documents(os.__file__)
        >>> tokens = prepare_tokens(documents, load_tokenizer("bytes"), folder=tempfile.mkdtemp())
        >>> tokens.num_tokens == len(documents[0]) + 1  # the document and its end token
        True
    """
    try:
        return _prepare(documents, tokenizer, Path(folder), tell or (lambda line: None))
    except OSError as error:
        raise DataError(
            f"cannot write the token cache in {str(folder)!r}: {error.strerror or error}.",
            hint="choose another cache folder.",
        ) from error


def _prepare(documents: Documents, tokenizer: Tokenizer, folder: Path, tell: Tell) -> Tokens:
    folder.mkdir(parents=True, exist_ok=True)
    fingerprint = _fingerprint(documents, tokenizer, folder)
    target = folder / fingerprint[:32]
    # Look without the lock first: this is the usual case, and the only one for a read-only cache.
    found = _open(target, fingerprint, tell=None)
    if found is None:
        with _lock(folder / f"{target.name}.lock", tell):
            _remove_leftovers(target)
            found = _open(target, fingerprint, tell=tell)
            if found is None:
                _build(documents, tokenizer, target, fingerprint, tell)
                found = _open(target, fingerprint, tell=tell)
    if found is None:
        raise DataError(f"the token cache in {target} was written but cannot be read back.", hint="check the disk.")
    return found


def _fingerprint(documents: Documents, tokenizer: Tokenizer, folder: Path) -> str:
    """Returns a hash of texts and tokenizer; reads only texts that are new or have changed."""
    stamps = documents.stamps()
    key = hashlib.sha256(json.dumps([FORMAT, stamps, documents.text_field]).encode()).hexdigest()[:32]
    note = folder / f"{key}.known"
    try:
        known = json.loads(note.read_text())
        content = str(known["content"])
        trusted = max(stamp[2] for stamp in stamps) < int(known["looked"]) - _RACY_NS
    except (OSError, ValueError, KeyError, TypeError):
        trusted = False
    if not trusted:
        looked = time.time_ns()
        content = documents.fingerprint
        with contextlib.suppress(OSError):  # it only saves time at the next start
            write_atomically(note, json.dumps({"content": content, "looked": looked}))
    return hashlib.sha256(f"{FORMAT} {content} {tokenizer.fingerprint}".encode()).hexdigest()


def _open(target: Path, fingerprint: str, *, tell: Tell | None) -> Tokens | None:
    """Returns the tokens in a folder, or None if it is missing or damaged; reports damage to `tell`."""
    if not target.is_dir():
        return None
    try:
        meta = json.loads((target / "meta.json").read_text())
        if meta["fingerprint"] != fingerprint or meta["format"] != FORMAT:
            raise ValueError("meta.json describes other data")
        for name, facts in meta["files"].items():
            _check_file(target / name, facts)
        values = _mapped(target / "tokens.bin", np.dtype(meta["dtype"]))
        bounds = _mapped(target / "bounds.bin", np.dtype("<i8"))
        return Tokens(values, bounds[:-1], bounds, meta["largest"], meta["vocab_size"], fingerprint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if tell is not None:
            tell(f"the token cache in {target} is damaged ({error}); rebuilding it")
        return None


def _check_file(path: Path, facts: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise ValueError(f"{path.name} has {size:,} bytes instead of {facts['bytes']:,}")
    if size <= HASHED_BYTES:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != facts["sha256"]:
            raise ValueError(f"the contents of {path.name} have changed")


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    # A plain view: every small slice of an np.memmap would keep the file open.
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _build(documents: Documents, tokenizer: Tokenizer, target: Path, fingerprint: str, tell: Tell) -> None:
    making = Path(tempfile.mkdtemp(prefix=f"{target.name}.making-", dir=target.parent))
    try:
        facts = write_tokens(documents, tokenizer, making, tell=tell)
        meta = {"format": FORMAT, "fingerprint": fingerprint, **facts}
        write_atomically(making / "meta.json", json.dumps(meta, indent=1))
        try:
            making.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            # Either the damaged cache that is being replaced, or, without locks, another process was faster.
            if _open(target, fingerprint, tell=None) is None:
                shutil.rmtree(target)
                making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Removes the unfinished folders of killed processes; the age protects writers on file systems without locks."""
    for leftover in target.parent.glob(f"{target.name}.making-*"):
        newest = max((path.stat().st_mtime for path in (leftover, *leftover.iterdir())), default=0.0)
        if time.time() - newest > _DEAD_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path, tell: Tell) -> Iterator[None]:
    """Holds a file lock, which ends with the process, if the file system has locks."""
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another process is tokenizing the same data; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # this file system has no locks
            pass
        yield


def write_tokens(documents: Documents, tokenizer: Tokenizer, folder: Path, *, tell: Tell) -> dict[str, Any]:
    """Writes `tokens.bin` and `bounds.bin` into a folder and returns their description for `meta.json`.

    The memory it needs does not grow with the data.
    """
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


class _HashedFile:
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
