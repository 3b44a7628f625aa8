"""Comparison of rows with the example batch of a job."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from meshwright.errors import DataError
from meshwright.tree import named_leaves
from meshwright.types import PyTree


def check_row(row: PyTree, batch: PyTree, *, name: str) -> None:
    """Raises unless a row has the structure, shapes and dtypes of one row of a batch.

    Example:
        >>> check_row({"x": np.zeros(3)}, {"x": np.zeros((8, 2))}, name="data")
        Traceback (most recent call last):
        meshwright.errors.DataError: data: a row of `x` is float64[3], but the job's example batch has float64[2].
        hint: change the data, or the job's batch.
    """
    problem = mismatch(row, batch, lead=1)
    if problem is None:
        return
    if mismatch(row, batch, lead=0) is None:
        raise DataError(
            f"{name}: one element is a whole batch, but rows are needed to shuffle them.",
            hint="remove .batch(...) from the dataset, or give an IterDataset or a function that makes an iterator.",
        )
    raise DataError(f"{name}: {problem}", hint="change the data, or the job's batch.")


def mismatch(element: PyTree, batch: PyTree, *, lead: int) -> str | None:
    """Returns the first difference between an element and a batch without its `lead` first dims, or None."""
    wanted, found = ({leaf.name: leaf.value for leaf in named_leaves(tree)} for tree in (batch, element))
    missing, extra = (sorted(set(a) - set(b)) for a, b in ((wanted, found), (found, wanted)))
    if missing or extra:
        lacks = f"it has no `{missing[0]}`" if missing else f"it has `{extra[0]}`, which the batch has not"
        return f"its rows differ from the job's example batch: {lacks}."
    for name, leaf in wanted.items():
        value = found[name]
        if not np.ndim(leaf):
            return f"`{name}` of the job's example batch is a scalar, but every row has its own values."
        if _kind(value) != (shape := np.shape(leaf)[lead:], np.dtype(leaf.dtype)):
            what = "a row of " if lead else ""
            return (
                f"{what}`{name}` is {_text(*_kind(value))}, but the job's example batch has "
                f"{_text(shape, np.dtype(leaf.dtype))}."
            )
    if not same_structure(element, batch):
        return "its rows are nested in other containers than the job's example batch."
    return None


def same_structure(left: PyTree, right: PyTree) -> bool:
    """Returns whether two trees have the same containers."""
    found: list[Any] = [jax.tree.structure(tree) for tree in (left, right)]
    return bool(found[0] == found[1])


def describe(row: PyTree) -> str:
    """Returns the structure, shapes and dtypes of a row, for fingerprints."""
    leaves = [(leaf.name, *_kind(leaf.value)) for leaf in named_leaves(row)]
    return f"{jax.tree.structure(row)} {[(name, list(shape), str(dtype)) for name, shape, dtype in leaves]}"


def content_hash(text: str, rows: list[PyTree]) -> str:
    """Returns a hash of a text and the contents of some rows."""
    found = hashlib.sha256(text.encode())
    for leaf in jax.tree.leaves(rows):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _kind(value: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return np.shape(array), np.dtype(array.dtype)


def _text(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"{dtype.name}{list(shape)}" if shape else dtype.name
