"""Weights for a run with adapters (`--lora`): plain matrices become the frozen base of their adapters."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from meshwright.dtypes import is_float
from meshwright.errors import ConfigError
from meshwright.layout.leaf import LeafLayout
from meshwright.parallel.lora.low_rank import BASE, LORA_A, LORA_B, SCALES
from meshwright.train.fine_tuning.lora import stored_base
from meshwright.train.fine_tuning.lora_settings import LoraSettings


def plain_leaves(leaves: Mapping[str, LeafLayout], stored: Collection[str]) -> dict[str, LeafLayout]:
    """Returns the leaves of a run's parameters with one plain matrix in place of each adapted one.

    Args:
        stored: the names in the source; a matrix that has adapters there stays as it is.

    Example:
        >>> import meshwright as mw
        >>> job = mw.Job(init=lambda key: {"up": jnp.ones((8, 4)), "b": jnp.ones(4)}, rules=[(".*", mw.P())])
        >>> adapted = mw.train.lora(job, rank=2, targets="up", base="nf4", block=4)
        >>> layout = mw.make_layout(adapted.rules, mw.abstract_init(adapted.init), mw.create_mesh("dp:8"))
        >>> leaves = plain_leaves({leaf.name: leaf for leaf in layout.leaves}, ["b", "up"])
        >>> {name: leaf.shape for name, leaf in leaves.items()}
        {'b': (4,), 'up': (8, 4)}
    """
    found: dict[str, LeafLayout] = {}
    for name, leaf in leaves.items():
        path, _, part = name.rpartition("/")
        if f"{path}/{LORA_A}" not in leaves or f"{path}/{LORA_A}" in stored:
            found[name] = leaf
        elif part == BASE:
            if any(leaves[f"{path}/{part}"].is_padded for part in (BASE, LORA_A, LORA_B)):
                raise ConfigError(
                    f"`{path}` is padded on this mesh, and adapters cannot start from padded weights.",
                    hint="use a mesh that divides its dims, or leave it out of the targets of --lora.",
                )
            shape = (*leaves[f"{path}/{LORA_A}"].shape[:-1], leaves[f"{path}/{LORA_B}"].shape[-1])
            dtype = leaf.dtype if is_float(leaf.dtype) else jnp.dtype(jnp.float32)
            found[path] = leaf._replace(name=path, shape=shape, stored_shape=shape, dtype=dtype)
    return found


def as_bases(
    arrays: Mapping[str, jax.Array], leaves: Mapping[str, LeafLayout], settings: LoraSettings, mesh: Any
) -> dict[str, jax.Array]:
    """Returns the arrays under the names of a run's parameters: plain matrices as bases, quantized if it does so.

    Args:
        leaves: the run's leaves, by name.
    """
    found: dict[str, jax.Array] = {}
    for name, array in arrays.items():
        parts = [part for part in (BASE, SCALES) if f"{name}/{part}" in leaves]
        if not parts:
            found[name] = array
            continue
        shardings = {part: NamedSharding(mesh, leaves[f"{name}/{part}"].spec) for part in parts}
        store = jax.jit(functools.partial(stored_base, settings=settings), out_shardings=shardings)
        found |= {f"{name}/{part}": value for part, value in store(array).items()}
    return found
