"""Tokenizers: from text to token ids and back. `bytes` is built in; others are loaded from `tokenizers` files."""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.bounded_reader import read_bytes
from meshwright.data.cache_folder import default_cache
from meshwright.errors import DataError, did_you_mean
from meshwright.remote import is_url, open_store

_MOST_BYTES, _MOST_TOKENS = 2**29, 2**26
_BESIDE = ("tokenizer_config.json", "chat_template.jinja")  # files that belong to a tokenizer
# Common names of the end-of-document token, in the order to try.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


def load_tokenizer(name: str, *, end: str | None = None) -> Tokenizer:
    """Returns the byte tokenizer, or one from a JSON file of the `tokenizers` library.

    Args:
        name: "bytes" (or "auto"), or the path or URL of a `tokenizer.json`.
        end: the end-of-document token, if the file has none with a common name.

    Example:
        >>> tokenizer = load_tokenizer("bytes")
        >>> tokenizer.encode("hé").tolist(), tokenizer.vocab_size, tokenizer.end
        ([104, 195, 169], 256, 0)
    """
    if name in ("bytes", "auto"):
        if end is not None:
            raise DataError(f"the byte tokenizer ends documents with byte 0; got end={end!r}.", hint="remove `end`.")
        return ByteTokenizer()
    path = tokenizer_path(name)
    if not path.is_file():
        near = path.parent.iterdir() if path.parent.is_dir() else ()
        hint = did_you_mean(path.name, ["bytes", *sorted(entry.name for entry in near)])
        raise DataError(f"there is no tokenizer {name!r}.", hint=hint or 'pass "bytes" or a tokenizer.json.')
    return FileTokenizer(path, end=end)


def tokenizer_path(name: str) -> Path:
    """Returns the path of a tokenizer file; of a URL, that of its copy in the cache, beside its template."""
    if not is_url(name):
        return Path(name).expanduser()
    from meshwright.data.fetched_data import fetch_named  # it needs tokenizers, for packed files

    base, _, file = name.strip().rpartition("/")
    folder = fetch_named(open_store(base), [file, *_BESIDE], default_cache() / "tokenizers")
    if not (folder / file).is_file():
        raise DataError(f"there is no tokenizer {name!r}.", hint="pass the URL of a tokenizer.json.")
    return folder / file


class Tokenizer(abc.ABC):
    """Converts text to token ids and back.

    Attributes:
        vocab_size: ids are 0 to `vocab_size - 1`.
        end: id of the end-of-document token.
        fingerprint: hash of everything that decides the ids of a text.
        in_pieces: whether encoding a text in pieces gives the same ids.
    """

    vocab_size: int
    end: int
    fingerprint: str
    in_pieces: bool

    @abc.abstractmethod
    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the ids of a text, without the end token."""

    @abc.abstractmethod
    def decode(self, ids: Any) -> str:
        """Returns the text of ids, without `end`."""

    @abc.abstractmethod
    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text, and the number of the character at which each begins."""

    def check(self, text: str | bytes) -> str | bytes:
        """Returns the text in the form that is encoded; raises if it cannot be encoded."""
        return text

    def encode_all(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the ids of several texts."""
        return [self.encode(text) for text in texts]


class ByteTokenizer(Tokenizer):
    """One token per byte, in any encoding; strings are encoded as UTF-8.

    Byte 0 ends a document. Text does not contain it, so data that does is rejected.
    """

    vocab_size = 256
    end = 0
    fingerprint = "bytes"
    in_pieces = True

    def check(self, text: str | bytes) -> bytes:
        data = _as_utf8(text) if isinstance(text, str) else text
        place = data.find(0)
        if place >= 0:
            raise DataError(
                f"byte {place} is 0, which ends documents and does not occur in text.",
                hint="select only text files, e.g. with a glob such as 'folder/**/*.txt'.",
            )
        return data

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(self.check(text), np.uint8)

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        # Bytes of the form 10xxxxxx continue a character.
        return ids, np.cumsum((ids & 0xC0) != 0x80) - 1

    def decode(self, ids: Any) -> str:
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < 256:
            raise DataError(f"byte ids must be from 0 to 255; got {ids.min()} to {ids.max()}.")
        # A model may stop inside a character, which then shows as U+FFFD.
        data: bytes = ids[ids != self.end].astype(np.uint8).tobytes()
        return data.decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer from a JSON file of the `tokenizers` library."""

    in_pieces = False  # tokens depend on where a text is cut

    def __init__(self, path: Path, *, end: str | None = None) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise DataError(f"{path} needs the tokenizers library.", hint="run `pip install tokenizers`.") from None
        self._path = path
        try:
            content = read_bytes(path, most=_MOST_BYTES)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DataError(f"{path} is not a tokenizer: {error}", hint="pass a tokenizer.json.") from None
        # Files may turn on truncation and padding, which would change documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MOST_TOKENS:
            raise DataError(
                f"{path} has token ids up to {self.vocab_size - 1}; it needs 1 to {_MOST_TOKENS} tokens.",
                hint="pass the tokenizer.json of a trained tokenizer.",
            )
        self.end = vocabulary[_end_name(path, vocabulary, end)]
        self.fingerprint = hashlib.sha256(content + b"\0" + str(self.end).encode()).hexdigest()

    def check(self, text: str | bytes) -> str:
        if isinstance(text, str):
            _as_utf8(text)
            return text
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"byte {error.start} ({text[error.start]:#04x}) is not UTF-8: {error.reason}.",
                hint='convert the text to UTF-8, or use the "bytes" tokenizer, which accepts any bytes.',
            ) from None

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        text = self.check(text)
        with self._errors():
            found = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in found.offsets], np.int64)
        return np.asarray(found.ids, np.uint32), starts

    def encode_all(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        checked = [self.check(text) for text in texts]
        with self._errors():
            found = self._tokenizer.encode_batch(checked, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in found]

    def decode(self, ids: Any) -> str:
        kept = [token for token in np.asarray(ids).tolist() if token != self.end]
        with self._errors():
            text: str = self._tokenizer.decode(kept, skip_special_tokens=False)
        return text

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns the library's errors, which are plain exceptions and panics, into a `DataError`."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DataError(f"the tokenizer {self._path} is not usable: {error}", hint="fetch it again.") from None


def _as_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} is half of a surrogate pair, which UTF-8 cannot encode.",
            hint="repair the text.",
        ) from None


def _end_name(path: Path, vocabulary: dict[str, int], end: str | None) -> str:
    if end is not None:
        if end not in vocabulary:
            raise DataError(f"{path} has no token {end!r}.", hint=did_you_mean(end, sorted(vocabulary)))
        return end
    for name in END_NAMES:
        if name in vocabulary:
            return name
    raise DataError(
        f"{path} has none of the common end-of-document tokens ({', '.join(END_NAMES)}).",
        hint="pass the token to use: load_tokenizer(path, end=...).",
    )
