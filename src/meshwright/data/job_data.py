"""The forms of data that a job may hold, each opened as numbered rows or as an iterator with a position."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from meshwright.data.array_rows import ArrayRows, read_arrays
from meshwright.data.batches import RowSource
from meshwright.data.iterated import IteratedRows
from meshwright.data.row_check import check_row, content_hash, describe, same_structure
from meshwright.errors import DataError
from meshwright.types import PyTree


def open_rows(data: Any, batch: PyTree, *, seed: int = 0, name: str = "data") -> RowSource | IteratedRows:
    """Opens data of any form as rows that fit an example batch.

    Args:
        data: a tree of arrays with rows in the leading dim; an .npy or .npz file, or a folder of them; a Grain
            `MapDataset` or `IterDataset`; any object with a length and numbered rows, such as a Grain
            `RandomAccessDataSource` or a list of rows; or a function `make(seed)` that returns an iterator.
        batch: example batch of the job.
        seed: seed of the run, which decides the first element of an iterator.
        name: name of the data in errors.

    Example:
        >>> import grain
        >>> batch = {"x": np.zeros(8, "int64")}
        >>> len(open_rows({"x": np.arange(20)}, batch))
        20
        >>> rows = open_rows(grain.MapDataset.range(20).map(lambda i: {"x": np.int64(i)}), batch)
        >>> rows[3]
        {'x': np.int64(3)}
    """
    import grain

    if isinstance(data, (str, os.PathLike)):
        return ArrayRows(_like(read_arrays(data, name=name), batch), batch=batch, name=f"{name} ({data})")
    if isinstance(data, grain.MapDataset):
        return DatasetRows(data, batch, name=name)
    if isinstance(data, grain.IterDataset):
        return IteratedRows(lambda _: iter(data), batch, seed=seed, name=name)
    if isinstance(data, type):  # a class of iterators has their methods, but is a function
        return IteratedRows(data, batch, seed=seed, name=name)
    if _are_arrays(data, batch):
        return ArrayRows(data, batch=batch, name=name)
    if hasattr(data, "__next__"):
        raise DataError(
            f"{name} is an iterator, which cannot start again for the next epoch or after a kill.",
            hint="give a function make(seed) that returns it.",
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        if hasattr(data, "fingerprint"):
            check_row(data[0], batch, name=name)
            rows: RowSource = data
            return rows
        return DatasetRows(grain.MapDataset.source(data), batch, name=name)
    if hasattr(data, "__iter__") and not isinstance(data, Mapping):
        return IteratedRows(lambda _: iter(data), batch, seed=seed, name=name)
    if callable(data):
        return IteratedRows(data, batch, seed=seed, name=name)
    raise DataError(
        f"{name} is a {type(data).__name__}, which holds no rows.",
        hint="give arrays, a path, a Grain dataset, an object with __len__ and __getitem__, or make(seed) -> iterator.",
    )


class DatasetRows:
    """The rows of a Grain `MapDataset`; random transformations draw new values in every epoch.

    The fingerprint covers the number of rows and the contents of the first, middle and last one.
    """

    def __init__(self, dataset: Any, batch: PyTree, *, name: str = "data") -> None:
        self.dataset, self.name = dataset, name
        self.size = len(dataset)
        if self.size >= sys.maxsize // 2:
            raise DataError(
                f"{name} repeats forever, so its rows cannot be shuffled by epoch.",
                hint="remove .repeat() from the dataset, and use --epochs.",
            )
        if not self.size:
            raise DataError(f"{name} is empty: it has 0 rows.")
        check_row(self[0], batch, name=name)
        places = sorted({0, self.size // 2, self.size - 1})
        text = f"dataset {self.size} {describe(self[0])}"
        self.fingerprint, again = (content_hash(text, [self[place] for place in places]) for _ in range(2))
        if self.fingerprint != again:
            raise DataError(
                f"{name} gives other values when a row is read again, so a resumed run could not repeat its steps.",
                hint="draw random values with MapDataset.seed(...).random_map(...), which depends on the row.",
            )

    def __len__(self) -> int:
        return int(self.size)

    def __getitem__(self, index: Any) -> PyTree:
        return self.read(int(index), 0)

    def read(self, number: int, epoch: int) -> PyTree:
        """Returns a row as transformed in an epoch: Grain derives random keys from positions counted over epochs."""
        row = self.dataset[epoch * self.size + number]
        if row is None:
            raise DataError(
                f"{self.name} has no row {number}: a filter removed it.",
                hint="give an IterDataset (dataset.to_iter_dataset()), or filter before training.",
            )
        return row


def _are_arrays(data: Any, batch: PyTree) -> bool:
    if hasattr(data, "__iter__") and not isinstance(data, (Mapping, list, tuple)) and not hasattr(data, "dtype"):
        return False  # JAX rejects other iterables as leaves
    leaves = jax.tree.leaves(data)
    whole = bool(leaves) and all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves)
    return whole and (not isinstance(data, (list, tuple)) or same_structure(data, batch))


def _like(arrays: dict[str, np.ndarray], batch: PyTree) -> PyTree:
    """Returns the only array alone if the batch is an array and not a dict."""
    return next(iter(arrays.values())) if len(arrays) == 1 and hasattr(batch, "dtype") else arrays
