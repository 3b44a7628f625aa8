"""The tensors behind the leaves of a decoder: names, shapes and order in the files of a family.

A leaf holds all layers, and most matrices transposed; a tensor holds one layer, and sometimes several leaves as rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from meshwright.checkpoint.convert.family import Family
from meshwright.errors import CheckpointError
from meshwright.layout.leaf import text_table
from meshwright.models import Decoder
from meshwright.rng import abstract_key
from meshwright.tree import flatten_tree
from meshwright.types import PyTree

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


class TensorPart(NamedTuple):
    """The part of a tensor that holds one layer of a leaf, or a leaf outside the layers (`layer` is None)."""

    leaf: str
    layer: int | None
    first_row: int
    shape: Shape
    turned: bool


@functools.lru_cache(maxsize=8)
def abstract_params(model: Decoder) -> PyTree:
    """Returns the shapes and dtypes of a decoder's parameters; they are traced once for each model."""
    return jax.eval_shape(model.init, abstract_key())


def leaf_shapes(model: Decoder) -> dict[str, Shape]:
    """Returns the shapes of a decoder's parameters, by name.

    Example:
        >>> leaf_shapes(Decoder.named("tiny"))["embed/table"]
        (256, 64)
    """
    return {name: leaf.shape for name, leaf in flatten_tree(abstract_params(model), sep="/").items()}


def tensor_parts(model: Decoder, family: Family) -> dict[str, list[TensorPart]]:
    """Returns the parts of each tensor, in the order of the files: embedding, layers one by one, norm, head.

    Example:
        >>> from meshwright.checkpoint.convert.families import family_named
        >>> parts = tensor_parts(Decoder.named("tiny"), family_named("phi3"))
        >>> [(part.leaf, part.first_row) for part in parts["model.layers.0.mlp.gate_up_proj.weight"]]
        [('layers/mlp/gate', 0), ('layers/mlp/up', 128)]
    """
    shapes, names = leaf_shapes(model), family.names
    unknown = [name for name in shapes if name not in names]
    if unknown:
        raise CheckpointError(f"{family.model_type} has no tensor for `{unknown[0]}`.", hint="choose another family.")
    known = [name for name in names if name in shapes]
    stacked = [name for name in known if "{}" in names[name].name]
    rows: list[tuple[int | None, str]] = [(None, name) for name in known if name == "embed/table"]
    rows += [(layer, name) for layer in range(model.num_layers) for name in stacked]
    rows += [(None, name) for name in known if name not in stacked and name != "embed/table"]
    found: dict[str, list[TensorPart]] = {}
    for layer, name in rows:
        shape = shapes[name] if layer is None else shapes[name][1:]
        shape = shape[::-1] if names[name].turned else shape
        parts = found.setdefault(names[name].name.format(layer), [])
        parts.append(TensorPart(name, layer, sum(part.shape[0] for part in parts), shape, names[name].turned))
    return found


def tensor_shapes(model: Decoder, family: Family) -> dict[str, Shape]:
    """Returns the names and shapes of the tensors of a decoder.

    Example:
        >>> from meshwright.checkpoint.convert.families import family_of
        >>> model = Decoder.named("tiny")
        >>> tensor_shapes(model, family_of(model))["model.layers.1.mlp.up_proj.weight"]
        (128, 64)
    """
    return {
        name: (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        for name, parts in tensor_parts(model, family).items()
    }


def require_same(what: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises with a table if names or shapes differ.

    Example:
        >>> require_same("the files", {"w": (2, 3)}, {"w": (2, 3)})
    """
    rows = [("missing", name, "-", str(list(shape))) for name, shape in wanted.items() if name not in found]
    rows += [("extra", name, str(list(shape)), "-") for name, shape in found.items() if name not in wanted]
    rows += [
        ("shape", name, str(list(found[name])), str(list(shape)))
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if rows:
        table = text_table(("problem", "leaf", "found", "model"), rows[:30])
        more = f"\n... and {len(rows) - 30} more" if len(rows) > 30 else ""
        raise CheckpointError(
            f"{what} do not match the model: {len(rows)} differences.\n{table}{more}",
            hint="check that config.json belongs to these weights.",
        )
