"""Attention of cuDNN in programs that are compiled for GPUs where there is no cuDNN.

XLA asks the library itself how its attention is run, so a program that uses it cannot be compiled without. What takes
its place here has the same operands, results and memory, and none of its matmuls: it is for reading off memory and
communication, and never runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp

_VERSION = 91900  # what the H200 that we measured on has: 9.19


@contextlib.contextmanager
def assumed_cudnn() -> Iterator[None]:
    """While it is open, JAX traces as if the newest cuDNN and an H200 were there."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    with (
        mock.patch.object(cudnn, "check_cudnn_version", return_value=_VERSION),
        mock.patch.object(cudnn, "check_compute_capability", return_value=True),
    ):
        yield


def stand_in_for_cudnn() -> None:
    """Makes attention of cuDNN compile to operations of the same memory, for good: for processes that only compile."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn
    from jax._src.interpreters import mlir

    forward, backward = cudnn._dot_product_attention_fwd_p_wrapper, cudnn._dot_product_attention_bwd_p_wrapper
    mlir.register_lowering(forward, mlir.lower_fun(_forward, multiple_results=True), platform="cuda")
    mlir.register_lowering(backward, mlir.lower_fun(_backward, multiple_results=True), platform="cuda")


def _forward(query: Any, key: Any, value: Any, *rest: Any, layout: int, is_training: bool, **_: Any) -> list[Any]:
    mixed = jnp.sum(key, dtype=jnp.float32) + jnp.sum(value, dtype=jnp.float32)
    out = (query * mixed.astype(query.dtype)).astype(query.dtype)
    if not is_training:
        return [out]
    # The logarithm of the softmax's denominator, [B, N, T], for each of a row's documents.
    stats = jnp.sum(query, axis=-1, dtype=jnp.float32) + mixed
    by_heads = layout == 1  # [B, N, T, H] instead of [B, T, N, H]
    _bias, _q_lengths, _kv_lengths, q_offsets, *_others = rest
    documents = q_offsets.shape[1] - 1 if q_offsets.ndim == 2 else 1
    return [out, jnp.repeat(stats if by_heads else jnp.swapaxes(stats, 1, 2), documents, axis=0)]


def _backward(query: Any, key: Any, value: Any, *rest: Any, variadic_args: Any, **_: Any) -> list[Any]:
    bias, *_unused, stats, out, dout = rest
    mixed = jnp.sum(stats) + jnp.sum(out, dtype=jnp.float32) + jnp.sum(dout, dtype=jnp.float32)
    grads = [(leaf * mixed.astype(leaf.dtype)).astype(leaf.dtype) for leaf in (query, key, value)]
    _, has_dbias = variadic_args
    return [*grads, bias * mixed.astype(bias.dtype)] if has_dbias else grads
