"""Rows: a stream of documents cut into pieces of equal length, each with what a model should predict.

Documents follow one another without gaps, and one that does not fit continues in the next row. Row i has the tokens
`i*S .. i*S+S` of the stream: the last of these is a target here and the first input of the next row, so that every
token is a target once, apart from the first of each document, which nothing before it can predict.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np

from meshwright.data.tokens import Tokens
from meshwright.errors import DataError
from meshwright.specs import ceil_div

_DTYPES = {"inputs": np.int32, "targets": np.int32, "weights": np.float32, "segment_ids": np.int32}


class Rows:
    """Rows of `num_tokens` tokens: random access, `rows[i]` is a dict of arrays of that length.

    `inputs` and `targets` are token ids. `weights` are 1 where the target counts: inside a document, its `end` token
    included. `segment_ids` number the documents of a row from 1; 0 is padding, which only the last row can have.

    Args:
        vocab_size: of the model that will see the rows; ids beyond it are refused.

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
        if num_tokens < 1:
            raise DataError(f"rows of {num_tokens} tokens hold nothing.", hint="num_tokens is 1 or more.")
        if tokens.num_tokens < 2:
            raise DataError(f"the data is empty: it has {tokens.num_tokens} tokens.", hint="add text.")
        if vocab_size is not None and tokens.largest >= vocab_size:
            raise DataError(
                f"the data has token {tokens.largest}; the model's vocabulary has {vocab_size} tokens, 0 to "
                f"{vocab_size - 1}.",
                hint=f"a model with vocab_size={tokens.vocab_size}, or the tokenizer that the model was made for.",
            )
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
        row = {name: np.zeros(self.num_tokens, dtype) for name, dtype in _DTYPES.items()}
        row["inputs"][:size] = ids[:-1]
        row["targets"][:size] = ids[1:]
        row["weights"][:size] = documents[:-1] == documents[1:]
        row["segment_ids"][:size] = documents[:-1] - documents[0] + 1
        return row
