"""Rows of arrays in memory or in .npy and .npz files."""

from __future__ import annotations

import hashlib
import operator
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.bounded_reader import open_regular
from meshwright.data.row_check import check_row, describe
from meshwright.errors import DataError, did_you_mean
from meshwright.tree import named_leaves
from meshwright.types import PyTree

ARRAY_FILES = (".npy", ".npz")
NUM_SAMPLED = 1024
"""Number of rows, evenly spaced, whose contents a fingerprint covers."""


class ArrayRows:
    """Rows of a tree of arrays that share their leading dim: `rows[i]` is entry i of each array.

    The fingerprint covers all shapes and dtypes, and the contents of up to 1,024 evenly spaced rows.

    Args:
        arrays: NumPy arrays (memory-mapped ones are read row by row) or JAX arrays.
        batch: example batch whose structure, row shapes and dtypes the rows must have.
        name: name of the data in errors.

    Example:
        >>> rows = ArrayRows({"x": np.arange(6.0).reshape(3, 2), "y": np.arange(3)})
        >>> len(rows), rows[2]
        (3, {'x': array([4., 5.]), 'y': np.int64(2)})
    """

    def __init__(self, arrays: PyTree, *, batch: PyTree = None, name: str = "data") -> None:
        self.arrays = jax.tree.map(lambda leaf: leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf), arrays)
        sizes = {leaf.name: int(np.shape(leaf.value)[0]) for leaf in named_leaves(self.arrays) if np.ndim(leaf.value)}
        scalars = [leaf.name for leaf in named_leaves(self.arrays) if not np.ndim(leaf.value)]
        if scalars or len(set(sizes.values())) != 1:
            found = ", ".join(f"`{leaf}` has {size}" for leaf, size in sizes.items())
            wrong = f"`{scalars[0]}` is a scalar" if scalars else f"its arrays differ in rows: {found}"
            raise DataError(f"{name} has no rows: {wrong}." if scalars else f"{name}: {wrong}.", hint=_ROWS)
        self.size: int = next(iter(sizes.values()))
        if not self.size:
            raise DataError(f"{name} is empty: its arrays have 0 rows.")
        if batch is not None:
            check_row(self[0], batch, name=name)
        self.fingerprint = self._fingerprint()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> PyTree:
        index = operator.index(index)
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        return jax.tree.map(lambda leaf: leaf[index], self.arrays)

    def _fingerprint(self) -> str:
        sampled = np.unique(np.linspace(0, self.size - 1, min(self.size, NUM_SAMPLED)).astype(np.int64))
        found = hashlib.sha256(f"arrays {self.size} {describe(self[0])}".encode())
        for leaf in jax.tree.leaves(self.arrays):
            found.update(np.ascontiguousarray(leaf[sampled]).tobytes())
        return found.hexdigest()


_ROWS = "give every array one entry per row in its leading dim."


def read_arrays(path: str | os.PathLike[str], *, name: str = "data") -> dict[str, np.ndarray]:
    """Returns the arrays of a path by name, with rows as dim 0; .npy files are memory-mapped.

    The path is an .npz file, an .npy file (named by its stem), a folder with one .npy file per array, or a folder of
    .npz files with the same names, whose rows follow one another in the order of the file names.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> np.save(folder / "x.npy", np.zeros((4, 2)))
        >>> np.save(folder / "y.npy", np.arange(4))
        >>> {name: array.shape for name, array in read_arrays(folder).items()}
        {'x': (4, 2), 'y': (4,)}
    """
    place = Path(path)
    if not place.exists():
        siblings = sorted(item.name for item in place.parent.iterdir()) if place.parent.is_dir() else []
        raise DataError(
            f"{name}: {place} does not exist.", hint=did_you_mean(place.name, siblings) or "check the path."
        )
    files = sorted(item for item in place.iterdir() if item.suffix in ARRAY_FILES) if place.is_dir() else [place]
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or kinds[0] not in ARRAY_FILES:
        what = "both .npy and .npz files" if len(kinds) == 2 else "no .npy or .npz files"
        raise DataError(
            f"{name}: {place} {'holds ' + what if place.is_dir() else 'is not an .npy or .npz file'}.",
            hint="save each array as NAME.npy in one folder, or all of them with numpy.savez.",
        )
    if kinds == [".npy"]:
        return {file.stem: _load(file, name) for file in files}
    parts = [_load(file, name) for file in files]
    for file, part in zip(files, parts, strict=True):
        if set(part) != set(parts[0]):
            raise DataError(f"{name}: {file} holds {sorted(part)}, but {files[0]} holds {sorted(parts[0])}.")
    return {key: np.concatenate([part[key] for part in parts]) if len(parts) > 1 else parts[0][key] for key in parts[0]}


def _load(file: Path, name: str) -> Any:
    try:
        open_regular(file).close()
        loaded = np.load(file, mmap_mode="r" if file.suffix == ".npy" else None, allow_pickle=False)
        return dict(loaded) if isinstance(loaded, Mapping) else loaded
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{name}: cannot read {file}: {error}") from None
