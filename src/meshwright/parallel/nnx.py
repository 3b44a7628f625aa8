"""Tensor-parallel NNX modules: the functions of `meshwright.parallel` with global parameters.

Create a module outside of `local_map`; its parameters are global arrays and do not depend on the mesh. Call it directly
on one device or in a `jit` program under a mesh. For the local view, call `nnx.split` outside of `local_map` and
`nnx.merge` inside. `param_specs` returns the specs for that, and for placing the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshwright.errors import PlacementError
from meshwright.parallel.tensor import GatherOptions, column_dense, fused_column_dense, row_dense, sequence_norm
from meshwright.parallel.vocabulary import vocab_cross_entropy, vocab_embed
from meshwright.specs import round_up

Initializer = Callable[..., Any]
LECUN = nnx.initializers.lecun_normal()
ZEROS = nnx.initializers.zeros_init()
# Embeddings are looked up, not multiplied, so their variance should not depend on the vocabulary size.
UNIT = nnx.initializers.normal(1.0)


def param_specs(module_or_state: Any) -> Any:
    """Returns a `PartitionSpec` for each parameter of a module, in the structure of its `nnx.state`.

    Parameters of modules from elsewhere are replicated.

    Example:
        >>> layer = RowDense(8, 4, axis="tp", rngs=nnx.Rngs(0))
        >>> dict(param_specs(layer))
        {'bias': P(), 'kernel': P('tp', None)}
    """
    state = nnx.state(module_or_state) if isinstance(module_or_state, nnx.Module) else module_or_state
    return nnx.map_state(lambda _, variable: variable.get_metadata().get("spec", P()), state)


class _Dense(nnx.Module):
    """A dense layer whose kernel is split along `split_dim`."""

    split_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: str,
        use_bias: bool = True,
        sequence_parallel: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        rngs: nnx.Rngs,
        **overlap: Unpack[GatherOptions],
    ) -> None:
        by_columns = self.split_dim == 1
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = nnx.Param(kernel, spec=P(None, axis) if by_columns else P(axis, None))
        # Draw the key even without a bias, so that use_bias does not change the other layers.
        bias_key, bias_spec = rngs.params(), P(axis) if by_columns else P()
        self.bias = nnx.Param(bias_init(bias_key, (out_features,), param_dtype), spec=bias_spec) if use_bias else None
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.dtype = dtype
        self.overlap = tuple(overlap.items())

    def weights(self) -> tuple[Any, Any]:
        """Returns the kernel in the compute dtype, and the bias."""
        return _in(self.dtype, self.kernel[...]), None if self.bias is None else self.bias[...]

    def options(self) -> dict[str, Any]:
        return {"axis": self.axis, "sequence_parallel": self.sequence_parallel, **dict(self.overlap)}


class ColumnDense(_Dense):
    """A dense layer with its outputs split over a mesh axis: `kernel [in, out]`, `bias [out]`; see `column_dense`.

    Args:
        dtype: compute dtype of inputs and kernel (default: no cast).
        overlap: options of `gather_matmul`.

    Example:
        >>> layer = ColumnDense(4, 8, axis="tp", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16, 4))).shape
        (2, 16, 8)
    """

    split_dim = 1

    def __call__(self, x: Any) -> Any:
        return column_dense(_in(self.dtype, x), *self.weights(), **self.options())


class RowDense(_Dense):
    """A dense layer with its inputs split over a mesh axis: `kernel [in, out]`, `bias [out]`; see `row_dense`.

    Args:
        dtype: compute dtype of inputs and kernel (default: no cast).
        overlap: options of `matmul_scatter`.

    Example:
        >>> layer = RowDense(8, 4, axis="tp", use_bias=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16, 8))).shape
        (2, 16, 4)
    """

    split_dim = 0

    def __call__(self, x: Any) -> Any:
        return row_dense(_in(self.dtype, x), *self.weights(), **self.options())


class FusedColumnDense(nnx.Module):
    """Several named `ColumnDense` layers that share one all-gather of their input.

    Args:
        out_features: output features of each layer, by name.
        options: options of `ColumnDense`, the same for all layers.

    Example:
        >>> layer = FusedColumnDense(4, {"q": 16, "k": 8, "v": 8}, axis="tp", rngs=nnx.Rngs(0))
        >>> q, k, v = layer(jnp.ones((2, 16, 4)))
        >>> q.shape, layer.k.kernel.shape
        ((2, 16, 16), (4, 8))
    """

    def __init__(self, in_features: int, out_features: Mapping[str, int], **options: Any) -> None:
        self.names = tuple(out_features)
        taken = [name for name in out_features if hasattr(self, name) or not name.isidentifier()]
        if taken or not out_features:
            raise PlacementError(
                f"FusedColumnDense got layers named {', '.join(map(repr, out_features)) or 'nothing'}.",
                hint="use identifiers that a module does not use itself, e.g. q, k, v.",
            )
        for name, features in out_features.items():
            setattr(self, name, ColumnDense(in_features, features, **options))

    def __call__(self, x: Any) -> tuple[Any, ...]:
        layers = [getattr(self, name) for name in self.names]
        kernels, biases = zip(*(layer.weights() for layer in layers), strict=True)
        return fused_column_dense(_in(layers[0].dtype, x), kernels, biases, **layers[0].options())


class SequenceNorm(nnx.Module):
    """RMSNorm, or LayerNorm with `center` and `use_bias`, on rows split over a mesh axis; see `sequence_norm`.

    Example:
        >>> SequenceNorm(4, axis="tp", rngs=nnx.Rngs(0))(jnp.full((2, 4), 3.0)).round(3).tolist()[0]
        [1.0, 1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        axis: str,
        eps: float = 1e-6,
        center: bool = False,
        use_bias: bool = False,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype), spec=P())
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype), spec=P()) if use_bias else None
        self.axis = axis
        self.eps = eps
        self.center = center

    def __call__(self, x: Any) -> Any:
        bias = None if self.bias is None else self.bias[...]
        return sequence_norm(x, self.scale[...], bias, axis=self.axis, eps=self.eps, center=self.center)


class VocabEmbed(nnx.Module):
    """Token embeddings with the vocabulary split over a mesh axis: `embedding [V, D]`; see `vocab_embed`.

    Args:
        pad_to_multiple_of: round the rows of the table up to a multiple of this (default: 1). Choose one that every
            axis size you plan to use divides. The added rows are never looked up.

    Example:
        >>> embed = VocabEmbed(50, 4, axis="tp", pad_to_multiple_of=8, rngs=nnx.Rngs(0))
        >>> embed(jnp.array([[0, 49]])).shape, embed.embedding.shape
        ((1, 2, 4), (56, 4))
    """

    def __init__(
        self,
        vocab_size: int,
        num_features: int,
        *,
        axis: str,
        pad_to_multiple_of: int = 1,
        sequence_parallel: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Initializer = UNIT,
        rngs: nnx.Rngs,
    ) -> None:
        shape = (round_up(vocab_size, pad_to_multiple_of), num_features)
        self.embedding = nnx.Param(embedding_init(rngs.params(), shape, param_dtype), spec=P(axis, None))
        self.vocab_size = vocab_size
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.dtype = dtype

    def _options(self) -> dict[str, Any]:
        return {"axis": self.axis, "sequence_parallel": self.sequence_parallel, "vocab_size": self.vocab_size}

    def __call__(self, ids: Any) -> Any:
        return vocab_embed(ids, _in(self.dtype, self.embedding[...]), **self._options())

    def loss(self, x: Any, targets: Any, *, mask: Any = None) -> Any:
        """Returns each token's cross-entropy, with the table as the tied head; see `vocab_cross_entropy`."""
        head = _in(self.dtype, self.embedding[...]).T
        return vocab_cross_entropy(_in(self.dtype, x), head, targets, mask=mask, **self._options())


class VocabHead(nnx.Module):
    """The output layer and its loss, with the vocabulary split over a mesh axis: `kernel [D, V]`.

    Call it for each token's loss in float32, which is zero if `mask` is False; see `vocab_cross_entropy`.

    Args:
        pad_to_multiple_of: see `VocabEmbed`. The added columns get no probability.

    Example:
        >>> head = VocabHead(4, 50, axis="tp", pad_to_multiple_of=8, rngs=nnx.Rngs(0))
        >>> bool(jnp.allclose(head(jnp.zeros((2, 16, 4)), jnp.zeros((2, 16), int)), jnp.log(50.0)))
        True
    """

    def __init__(
        self,
        num_features: int,
        vocab_size: int,
        *,
        axis: str,
        pad_to_multiple_of: int = 1,
        sequence_parallel: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = LECUN,
        rngs: nnx.Rngs,
    ) -> None:
        shape = (num_features, round_up(vocab_size, pad_to_multiple_of))
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), spec=P(None, axis))
        self.vocab_size = vocab_size
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.dtype = dtype

    def __call__(self, x: Any, targets: Any, *, mask: Any = None) -> Any:
        return vocab_cross_entropy(
            _in(self.dtype, x),
            _in(self.dtype, self.kernel[...]),
            targets,
            axis=self.axis,
            mask=mask,
            sequence_parallel=self.sequence_parallel,
            vocab_size=self.vocab_size,
        )


def _in(dtype: Any, x: Any) -> Any:
    return x if dtype is None else x.astype(dtype)
