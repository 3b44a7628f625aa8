"""The dtypes of a step: parameters, computation, and gradient reduction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.dtypes import as_dtype, is_float
from meshwright.errors import MeshwrightError, did_you_mean
from meshwright.rules.rule_set import compile_pattern
from meshwright.train.fp8_scaling import Fp8
from meshwright.tree import named_leaves
from meshwright.types import PyTree


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step. `Precision.named("mixed")` keeps float32 parameters and computes in bfloat16.

    Args:
        params: dtype of the stored parameters and of their optimizer state.
        compute: dtype of parameters in the loss, and in all-gathers.
        reduce: dtype in which devices reduce gradients.
        accumulate: dtype in which gradients of minibatches are summed; must be float32.
        keep: regex; parameters with a match in their path are not cast to `compute`.
        fp8: which matmuls run in fp8, as an `Fp8` or a mapping of its fields (default: none). Their products and all
            other operations stay in `compute`.
    """

    params: Any = "float32"
    compute: Any = "float32"
    reduce: Any = "float32"
    accumulate: Any = "float32"
    keep: str = r"norm|scale|bias"
    fp8: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.fp8, Mapping):
            object.__setattr__(self, "fp8", Fp8.from_fields(self.fp8))
        elif not (self.fp8 is None or isinstance(self.fp8, Fp8)):
            raise MeshwrightError(f"precision: fp8 must be an Fp8; got {self.fp8!r}.", hint="pass fp8=Fp8(), or None.")
        for name in ("params", "compute", "reduce", "accumulate"):
            dtype = as_dtype(getattr(self, name))
            if not is_float(dtype):
                raise MeshwrightError(f"precision: {name}={dtype} is not a float dtype.", hint="pass e.g. bfloat16.")
            object.__setattr__(self, name, jnp.dtype(dtype))
        if self.fp8 is not None and self.compute == jnp.float16:
            raise MeshwrightError(
                "precision: fp8 does not work with compute=float16, in which small gradients become zero.",
                hint="use compute='bfloat16'.",
            )
        if self.accumulate != jnp.float32:
            raise MeshwrightError(
                f"precision: accumulate must be float32; got {self.accumulate}.",
                hint="leave it at float32; a sum of ones in bfloat16 stops growing at 256.",
            )

    @classmethod
    def named(cls, name: str | Precision) -> Precision:
        """Returns a precision by name.

        "float32"; "mixed" (bfloat16 compute); "bfloat16" (bfloat16 compute and parameters); or "fp8" (like mixed, with
        the projections of the layers in fp8, see `Fp8`).

        Example:
            >>> Precision.named("mixed").compute.name
            'bfloat16'
        """
        known = {
            "float32": cls(),
            "mixed": cls(compute="bfloat16"),
            "bfloat16": cls(params="bfloat16", compute="bfloat16"),
            "fp8": cls(compute="bfloat16", fp8=Fp8()),
        }
        if isinstance(name, Precision):
            return name
        if name not in known:
            hint = did_you_mean(name, known) or f"use one of: {', '.join(known)}, or a Precision."
            raise MeshwrightError(f"unknown precision {name!r}.", hint=hint)
        return known[name]

    @classmethod
    def with_fp8(cls, name: str, fields: Mapping[str, Any]) -> Precision:
        """Returns a precision by name, with fields of its `Fp8`; those that are None keep their defaults.

        Example:
            >>> Precision.with_fp8("fp8", {"scaling": "current", "matmuls": None}).fp8.scaling
            'current'
        """
        given = {field: value for field, value in fields.items() if value is not None}
        if given and name != "fp8":
            options = ", ".join(f"--fp8-{field.replace('_', '-')}" for field in given)
            one = len(given) == 1
            raise MeshwrightError(
                f"{options} {'has' if one else 'have'} no effect without --precision fp8.",
                hint=f"add --precision fp8, or leave {'it' if one else 'them'} out (on resume, pass None).",
            )
        found = cls.named(name)
        return replace(found, fp8=Fp8.from_fields(given)) if given else found

    def stored(self, params: PyTree, *, keep: str | Sequence[str] = ()) -> PyTree:
        """Casts parameters to the dtype in which they are stored, except those with a match of a regex in `keep`."""
        patterns = [compile_pattern(text) for text in ([keep] if isinstance(keep, str) else keep)]
        leaves = [
            leaf.value.astype(self.params)
            if is_float(leaf.value.dtype) and not any(pattern.matches(leaf.name) for pattern in patterns)
            else leaf.value
            for leaf in named_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def compute_dtypes(self, params: PyTree) -> PyTree:
        """Returns the dtype of each parameter in the loss."""
        keep = re.compile(self.keep) if self.keep else None
        dtypes = [
            leaf.value.dtype
            if not is_float(leaf.value.dtype) or (keep is not None and keep.search(leaf.name))
            else self.compute
            for leaf in named_leaves(params)
        ]
        return jax.tree.unflatten(jax.tree.structure(params), dtypes)
