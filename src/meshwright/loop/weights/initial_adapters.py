"""Adapters to start a run from (`--init-adapters`): a PEFT folder beside the weights of its base model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.checkpoint.arrays import nest
from meshwright.checkpoint.convert.peft_adapters import peft_settings, read_peft
from meshwright.errors import ConfigError
from meshwright.layout.leaf import LeafLayout
from meshwright.loop.settings.config import TrainConfig
from meshwright.parallel.lora.low_rank import LORA_A, LORA_B
from meshwright.train.fine_tuning.lora_settings import LoraSettings
from meshwright.tree import flatten_tree


def with_adapters(config: TrainConfig) -> TrainConfig:
    """Returns the options with `--lora` as the PEFT folder has it; raises if `--lora` says something else.

    Example:
        >>> with_adapters(TrainConfig()) == TrainConfig()
        True
    """
    folder = config.init.init_adapters
    # A resumed run has recorded its settings; with --or-start there may be no run yet.
    if folder is None or (config.run.resume and config.adapt.lora is not None):
        return config
    found = peft_settings(folder)
    alpha, dropout = (repr(float(value)).removesuffix(".0") for value in (found.alpha, found.dropout))
    text = f"rank={found.rank},alpha={alpha},targets={found.targets},dropout={dropout}"
    if config.adapt.lora is None:
        return config.changed({"lora": text})
    given = LoraSettings.parse(config.adapt.lora)
    if (given.rank, given.alpha) != (found.rank, found.alpha):
        raise ConfigError(
            f"--init-adapters has rank={found.rank},alpha={found.alpha:g}; --lora has rank={given.rank},"
            f"alpha={given.alpha:g}.",
            hint="leave out --lora, or pass the same rank and alpha, e.g. to add base=int8.",
        )
    return config


def read_adapters(folder: Path | str, leaves: Mapping[str, LeafLayout], mesh: Any) -> dict[str, jax.Array]:
    """Returns the adapters of a PEFT folder under the names of a run's parameters, on its mesh.

    Args:
        leaves: the run's leaves, by name.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.values()]
    found = flatten_tree(read_peft(folder, nest(list(leaves), shapes)), sep="/")
    placed: dict[str, jax.Array] = {}
    for name, leaf in leaves.items():
        if name.rpartition("/")[2] in (LORA_A, LORA_B):
            values = found[name].astype(leaf.dtype)
            sharding = NamedSharding(mesh, leaf.spec)
            placed[name] = jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
    return placed
