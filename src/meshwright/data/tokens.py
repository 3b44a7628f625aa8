"""A stream of documents as token ids, usually memory-mapped, with random access."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import DataError


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as token ids, one after the other; `prepare_tokens` makes them.

    Attributes:
        values: token ids of all documents, including documents outside this stream.
        starts: offset of each document in `values`.
        bounds: offset of each document in the stream, followed by the length of the stream.
        largest: the largest token id.
        vocab_size: vocabulary size of the tokenizer.
        fingerprint: hash of the texts, the tokenizer and the selection of documents.
        mask: for conversations, whether the assistant wrote each token of `values`.
    """

    values: np.ndarray
    starts: np.ndarray
    bounds: np.ndarray
    largest: int
    vocab_size: int
    fingerprint: str
    mask: np.ndarray | None = None

    @classmethod
    def of(cls, documents: Sequence[Any], *, mask: Sequence[Any] | None = None) -> Tokens:
        """Makes tokens from documents that are lists of token ids, including the end token, with a mask of each."""
        values = np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in documents)])
        bounds = np.cumsum([0, *map(len, documents)])
        if (np.diff(bounds) == 0).any():
            raise DataError(f"document {int(np.argmin(np.diff(bounds)))} has no tokens.", hint="leave it out.")
        digest = hashlib.sha256(values.tobytes() + bounds.tobytes()).hexdigest()
        largest = int(values.max(initial=-1))
        marks = None if mask is None else np.concatenate([np.zeros(0, np.uint8), *(np.uint8(part) for part in mask)])
        if marks is not None:
            if [len(part) for part in mask or ()] != np.diff(bounds).tolist():
                raise DataError("the mask and the documents have different lengths.", hint="mask every token.")
            digest = hashlib.sha256(digest.encode() + marks.tobytes()).hexdigest()
        return cls(values, bounds[:-1], bounds, largest, largest + 1, digest, marks)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids from `start` to `stop` in the stream, and the document number of each."""
        places = np.arange(start, stop)
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds, stop - 1, side="right"))
        documents = first + np.searchsorted(self.bounds[first:last], places, side="right") - 1
        return self.values[self.starts[documents] + (places - self.bounds[documents])], documents

    def split(self, validation: float) -> tuple[Tokens, Tokens]:
        """Splits the stream into training and validation, where validation has about this share of the tokens.

        Whole documents go to one side, in a fixed pseudorandom choice with at least one on each side. A single document
        is cut, and its end goes to validation. With 0, everything is for training.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation must be in [0, 1); got {validation}.", hint="pass a share, e.g. 0.05.")
        if validation == 0:
            return self, self._part(np.zeros(self.num_documents, bool))
        if self.num_documents == 1 and self.mask is not None:
            raise DataError("one conversation cannot be split.", hint="add some, or hold out none (--validation 0).")
        if self.num_documents == 1:
            return self._cut(validation)
        sizes = np.diff(self.bounds)
        order = np.argsort(scatter(np.arange(self.num_documents)), kind="stable")
        # Skip documents larger than the whole validation share; if all are, take the smallest.
        wanted = validation * self.num_tokens
        order = order[sizes[order] <= wanted]
        taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), wanted, side="right"))]
        chosen = np.zeros(self.num_documents, bool)
        chosen[taken if len(taken) else [int(np.argmin(sizes))]] = True
        return self._part(~chosen), self._part(chosen)

    def _part(self, chosen: np.ndarray) -> Tokens:
        return self._view(self.starts[chosen], np.concatenate([[0], np.cumsum(np.diff(self.bounds)[chosen])]))

    def _cut(self, validation: float) -> tuple[Tokens, Tokens]:
        place = round(self.num_tokens * (1 - validation))
        if not 0 < place < self.num_tokens:
            raise DataError(f"{self.num_tokens} tokens cannot be split into two parts.", hint="add text.")
        train = self._view(self.starts, np.array([0, place]))
        return train, self._view(self.starts + place, np.array([0, self.num_tokens - place]))

    def _view(self, starts: np.ndarray, bounds: np.ndarray) -> Tokens:
        digest = hashlib.sha256(self.fingerprint.encode())
        digest.update(starts.astype(np.int64).tobytes())
        digest.update(bounds.astype(np.int64).tobytes())
        return Tokens(self.values, starts, bounds, self.largest, self.vocab_size, digest.hexdigest(), self.mask)


def scatter(numbers: np.ndarray) -> np.ndarray:
    """Returns a hash of each number, in explicit arithmetic so that no library version can change the split."""
    h = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return h ^ (h >> np.uint64(31))
