"""Rows of equal length, packed from a stream of documents, with the targets of a language model.

Documents follow one another without gaps, and one that does not fit continues in the next row. Row i holds tokens `i*S`
to `i*S+S` of the stream. The last of these is a target here and the first input of the next row, so every token is a
target once, except the first of each document, which has no context.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np

from meshwright.data.tokens import Tokens
from meshwright.errors import DataError
from meshwright.specs import ceil_div

ROW_DTYPES = {"inputs": np.int32, "targets": np.int32, "weights": np.float32, "segment_ids": np.int32}


class Rows:
    """Packed rows with random access: `rows[i]` is a dict of arrays of `num_tokens` elements.

    `inputs` and `targets` are token ids. `weights` is 1 for a target in the same document as its input, the `end` token
    included, and 0 otherwise. `segment_ids` numbers the documents of a row from 1; 0 is the padding of the last row.

    Args:
        num_tokens: tokens per row.
        vocab_size: vocabulary size of the model; larger token ids are rejected.

    Example:
        >>> tokens = Tokens.of([[5, 6, 7, 0], [8, 9, 0]])
        >>> for name, values in Rows(tokens, 5)[0].items():
        ...     print(f"{name:12}{values.tolist()}")
        inputs      [5, 6, 7, 0, 8]
        targets     [6, 7, 0, 8, 9]
        weights     [1.0, 1.0, 1.0, 0.0, 1.0]
        segment_ids [1, 1, 1, 1, 2]
    """

    def __init__(self, tokens: Tokens, num_tokens: int, *, vocab_size: int | None = None) -> None:
        check_tokens(tokens, num_tokens, vocab_size)
        self.tokens = tokens
        self.num_tokens = num_tokens
        self.fingerprint = hashlib.sha256(f"{tokens.fingerprint} in rows of {num_tokens}".encode()).hexdigest()

    def __len__(self) -> int:
        return ceil_div(self.tokens.num_tokens - 1, self.num_tokens)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self.num_tokens
        ids, documents = self.tokens.read(start, min(start + self.num_tokens + 1, self.tokens.num_tokens))
        size = len(ids) - 1
        row = {name: np.zeros(self.num_tokens, dtype) for name, dtype in ROW_DTYPES.items()}
        row["inputs"][:size] = ids[:-1]
        row["targets"][:size] = ids[1:]
        row["weights"][:size] = documents[:-1] == documents[1:]
        row["segment_ids"][:size] = documents[:-1] - documents[0] + 1
        return row

    @property
    def total_targets(self) -> int:
        """Number of targets with weight in all rows."""
        return self.tokens.num_tokens - self.tokens.num_documents

    @property
    def most_segments(self) -> int:
        """Largest number of documents in a row, where padding counts as one; see `Execution.max_segments`."""
        # Segments begin where documents do, and where the padding of the last row does.
        begins = np.append(self.tokens.bounds[1:-1], self.tokens.num_tokens - 1)
        inside = np.unique(begins[begins % self.num_tokens != 0])
        return 1 + int(np.unique(inside // self.num_tokens, return_counts=True)[1].max(initial=0))

    def num_targets(self, index: int) -> int:
        """Returns the number of targets with weight in a row, without reading its tokens."""
        start = int(index) * self.num_tokens
        stop = min(start + self.num_tokens + 1, self.tokens.num_tokens)
        # A document that begins inside the row has no input for its first token.
        inside = np.searchsorted(self.tokens.bounds, [start, stop - 1], side="right")
        return stop - start - 1 - int(inside[1] - inside[0])


def check_tokens(tokens: Tokens, num_tokens: int, vocab_size: int | None) -> None:
    """Raises if tokens cannot fill rows, or have ids beyond the vocabulary of the model."""
    if num_tokens < 1:
        raise DataError(f"num_tokens must be at least 1; got {num_tokens}.", hint="pass the row length, e.g. 1024.")
    if tokens.num_tokens < 2:
        raise DataError(f"the data is empty: it has {tokens.num_tokens} tokens.", hint="add text.")
    if vocab_size is not None and tokens.largest >= vocab_size:
        raise DataError(
            f"the data has token {tokens.largest}; the model's vocabulary has {vocab_size} tokens, 0 to "
            f"{vocab_size - 1}.",
            hint=f"use a model with vocab_size={tokens.vocab_size}, or the tokenizer that the model was made for.",
        )
