"""Rows of whole conversations, packed so that none continues in another row, with loss on the assistant's tokens.

A conversation of n tokens takes n - 1 places: its last token is a target only, and no target belongs to another
conversation. Each conversation goes to the open row with the least space that is enough; a bounded number of rows is
open, so packing is one pass over the lengths.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np

from meshwright.data.packed_rows import ROW_DTYPES, check_tokens
from meshwright.data.tokens import Tokens
from meshwright.errors import DataError

_OPEN_ROWS = 64


class ChatRows:
    """Packed rows of conversations with random access, with the arrays of `Rows`.

    `weights` is 1 for targets that the assistant wrote. A conversation longer than a row is cut at its end; `num_cut`
    counts these. `num_dropped` counts those without a target of the assistant in the part that fits.

    Args:
        tokens: conversations with a mask; `prepare_conversations` makes them.
        num_tokens: tokens per row.
        vocab_size: vocabulary size of the model; larger token ids are rejected.

    Example:
        >>> tokens = Tokens.of([[5, 6, 7], [8, 9]], mask=[[0, 0, 1], [0, 1]])
        >>> for name, values in ChatRows(tokens, 4)[0].items():
        ...     print(f"{name:12}{values.tolist()}")
        inputs      [5, 6, 8, 0]
        targets     [6, 7, 9, 0]
        weights     [0.0, 1.0, 1.0, 0.0]
        segment_ids [1, 1, 2, 0]
    """

    def __init__(self, tokens: Tokens, num_tokens: int, *, vocab_size: int | None = None) -> None:
        check_tokens(tokens, num_tokens, vocab_size)
        if tokens.mask is None:
            raise DataError("these tokens have no mask of the assistant's.", hint="use Rows, or prepare_conversations.")
        self.tokens, self.num_tokens = tokens, num_tokens
        sizes = np.diff(tokens.bounds) - 1
        self.num_cut = int((sizes > num_tokens).sum())
        self._sizes = np.minimum(sizes, num_tokens)
        starts = tokens.starts
        targets = np.array(
            [
                np.count_nonzero(tokens.mask[start + 1 : start + 1 + size])
                for start, size in zip(starts.tolist(), self._sizes.tolist(), strict=True)
            ],
            np.int64,
        )
        kept = np.flatnonzero(targets)
        self.num_dropped = len(sizes) - len(kept)
        if not len(kept):
            raise DataError(
                f"no conversation has text of the assistant in its first {num_tokens} tokens.",
                hint="use longer rows (--num-tokens).",
            )
        rows = _pack(self._sizes[kept], num_tokens)
        order = np.argsort(rows, kind="stable")
        self._members = kept[order]
        self._ends = np.cumsum(np.bincount(rows))
        self._targets = np.bincount(rows, weights=targets[kept]).astype(np.int64)
        parts = f"{tokens.fingerprint} as conversations in rows of {num_tokens}"
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = {name: np.zeros(self.num_tokens, dtype) for name, dtype in ROW_DTYPES.items()}
        assert self.tokens.mask is not None
        at = 0
        for segment, document in enumerate(self.members(index), start=1):
            start, size = int(self.tokens.starts[document]), int(self._sizes[document])
            ids, here = self.tokens.values[start : start + size + 1], slice(at, at + size)
            row["inputs"][here] = ids[:-1]
            row["targets"][here] = ids[1:]
            row["weights"][here] = self.tokens.mask[start + 1 : start + size + 1]
            row["segment_ids"][here] = segment
            at += size
        return row

    def members(self, index: int) -> np.ndarray:
        """Returns the numbers of the conversations in a row, in order."""
        return self._members[(self._ends[index - 1] if index else 0) : self._ends[index]]

    @property
    def total_targets(self) -> int:
        """Number of targets with weight in all rows."""
        return int(self._targets.sum())

    @property
    def most_segments(self) -> int:
        """Largest number of conversations in a row, plus one for padding; see `Execution.max_segments`."""
        return 1 + int(np.diff(self._ends, prepend=0).max())

    def num_targets(self, index: int) -> int:
        """Returns the number of targets with weight in a row, without reading its tokens."""
        return int(self._targets[index])


def _pack(sizes: np.ndarray, space: int) -> np.ndarray:
    """Returns the row of each conversation."""
    rows = np.zeros(len(sizes), np.int64)
    left = np.zeros(0, np.int64)  # space left in each open row
    numbers = np.zeros(0, np.int64)
    made = 0
    for place, size in enumerate(sizes.tolist()):
        fits = np.where(left >= size, left, space + 1)
        best = int(np.argmin(fits)) if len(left) else -1
        if best < 0 or fits[best] > space:
            if len(left) < _OPEN_ROWS:
                left, numbers = np.append(left, 0), np.append(numbers, 0)
                best = len(left) - 1
            else:
                best = int(np.argmin(left))  # close the fullest row
            left[best], numbers[best], made = space, made, made + 1
        rows[place] = numbers[best]
        left[best] -= size
    return rows
