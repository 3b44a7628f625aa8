"""Weights whose matmuls run in fp8: a parameter together with its amaxes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.parallel.fp8.casting import Scaling
from meshwright.tree import flatten_tree, named_leaves
from meshwright.types import PyTree


class CastWeight(NamedTuple):
    """A weight in fp8, cast before the minibatches that use it.

    Args:
        value: the weight divided by its scale, which follows from its amax.
        turned: its transpose, or None if XLA transposes it.
    """

    value: Any
    turned: Any = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "amaxes", "cast"],
    meta_fields=["scaling", "name", "is_gathered", "stages", "kernels"],
)
@dataclass(frozen=True)
class Fp8Weight:
    """A weight `[K, N]` that `column_dense`, `fused_column_dense` and `row_dense` multiply in fp8.

    Args:
        value: the weight, in the dtype of the products.
        amaxes: float32 `[3]`: the amaxes that give the scales of the input, the weight and the output's gradient. Its
            *gradient* is the amaxes of this step, on this device. The weight's amax must be its own. Gradients of
            several uses add up, so amaxes of a weight that a loss uses twice can be twice the largest, which costs a
            bit of the scale.
        scaling: "delayed": scales come from `amaxes`. "current": those of inputs and gradients come from the tensors.
        name: path of the parameter, which names its matmuls in compiled programs.
        is_gathered: whether the weight was gathered for this use. Its gradient then casts it again, so that no copy
            in fp8 outlives it.
        stages: the axis of the pipeline that multiplies by this weight, if any.
        kernels: see `Execution`.
        cast: the weight in fp8. If given, `value` is not read, and only receives the gradient.

    Example:
        >>> import jax.numpy as jnp, meshwright as mw
        >>> w = mw.parallel.Fp8Weight(jnp.full((16, 16), 0.3), jnp.array([2.0, 0.3, 1.0]))
        >>> float(mw.parallel.column_dense(jnp.ones((4, 16)), w, axis=None)[0, 0])  # 0.3 becomes 0.3125
        5.0
    """

    value: Any
    amaxes: Any
    scaling: Scaling = "delayed"
    name: str = "weight"
    is_gathered: bool = False
    stages: str | None = None
    kernels: bool | None = None
    cast: CastWeight | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def ndim(self) -> int:
        return int(self.value.ndim)

    @property
    def dtype(self) -> Any:
        return self.value.dtype


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=["scaling"])
@dataclass(frozen=True)
class Amaxes:
    """The amaxes of a model's fp8 matmuls, which a step passes to a loss that takes `fp8=`.

    Args:
        tree: nested dicts with the paths of parameters. A leaf is float32 `[..., 3]`, stacked like its parameter.
        scaling: see `Fp8Weight`.
    """

    tree: Mapping[str, Any]
    scaling: Scaling = "delayed"

    def weights(
        self, params: PyTree, *, prefix: str = "", casts: Mapping[str, Any] | None = None, **options: Any
    ) -> PyTree:
        """Returns the parameters with an `Fp8Weight` in place of each one that has amaxes.

        Args:
            casts: nested dicts with the `CastWeight` of each of these parameters (default: they are cast when used).

        Example:
            >>> import jax.numpy as jnp
            >>> params = {"up": jnp.ones((16, 16)), "norm": jnp.ones(16)}
            >>> found = Amaxes({"up": jnp.ones(3)}).weights(params)
            >>> type(found["up"]).__name__, found["norm"].shape
            ('Fp8Weight', (16,))
        """
        known = flatten_tree(self.tree, sep="/")
        given = flatten_tree(casts, is_leaf=lambda node: isinstance(node, CastWeight), sep="/")

        def wrap(name: str, leaf: Any) -> Any:
            if name not in known:
                return leaf
            path = f"{prefix}/{name}" if prefix else name
            return Fp8Weight(leaf, known[name], scaling=self.scaling, name=path, cast=given.get(name), **options)

        structure: Any = jax.tree.structure(params)
        return structure.unflatten([wrap(leaf.name, leaf.value) for leaf in named_leaves(params)])

    def per_microbatch(self, num_microbatches: int) -> Amaxes:
        """Returns a copy for each microbatch of a pipeline, whose gradients are combined by maximum.

        The backward pass of a pipeline adds up the gradients of its ticks. Each copy is used at one tick per layer, so
        its sum is the amaxes of one microbatch.

        Example:
            >>> import jax.numpy as jnp
            >>> copies = Amaxes({"up": jnp.ones((2, 3))}).per_microbatch(4)
            >>> copies.tree["up"].shape, copies.of_microbatch(1).tree["up"].shape
            ((2, 4, 3), (2, 3))
        """
        return replace(self, tree=jax.tree.map(lambda leaf: _copies(leaf, num_microbatches), self.tree))

    def of_microbatch(self, index: Any) -> Amaxes:
        """Returns the copy of one microbatch, from those of `per_microbatch`."""
        take = functools.partial(lax.dynamic_index_in_dim, index=index, axis=-2, keepdims=False)
        return replace(self, tree=jax.tree.map(take, self.tree))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(leaf: Any, count: int) -> Any:
    return jnp.broadcast_to(leaf[..., None, :], (*leaf.shape[:-1], count, leaf.shape[-1]))


_copies.defvjp(lambda leaf, count: (_copies(leaf, count), None), lambda count, _, found: (found.max(axis=-2),))
