"""Which dtype is used for what in a step: parameters, computing, exchanging gradients."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.tree import named_leaves
from meshwright.types import PyTree


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. `Precision.named("mixed")` keeps float32 parameters and computes in bfloat16.

    Args:
        params: what parameters and the optimizer's statistics of them are stored in.
        compute: what the loss gets parameters in. They are gathered in it too.
        reduce: what gradients travel between devices in.
        accumulate: what gradients of minibatches are added up in: float32, since a sum in fewer bits stops growing.
        keep: parameters whose path this expression is found in are not cast for computing.
    """

    params: Any = "float32"
    compute: Any = "float32"
    reduce: Any = "float32"
    accumulate: Any = "float32"
    keep: str = r"norm|scale|bias"

    def __post_init__(self) -> None:
        for name in ("params", "compute", "reduce", "accumulate"):
            dtype = as_dtype(getattr(self, name))
            if not is_float(dtype):
                raise MeshwrightError(f"precision: {name}={dtype} is not a float dtype.")
            object.__setattr__(self, name, jnp.dtype(dtype))
        if self.accumulate != jnp.float32:
            raise MeshwrightError(
                f"precision: gradients are added up in float32, not in {self.accumulate}.",
                hint="a sum of ones in bfloat16 stops at 256.",
            )

    @classmethod
    def named(cls, name: str | Precision) -> Precision:
        """Returns "float32" (all of it), "mixed" (computes in bfloat16), or "bfloat16" (parameters as well).

        Example:
            >>> Precision.named("mixed").compute.name
            'bfloat16'
        """
        known = {
            "float32": cls(),
            "mixed": cls(compute="bfloat16"),
            "bfloat16": cls(params="bfloat16", compute="bfloat16"),
        }
        if isinstance(name, Precision):
            return name
        if name not in known:
            hint = did_you_mean(name, known) or f"use one of: {', '.join(known)}, or a Precision."
            raise MeshwrightError(f"there is no precision {name!r}.", hint=hint)
        return known[name]

    def stored(self, params: PyTree) -> PyTree:
        """Returns parameters as they are stored."""
        return jax.tree.map(lambda leaf: leaf.astype(self.params) if is_float(leaf.dtype) else leaf, params)

    def compute_dtypes(self, params: PyTree) -> PyTree:
        """Returns, leaf by leaf, the dtype that a loss gets parameters in."""
        keep = re.compile(self.keep) if self.keep else None
        dtypes = [
            leaf.value.dtype
            if not is_float(leaf.value.dtype) or (keep is not None and keep.search(leaf.name))
            else self.compute
            for leaf in named_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), dtypes)
