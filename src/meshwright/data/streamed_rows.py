"""Rows tokenized while they are read, for corpora too large for the token cache, with an exact position.

Documents come in an order that depends on the seed; their tokens are packed like those of `Rows`. The documents of a
Parquet row group stay together, in an order of their own, so that each group is decoded once per epoch. The position is
a document and the number of its tokens that earlier rows used, so a resumed run tokenizes that document again and
continues with the same row. Nothing is written to disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshwright.data.documents import Documents
from meshwright.data.iterated import IteratedRows
from meshwright.data.packed_rows import ROW_DTYPES
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.tokens import scatter
from meshwright.errors import DataError


def stream_rows(
    documents: Documents,
    tokenizer: Tokenizer,
    num_tokens: int,
    *,
    batch_size: int,
    seed: int = 0,
    validation: float = 0.0,
    held_out: bool = False,
    name: str = "the stream",
) -> IteratedRows:
    """Returns rows for `iterated_batches`, tokenized on the fly; they have the arrays of `Rows`.

    Every process tokenizes all documents and keeps the rows of its devices.

    Args:
        num_tokens: tokens per row.
        batch_size: rows per global batch.
        seed: seed of the run.
        validation: share of the documents to hold out, always the same ones.
        held_out: whether to return the rows of these, instead of the others.
        name: name of the data in errors.

    Example:
        >>> import os
        >>> from meshwright.data import load_tokenizer, open_documents
        >>> rows = stream_rows(open_documents(os.__file__), load_tokenizer("bytes"), 16, batch_size=8)
        >>> iterator = rows.open(seed=0, epoch=0)
        >>> first = next(iterator)
        >>> iterator.get_state(), first["inputs"].shape
        ({'document': 0, 'used': 16}, (16,))
    """
    chosen = scatter(np.arange(len(documents))) / 2.0**64 < validation
    numbers = np.flatnonzero(chosen == held_out)
    if not len(numbers):
        raise DataError(
            f"{name} has no documents for {'evaluation' if held_out else 'training'}: {len(documents)} in all, "
            f"{validation:.3g} of them held out.",
            hint="add documents, or change the validation share.",
        )
    batch = {key: np.zeros((batch_size, num_tokens), dtype) for key, dtype in ROW_DTYPES.items()}
    rows = IteratedRows(
        lambda drawn: StreamedRows(documents, tokenizer, num_tokens, numbers=numbers, seed=drawn),
        batch,
        seed=seed,
        name=name,
    )
    sizes = [stamp[1] for stamp in documents.stamps()]
    parts = f"{rows.fingerprint} {tokenizer.fingerprint} {sizes} {len(documents)} {validation} {held_out}"
    if (ends := documents.group_ends()) is not None:  # groups are shuffled as wholes
        parts += f" {list(ends)}"
    rows.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
    return rows


class StreamedRows(Iterator[dict[str, np.ndarray]]):
    """Iterates over the packed rows of shuffled documents, once; `get_state` and `set_state` are its position.

    Args:
        numbers: numbers of the documents to use.
        seed: seed of their order.
    """

    def __init__(
        self, documents: Documents, tokenizer: Tokenizer, num_tokens: int, *, numbers: np.ndarray, seed: int
    ) -> None:
        self.documents, self.tokenizer, self.num_tokens, self.numbers = documents, tokenizer, num_tokens, numbers
        self._order = _order(numbers, documents.group_ends(), seed)
        self._begin(0, 0)

    def _begin(self, document: int, used: int) -> None:
        self._next = document  # the next document to tokenize
        self._ids: list[np.ndarray] = []  # tokens of whole documents, from the one with the next token on
        self._used = used  # tokens of the first of these in earlier rows

    def get_state(self) -> dict[str, int]:
        """Returns the position: a document in the order, and the number of its tokens in earlier rows."""
        return {"document": self._next - len(self._ids), "used": self._used}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Moves to a position."""
        if not 0 <= state["document"] <= len(self.numbers):
            raise DataError(f"document {state['document']} of {len(self.numbers)}")
        self._begin(int(state["document"]), int(state["used"]))

    def __next__(self) -> dict[str, np.ndarray]:
        size = self.num_tokens
        while sum(map(len, self._ids)) - self._used < size + 1 and self._next < len(self.numbers):
            self._ids.append(self._tokens(self._next))
            self._next += 1
        pieces, left, skipped = [np.zeros(0, np.uint32)], size + 1, self._used
        for document in self._ids:
            pieces.append(document[skipped : skipped + left])
            left, skipped = left - len(pieces[-1]), max(skipped - len(document), 0)
        ids = np.concatenate(pieces)
        if len(ids) < 2:
            raise StopIteration
        lengths = np.array([len(piece) for piece in pieces])
        numbers = np.repeat(np.cumsum(lengths > 0), lengths)
        row = {name: np.zeros(size, dtype) for name, dtype in ROW_DTYPES.items()}
        count = len(ids) - 1
        row["inputs"][:count] = ids[:-1]
        row["targets"][:count] = ids[1:]
        row["weights"][:count] = numbers[:-1] == numbers[1:]
        row["segment_ids"][:count] = numbers[:-1] - numbers[0] + 1
        self._used += size
        while self._ids and self._used >= len(self._ids[0]):
            self._used -= len(self._ids.pop(0))
        return row

    def _tokens(self, place: int) -> np.ndarray:
        """Returns the tokens of a document with its end; none of an empty one."""
        number = int(self.numbers[int(self._order[place])])
        try:
            ids = self.tokenizer.encode(self.documents[number]).astype(np.uint32)
        except DataError as error:
            text = str(error).partition(chr(10))[0]
            raise DataError(f"document {number}: {text}", hint=error.hint) from None
        return np.append(ids, np.uint32(self.tokenizer.end)) if len(ids) else ids


def _order(numbers: np.ndarray, group_ends: list[int] | None, seed: int) -> Any:
    """Returns the order of documents: places in `numbers`, shuffled; groups are shuffled, and documents inside each."""
    import grain

    if group_ends is None:
        return grain.MapDataset.range(len(numbers)).seed(seed).shuffle()
    groups = np.searchsorted(group_ends, numbers, side="right")
    # Hashes, because the shuffles of NumPy may change with its version, and a saved position with them.
    start = scatter(np.array([seed], np.uint64))
    return np.lexsort((scatter(start + scatter(numbers)), scatter(start ^ scatter(groups))))
