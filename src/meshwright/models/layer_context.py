"""Inputs and operations of a layer of a language model: dense layers, norms and mixing of tokens on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import is_manual, ways_along
from meshwright.mesh.current import current_mesh
from meshwright.models.attention import attention
from meshwright.models.execution import PROJECTION, Execution
from meshwright.models.mlstm_chunks import gated_mlstm, mlstm_chunkwise
from meshwright.models.ops import swiglu
from meshwright.parallel.dropout import dropout
from meshwright.parallel.kernels.gradient_kernels import residual_norm
from meshwright.parallel.lora.low_rank import LowRankWeight, low_rank_columns, low_rank_rows
from meshwright.parallel.tensor import fused_column_dense, row_dense, sequence_norm
from meshwright.types import PRNGKeyArray, PyTree


@dataclass(frozen=True)
class Context:
    """Inputs of a layer besides its parameters, with dense layers, norms and mixing of tokens for the current mesh.

    Layers mix tokens only with `attend`, `remember` and `remember_gated`, so that `meshwright.generate` can add a cache
    to any model.
    """

    run: Execution
    segment_ids: Any
    shared: Any
    key: Any
    dropout_rate: float
    norm_eps: float
    number: Any = None

    def norm(self, h: Any, scale: Any) -> Any:
        return sequence_norm(h, scale, axis=self.run.tensor(), eps=self.norm_eps)

    def residual_norm(self, h: Any, scale: Any) -> tuple[Any, Any]:
        """Returns `h` for the residual stream, and its norm; one pass computes the sum of both gradients."""
        return residual_norm(h, scale, axis=self.run.tensor(), eps=self.norm_eps, kernels=self.run.kernels)

    def columns(self, h: Any, *weights: Any, biases: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Returns `h @ w`, plus a bias if given, for each weight, with features split; all share one gather of `h`."""
        run, axis = self.run, self.run.tensor()
        gathers = run.sequence_parallel and axis is not None

        def dense(h: Any, weights: Sequence[Any], *, is_narrow: bool) -> Sequence[Any]:
            # Kernels are not made for matmuls as narrow as an adapter's rank.
            kernels = False if is_narrow else run.kernels
            options: Any = {"save_gathered": run.save_gathered, "kernels": kernels} if gathers else {}
            bs = None if is_narrow else biases
            return fused_column_dense(h, weights, bs, axis=axis, sequence_parallel=run.sequence_parallel, **options)

        ys = low_rank_columns(dense, h, weights, drop=functools.partial(self._drop_input, spec=P(None, axis)))
        return tuple(checkpoint_name(y, PROJECTION) for y in ys)

    def rows(self, y: Any, weight: Any) -> Any:
        """Returns `y @ w` for split features, with the sequence split again."""
        run, axis = self.run, self.run.tensor()

        def dense(y: Any, weights: Sequence[Any], *, is_narrow: bool) -> Sequence[Any]:
            options: Any = {"kernels": False if is_narrow else run.kernels} if run.sequence_parallel else {}
            return [row_dense(y, weights[0], axis=axis, sequence_parallel=run.sequence_parallel, **options)]

        h = low_rank_rows(dense, y, weight, drop=functools.partial(self._drop_input, spec=P(None, None, axis)))
        arrives = run.sequence_parallel and ways_along(axis, who="rows") > 1
        if chip_family(current_mesh()) == "gpu" and not arrives:
            # Keep the residual addition out of the matmul: XLA would copy the residual so that cuBLAS can add to it.
            h = lax.optimization_barrier(h)
        return checkpoint_name(h, PROJECTION)

    def _drop_input(self, x: Any, weight: LowRankWeight, *, spec: P) -> Any:
        if weight.key is None:
            return x
        axis = self.run.tensor()
        # Features are split in any case, the rows of a sequence only if it is split between blocks.
        split = axis is not None and is_manual(axis) and (len(spec) == 3 or self.run.sequence_parallel)
        return dropout(x, weight.dropout, weight.key, spec=spec if split else P())

    @jax.named_scope("mlp")
    def feed_forward(self, params: PyTree, x: Any, *, gated: Callable[[Any, Any], Any] = swiglu) -> Any:
        """Returns `gated(x @ gate, x @ up) @ down`; the default is `silu(x @ gate) * (x @ up)`."""
        gate, up = self.columns(x, params["gate"], params["up"])
        return self.rows(gated(gate, up), params["down"])

    def attend(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Returns causal attention `[B, S, H, K]`; with a cache, also to the tokens before.

        Args:
            options: options of `meshwright.models.attention` that belong to the layer: scale, window, soft cap.
        """
        run = self.run
        return attention(
            q,
            k,
            v,
            segment_ids=self.segment_ids,
            implementation=run.attention,
            max_segments=run.max_segments,
            **options,
        )

    def remember(self, q: Any, k: Any, v: Any, i: Any, f: Any, *, chunk_size: int | None) -> Any:
        """Returns the outputs `[B, S, H, V]` of an mLSTM; with a cache, it continues from the state before."""
        return mlstm_chunkwise(
            q, k, v, i, f, chunk_size=chunk_size, segment_ids=self.segment_ids, kernels=self.run.kernels
        )

    def remember_gated(
        self, q: Any, k: Any, v: Any, i: Any, f: Any, gate: Any, scale: Any, *, chunk_size: int | None
    ) -> Any:
        """Returns the RMSNorm of each head of `remember` times `sigmoid(gate)`, `[B, S, H * V]`."""
        return gated_mlstm(
            q,
            k,
            v,
            i,
            f,
            gate,
            scale,
            eps=self.norm_eps,
            chunk_size=chunk_size,
            segment_ids=self.segment_ids,
            kernels=self.run.kernels,
        )

    def drop(self, h: Any, site: int) -> Any:
        """Applies dropout if there is a key; `site` distinguishes calls within a layer."""
        if self.key is None:
            return h
        axis = self.run.tensor()
        split = axis is not None and is_manual(axis) and self.run.sequence_parallel
        return dropout(h, self.dropout_rate, jax.random.fold_in(self.key, site), spec=P(None, axis) if split else P())


def scaled_normal(key: PRNGKeyArray, fan_in: int, *rest: int, scale: float = 1.0) -> Any:
    """Returns a weight `[fan_in, ...]` whose product has the variance of its input, times `scale**2`."""
    return jax.random.normal(key, (fan_in, *rest)) * (scale / fan_in**0.5)


def init_mlp(k_gate: Any, k_up: Any, k_down: Any, *, d_model: int, d_ff: int, scale: float) -> PyTree:
    """Returns the weights of `Context.feed_forward`, with its output scaled by `scale`."""
    return {
        "gate": scaled_normal(k_gate, d_model, d_ff),
        "up": scaled_normal(k_up, d_model, d_ff),
        "down": scaled_normal(k_down, d_ff, d_model, scale=scale),
    }
