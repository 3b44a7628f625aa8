"""Which matmuls run in fp8, and their scaling state.

A step computes the amaxes of the weights from the parameters, once, and takes those of inputs and gradients from the
state: the largest of the last steps (delayed scaling). The loss gets all of them as `fp8=Amaxes(...)`. Their gradient
is the amaxes of this step, combined by maximum over minibatches and devices, and enters the state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.parallel.fp8.casting import GRADIENT, INPUT, WEIGHT, Scaling, check_scaling
from meshwright.parallel.fp8.weight import Amaxes
from meshwright.rules.rule_set import compile_pattern
from meshwright.tree import named_leaves
from meshwright.types import PyTree

PROJECTIONS = r"(^|/)(q|k|v|o|out|o_gate|gate|up|down)$"
"""The projections of `Decoder` and `XLSTM`, except for the xLSTM's narrow input and forget gates."""

_HARDWARE_UNIT = 16  # cuBLASLt multiplies fp8 matrices whose dims are multiples of this


@dataclass(frozen=True)
class Fp8:
    """The fp8 part of a `Precision`: which matmuls, and how scales are chosen.

    Args:
        matmuls: regex; weights with a match in their path are multiplied in fp8, forward and backward, if they are
            matrices (or stacked ones) with dims that are multiples of 16 and at least `least_dim`. All others are
            multiplied in `Precision.compute`, and so are embeddings, the head, routers and norms by default.
        scaling: "delayed": scales of inputs and gradients come from the previous steps, which costs no pass over them.
            "current": from the tensors themselves, on all devices.
        history: number of steps whose largest amax gives a delayed scale.
        least_dim: narrower weights stay in `Precision.compute`, because their matmuls gain less than the casts cost.

    Example:
        >>> params = {"up": jnp.zeros((512, 1024)), "gate": jnp.zeros((512, 8)), "head": jnp.zeros((512, 1024))}
        >>> Fp8().names(params)
        ('up',)
    """

    matmuls: str = PROJECTIONS
    scaling: Scaling = "delayed"
    history: int = 16
    least_dim: int = 256

    def __post_init__(self) -> None:
        check_scaling(self.scaling)
        if not isinstance(self.matmuls, str):
            raise MeshwrightError(
                f"fp8: matmuls must be a regex; got {self.matmuls!r}.", hint="pass e.g. 'mlp/(gate|up|down)$'."
            )
        compile_pattern(self.matmuls)
        for name in ("history", "least_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MeshwrightError(f"fp8: {name} must be a positive integer; got {value!r}.", hint="pass e.g. 16.")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Fp8:
        """Returns the settings with these fields, such as those of a file; raises if one is unknown.

        Example:
            >>> Fp8.from_fields({"scaling": "current"}).scaling
            'current'
        """
        known = [item.name for item in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                hint = did_you_mean(str(name), known) or f"use one of: {', '.join(known)}."
                raise MeshwrightError(f"fp8: there is no field {name!r}.", hint=hint)
        return cls(**fields)

    def names(self, params: PyTree) -> tuple[str, ...]:
        """Returns the paths of the parameters that are multiplied in fp8; raises if there are none."""
        chosen: list[str] = []
        narrow: list[str] = []
        pattern = compile_pattern(self.matmuls)
        for leaf in named_leaves(params):
            if not pattern.matches(leaf.name) or len(leaf.value.shape) < 2:
                continue
            dims = leaf.value.shape[-2:]
            fits = all(dim % _HARDWARE_UNIT == 0 and dim >= self.least_dim for dim in dims)
            (chosen if fits else narrow).append(leaf.name)
        if not chosen:
            why = f"{self.matmuls!r} matches no matrix"
            if narrow:
                why = f"`{narrow[0]}` has dims below {self.least_dim} or that are not multiples of {_HARDWARE_UNIT}"
            raise MeshwrightError(
                f"no parameter is multiplied in fp8: {why}.",
                hint="use precision mixed, or choose others with --fp8-matmuls REGEX and --fp8-least-dim "
                "(in Python, Precision(compute='bfloat16', fp8=Fp8(matmuls=..., least_dim=...))).",
            )
        return tuple(chosen)

    def skipped(self, params: PyTree) -> tuple[str, ...]:
        """Returns the paths of matrices that match `matmuls` but are too narrow or oddly sized for fp8."""
        pattern, chosen = compile_pattern(self.matmuls), set(self.names(params))
        leaves = [leaf for leaf in named_leaves(params) if len(leaf.value.shape) >= 2]
        return tuple(leaf.name for leaf in leaves if pattern.matches(leaf.name) and leaf.name not in chosen)

    # --- Scaling state ---

    def init(self, params: PyTree) -> PyTree:
        """Returns the scaling state before the first step: no amaxes are known.

        A leaf is float32 `[..., 2, history]`, stacked like its parameter: for inputs and gradients, the newest first.
        With current scaling, there is no state (None).

        Example:
            >>> state = Fp8(history=4).init({"layers": {"up": jnp.zeros((3, 256, 512))}})
            >>> state["layers"]["up"].shape
            (3, 2, 4)
        """
        if self.scaling == "current":
            return None
        chosen = self._leaves(params)
        return nested({name: jnp.zeros((*leaf.shape[:-2], 2, self.history)) for name, leaf in chosen.items()})

    def amaxes(self, params: PyTree, state: PyTree) -> Amaxes:
        """Returns the amaxes for a step: those of its weights, and those that the state remembers."""
        found = {}
        known = {} if state is None else {leaf.name: leaf.value for leaf in named_leaves(state)}
        for name, leaf in self._leaves(params).items():
            # The stored parameters are cast before they are multiplied; the cast can round up.
            weight = jnp.max(jnp.abs(leaf), axis=(-2, -1)).astype(jnp.float32) * (1 + 2**-7)
            past = known[name].max(axis=-1) if name in known else jnp.zeros((*weight.shape, 2))
            found[name] = jnp.stack([past[..., 0], weight, past[..., 1]], axis=-1)
        return Amaxes(nested(found), self.scaling)

    def update(self, state: PyTree, found: Amaxes) -> PyTree:
        """Returns the state after a step with these amaxes."""

        def shift(past: Any, now: Any) -> Any:
            newest = jnp.stack([now[..., INPUT], now[..., GRADIENT]], axis=-1)
            return jnp.concatenate([newest[..., None], past[..., :-1]], axis=-1)

        return None if state is None else jax.tree.map(shift, state, found.tree)

    def _leaves(self, params: PyTree) -> dict[str, Any]:
        chosen = set(self.names(params))
        return {leaf.name: leaf.value for leaf in named_leaves(params) if leaf.name in chosen}


def with_weights(found: Amaxes, known: Amaxes) -> Amaxes:
    """Returns the amaxes that a step found, with those of its weights, which it knew before."""

    def put(now: Any, before: Any) -> Any:
        return now.at[..., WEIGHT].set(before[..., WEIGHT])

    return dataclasses.replace(found, tree=jax.tree.map(put, found.tree, known.tree))


def are_finite(found: Amaxes) -> Any:
    """Returns whether all amaxes are finite; casts clip infinities, so nothing else would show them."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found.tree)])


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from a dict of paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree
