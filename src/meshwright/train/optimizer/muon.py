"""Muon on any mesh: matrices step along their orthogonalized momentum, other parameters take AdamW steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshwright.errors import MeshwrightError
from meshwright.train.optimizer.newton_schulz import DION_COEFFICIENTS
from meshwright.train.optimizer.orthogonalize import check_iterations, orthogonalize
from meshwright.tree import named_leaves, named_tree_map
from meshwright.types import PyTree

NOT_MATRICES = (
    r"(^|/|_)((un)?embed(der|dings?)?|embed_tokens|wte|wpe|pos|positions?|head|bias|scale|router)(_?\d+)?(/|$)"
    r"|norm(_?\d+)?(/|$)"
)
"""Regex of the paths of parameters that take AdamW steps, although they may have two dims."""
STACKED = r"^layers/(?!\d+/)"
"""Regex of the paths of parameters that are stacked over layers, as in Meshwright's models."""


class MuonState(NamedTuple):
    """The momentum of the matrices, and the number of steps."""

    count: Any
    mu: PyTree


def muon(
    learning_rate: Any,
    *,
    beta: float = 0.95,
    num_iterations: int = 4,
    weight_decay: float = 0.0,
    weight_decay_mask: Any = None,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.95,
    rms: float | None = 0.2,
    is_matrix: Callable[[str, Any], bool] | None = None,
    dtype: Any = None,
    coefficients: Sequence[Sequence[float]] = DION_COEFFICIENTS,
) -> optax.GradientTransformationExtraArgs:
    """Returns the Muon optimizer with the updates of `optax.contrib.muon`; `make_train_step` tells it the layout.

    Args:
        learning_rate: a number, or a function from the step.
        beta: decay of the momentum (with Nesterov's correction).
        num_iterations: number of Newton-Schulz iterations.
        weight_decay, weight_decay_mask: as for `optax.adamw`, for all parameters.
        adam_beta1, adam_beta2: of the parameters that are not matrices.
        rms: size of an update relative to `sqrt(max(rows, columns))`; 0.2 suits learning rates tuned for AdamW. None
            scales by `sqrt(max(1, columns / rows))` instead.
        is_matrix: which parameters are orthogonalized, as a function of name and leaf; leading dims count matrices
            (default: `is_hidden_matrix`, which chooses two dims, or three below `layers/`).
        dtype: dtype of the iterations and of the values sent (default: bfloat16 on GPUs and TPUs, float32 on CPUs). On
            GPUs, iterations on bfloat16 values run in float16.
        coefficients: three numbers for each iteration, see `newton_schulz`; the last are used again if there are more
            iterations. The defaults are the first four triples of optax's `ns_coeffs="dion"`. They are one
            iteration less than optax's defaults, which are `num_iterations=5` with `newton_schulz.COEFFICIENTS`, and
            reached losses 0.01 above to 0.02 below at the two lower of three rates (`benchmarks/results/muon.md`).

    Example:
        >>> params = {"up": jnp.eye(2, 4) * jnp.array([[1.0], [5.0]]), "norm": jnp.ones(4)}
        >>> optimizer = muon(0.1, rms=None)
        >>> updates, _ = optimizer.update(params, optimizer.init(params), params)
        >>> largest, smallest = jnp.linalg.svd(updates["up"], compute_uv=False)
        >>> bool(largest < 1.3 * smallest)  # the gradient's are a factor of 5 apart
        True
    """
    if not 0 <= beta < 1:
        raise MeshwrightError(f"beta must be at least 0 and below 1; got {beta}.", hint="use 0.95.")
    if rms is not None and not 0 < rms < math.inf:
        raise MeshwrightError(f"rms must be above 0; got {rms}.", hint="use 0.2, or None.")
    check_iterations(num_iterations, dtype, coefficients)
    if is_matrix is not None and not callable(is_matrix):
        raise MeshwrightError(
            f"is_matrix is {is_matrix!r}.", hint="pass a function from the name and the leaf to True or False."
        )
    chosen = is_matrix or is_hidden_matrix

    def label(name: str, leaf: Any) -> str:
        if not chosen(name, leaf):
            return "adam"
        if leaf.ndim < 2:
            raise MeshwrightError(
                f"is_matrix chose `{name}`, which has {leaf.ndim} dims.", hint="return True only for leaf.ndim > 1."
            )
        return "muon"

    def labels(params: PyTree) -> PyTree:
        return named_tree_map(label, params, sep="/")

    orthogonal = optax.chain(
        scale_by_muon(beta=beta, num_iterations=num_iterations, rms=rms, dtype=dtype, coefficients=coefficients),
        optax.add_decayed_weights(weight_decay, mask=weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.adamw(
        learning_rate,
        b1=adam_beta1,
        b2=adam_beta2,
        weight_decay=weight_decay,
        mask=weight_decay_mask,
        nesterov=True,  # as in optax.contrib.muon
    )
    return optax.partition({"muon": orthogonal, "adam": adam}, labels)


def is_hidden_matrix(name: str, leaf: Any) -> bool:
    """Whether Muon orthogonalizes a parameter by default.

    It has two dims, or three if it is stacked over layers, and no part of its path is an embedding (of tokens or of
    positions), a head, a norm, a bias, a scale or a router. Kernels of other ranks, such as Flax's [features, heads,
    head size], would have to be reshaped first.

    Example:
        >>> matrix, kernel = jnp.ones((8, 8)), jnp.ones((8, 2, 4))
        >>> [is_hidden_matrix(name, matrix) for name in ("up", "multi_head_attention/q", "lm_head", "embed/table")]
        [True, True, False, False]
        >>> [is_hidden_matrix(name, kernel) for name in ("layers/up", "attention/query/kernel")]
        [True, False]
    """
    ranks = (2, 3) if re.search(STACKED, name) else (2,)
    return leaf.ndim in ranks and re.search(NOT_MATRICES, name, re.IGNORECASE) is None


def orthogonalized_names(opt_state: PyTree) -> list[str]:
    """Returns the paths of the parameters that Muon orthogonalizes, from the state of an optimizer.

    Example:
        >>> params = {"up": jnp.ones((8, 8)), "norm": jnp.ones(8)}
        >>> orthogonalized_names(muon(1e-3).init(params)), orthogonalized_names(optax.sgd(1e-3).init(params))
        (['up'], [])
    """

    def is_state(node: Any) -> bool:
        return isinstance(node, MuonState)

    states = [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]
    return [leaf.name for state in states for leaf in named_leaves(state.mu)]


def scale_by_muon(
    *,
    beta: float = 0.95,
    num_iterations: int = 4,
    rms: float | None = None,
    dtype: Any = None,
    coefficients: Sequence[Sequence[float]] = DION_COEFFICIENTS,
) -> optax.GradientTransformationExtraArgs:
    """Returns the part of `muon` for matrices, without learning rate and weight decay.

    Its update takes `specs`, the `PartitionSpec` of each parameter on the current mesh; without them, XLA gathers the
    matrices first.
    """

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: PyTree, state: MuonState, params: PyTree = None, *, specs: PyTree = None, **extra: Any
    ) -> tuple[PyTree, MuonState]:
        del params, extra
        mu = jax.tree.map(lambda old, grad: beta * old + (1 - beta) * grad, state.mu, updates)
        count = state.count + 1
        ahead = jax.tree.map(
            lambda old, grad: beta * old / (1 - beta ** (count + 1)) + (1 - beta) * grad / (1 - beta**count),
            mu,
            updates,
        )
        found = orthogonalize(ahead, specs=specs, num_iterations=num_iterations, dtype=dtype, coefficients=coefficients)
        return jax.tree.map(lambda leaf: leaf * _size(leaf, rms), found), MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)


def _size(leaf: Any, rms: float | None) -> float:
    rows, columns = leaf.shape[-2:]
    return math.sqrt(max(1, columns / rows)) if rms is None else rms * math.sqrt(max(rows, columns))
