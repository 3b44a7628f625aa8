"""Chunks of the chunked loss: every row once, for any shape."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.parallel import linear_cross_entropy
from meshwright.parallel.logit_chunks import RowChunks

from .losses import DIM, VOCAB, sums_and_grads, values


def test_head_gradient_is_exact_over_many_chunks():
    """In bfloat16, adding 1024 halves one by one stops at 128."""
    x, head, targets = jnp.ones((1024, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16), jnp.zeros(1024, int)
    grad = jax.jit(jax.grad(lambda head: linear_cross_entropy(x, head, targets, chunk_rows=1).total))(head)
    np.testing.assert_array_equal(np.asarray(grad, np.float32), [[-512, 512]])


@pytest.mark.parametrize(("shape", "chunk_rows"), [((7,), 2), ((3, 1, 5), 6), ((11, 3), 4), ((2, 0), None)])
def test_any_number_of_leading_dims(shape, chunk_rows):
    rng = np.random.default_rng(1)
    x, head = rng.standard_normal((*shape, DIM), np.float32), values()["head"]
    targets = rng.integers(0, VOCAB, shape)
    sums, grads = sums_and_grads(
        lambda x, head, t, w: linear_cross_entropy(x, head, t, weights=w, chunk_rows=chunk_rows),
        x, head, targets, np.ones(shape, np.float32),
    )  # fmt: skip
    log_p, one_hot = jax.nn.log_softmax(x @ head), np.eye(VOCAB, dtype=np.float32)[targets]
    np.testing.assert_allclose(sums.count, targets.size)
    np.testing.assert_allclose(sums.total, -(log_p * one_hot).sum(), rtol=1e-6)
    np.testing.assert_allclose(grads[0], (np.exp(log_p) - one_hot) @ head.T, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "chunk_rows"), [((5,), 9), ((5,), 2), ((3, 4), 6), ((3, 4), 7), ((3, 4), 2), ((2, 3, 5), 12)]
)
def test_chunks_hold_every_row_once_within_the_limit(shape, chunk_rows):
    rows = RowChunks.of(shape, 100, chunk_rows)
    array = np.arange(1.0, math.prod(shape) * 2 + 1, dtype=np.float32).reshape(*shape, 2)
    chunks = np.asarray(rows.cut(jnp.asarray(array), features=True))
    assert math.prod(chunks.shape[1:-1]) <= chunk_rows
    assert sorted(chunks[chunks > 0]) == sorted(array.flatten())
    np.testing.assert_array_equal(rows.join(jnp.asarray(chunks)), array)


def test_default_chunk_is_512_mib_or_2048_rows():
    for num_columns, rows in ((131072, 2048), (32768, 4096), (1024, 131072)):
        found = RowChunks.of((16, 65536), 4 * num_columns, None)
        assert found.num_chunks == 16 * 65536 // rows
    assert RowChunks.of((2, 16), 4 * 131072, None).num_chunks == 1


def test_default_chunks_are_even_if_few_more_make_them_so():
    found = RowChunks.of((4, 8192), 2 * 50304, None)  # seven would be enough, but leave rows over
    assert (found.num_chunks, found.per_chunk) == (8, 1024)
    assert RowChunks.of((1, 2 * 8191), 4 * 131072, None).num_chunks == 8  # no number from 8 to 10 divides
