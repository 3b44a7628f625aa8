"""Tokens: a stream of documents as numbers, usually on disk, of which any part can be read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import DataError


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as token ids, one after the other. `prepare_tokens` makes them.

    Attributes:
        values: ids of all documents, also of those that are no part of this stream.
        starts: where in `values` each document begins.
        bounds: where in the stream each document begins, and, at last, where the stream ends.
        largest: the largest id.
        vocab_size: of the tokenizer.
        fingerprint: a hash of the texts, the tokenizer, and which part of them this is.
    """

    values: np.ndarray
    starts: np.ndarray
    bounds: np.ndarray
    largest: int
    vocab_size: int
    fingerprint: str

    @classmethod
    def of(cls, documents: Sequence[Any]) -> Tokens:
        """Returns tokens of documents that are already lists of ids, each with its last token."""
        values = np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in documents)])
        bounds = np.cumsum([0, *map(len, documents)])
        if (np.diff(bounds) == 0).any():
            raise DataError(f"document {int(np.argmin(np.diff(bounds)))} has no tokens.", hint="leave it out.")
        digest = hashlib.sha256(values.tobytes() + bounds.tobytes()).hexdigest()
        largest = int(values.max(initial=-1))
        return cls(values, bounds[:-1], bounds, largest, largest + 1, digest)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids from one place of the stream to another, and for each the number of its document."""
        places = np.arange(start, stop)
        first = int(np.searchsorted(self.bounds, start, side="right")) - 1
        last = int(np.searchsorted(self.bounds, stop - 1, side="right"))
        documents = first + np.searchsorted(self.bounds[first:last], places, side="right") - 1
        return self.values[self.starts[documents] + (places - self.bounds[documents])], documents

    def split(self, validation: float) -> tuple[Tokens, Tokens]:
        """Returns two streams, for training and for validation, of which the second has about this share of tokens.

        Whole documents go to one or the other, chosen as if at random but always alike; each gets one at least. A
        single document is cut, and its end is for validation. With 0, all are for training.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation={validation} is not a share of the data.", hint="from 0 up to 1: 0.05, say.")
        if validation == 0:
            return self, self._part(np.zeros(self.num_documents, bool))
        if self.num_documents == 1:
            return self._cut(validation)
        sizes = np.diff(self.bounds)
        order = np.argsort(_scatter(np.arange(self.num_documents)), kind="stable")
        # Without documents that are larger than all of validation should be; the smallest, if all are.
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
        return Tokens(self.values, starts, bounds, self.largest, self.vocab_size, digest.hexdigest())


def _scatter(numbers: np.ndarray) -> np.ndarray:
    """Returns a hash of each number. Written out, since the choice must not change with the version of a library."""
    h = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor)
    return h ^ (h >> np.uint64(31))
