"""Split vocabularies with bad tokens, masks, padding, huge logits and frequent tokens."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel import linear_cross_entropy, local_map, vocab_cross_entropy, vocab_embed

from .layers import DOWN, UP, VOCAB, R, cross_entropy, values
from .one_device import close, mesh_of


@pytest.mark.parametrize("ways", [1, 4])
def test_tokens_outside_the_vocabulary_give_nan_in_every_view(ways):
    v = values()
    ids = jnp.array([[0, VOCAB - 1, VOCAB, -1, -100, 3, 10**6, 7]])
    bad = np.array([False, False, True, True, True, False, True, False])

    def both(ids, table, head):
        x = vocab_embed(ids, table, axis="tp")
        return x, vocab_cross_entropy(jnp.nan_to_num(x), head, ids, axis="tp")

    args = ids, v["table"], v["head"]
    with jax.set_mesh(mesh_of(ways)):
        globally = jax.jit(both)(*args)
    locally = local_map(both, mesh=mesh_of(ways), in_specs=(P(), DOWN, UP), out_specs=(R, P()))
    for x, loss in (globally, jax.jit(locally)(*args), both(*args)):
        np.testing.assert_array_equal(np.isnan(x[0]).all(-1), bad)
        np.testing.assert_array_equal(np.isnan(x[0]).any(-1), bad)
        np.testing.assert_array_equal(np.isnan(loss[0]), bad)


def test_masked_tokens_ignore_their_target_and_get_no_gradient():
    v = values()
    targets = jnp.where(v["mask"], v["targets"], -100)

    def total(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", mask=v["mask"]).sum()

    true = jax.grad(lambda *args: cross_entropy(*args, v["targets"], v["mask"]).sum(), argnums=(0, 1))(
        v["x"], v["head"]
    )
    with jax.set_mesh(mesh_of(4)):
        ours = jax.jit(jax.grad(total, argnums=(0, 1)))(v["x"], v["head"], targets)
    for got, want in zip(ours, true, strict=True):
        close(got, want, 2e-6, "gradient")
    assert not np.asarray(ours[0])[~np.asarray(v["mask"])].any()


@pytest.mark.parametrize("sp", [True, False])
def test_padded_columns_get_no_probability(sp):
    """33 tokens on 8 devices are padded to 40, so the last device has only padding."""
    v = values()
    head, targets = jnp.asarray(v["head"]).at[:, 33:].set(50.0), v["targets"] % 33

    def total(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", sequence_parallel=sp, vocab_size=33).sum()

    want, true = jax.value_and_grad(lambda *args: cross_entropy(*args, targets).sum(), argnums=(0, 1))(
        v["x"], head[:, :33]
    )
    mapped = local_map(total, mesh=mesh_of(8), in_specs=(P(None, "tp") if sp else P(), UP, P()), out_specs=P())
    got, ours = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(v["x"], head, targets)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    close(ours[0], true[0], 2e-6, "x")
    close(ours[1][:, :33], true[1], 2e-6, "head")
    assert not ours[1][:, 33:].any()


@pytest.mark.parametrize("ways", [1, 4])
def test_frequent_tokens_are_summed_exactly_in_bfloat16(ways):
    """In bfloat16, adding 1024 ones one by one stops at 256."""
    ids, table = jnp.full((1, 1024), 5), jnp.zeros((8, 2), jnp.bfloat16)
    with jax.set_mesh(mesh_of(ways)):
        grad = jax.jit(jax.grad(lambda t: vocab_embed(ids, t, axis="tp").sum(dtype=jnp.float32)))(table)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.eye(8)[:, 5:6] * [[1024, 1024]])


@pytest.mark.parametrize("sp", [True, False])
def test_logits_are_float32_for_bfloat16_parameters(sp):
    """In bfloat16, logits near 100 have a precision of 0.5, and so would the losses."""
    x = jnp.full((1, 8, 1), 10.0, jnp.bfloat16)
    head = jnp.asarray(np.linspace(9.0, 11.0, 16)[None], jnp.bfloat16)
    targets = jnp.arange(8)[None]
    true = cross_entropy(x.astype(jnp.float32), head.astype(jnp.float32), targets)
    with jax.set_mesh(mesh_of(4)):
        ours = jax.jit(lambda *a: vocab_cross_entropy(*a, axis="tp", sequence_parallel=sp))(x, head, targets)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5)


def test_huge_logits_stay_finite():
    x, head = jnp.full((1, 8, 1), 1e4), jnp.asarray(np.linspace(-1, 1, 8)[None], jnp.float32)
    with jax.set_mesh(mesh_of(4)):
        loss = jax.jit(lambda *a: vocab_cross_entropy(*a, axis="tp"))(x, head, jnp.full((1, 8), 6))
    np.testing.assert_allclose(loss, 1e4 * (head[0, 7] - head[0, 6]), rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [("uint8", 256), ("int8", 128), ("uint16", 65536)],
)
@pytest.mark.parametrize("axis", [None, "tp"])
def test_narrow_ids_with_a_vocabulary_as_large_as_their_dtype(dtype, vocab, axis):
    """The vocabulary size must not overflow the dtype of the ids."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, (2, 8)).astype(dtype)
    table, x = rng.normal(size=(vocab, 4)).astype(np.float32), rng.normal(size=(2, 8, 4)).astype(np.float32)

    def run(ids):
        embedded = vocab_embed(ids, table, axis=axis)
        losses = vocab_cross_entropy(x, table.T, ids, axis=axis)
        return embedded, losses, linear_cross_entropy(x, table.T, ids, axis=axis).total

    with jax.set_mesh(mw.create_mesh("tp:8")) if axis else contextlib.nullcontext():
        embedded, losses, total = jax.jit(run)(ids)
    logits = x @ table.T
    wanted = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, ids[..., None].astype(int), -1)[..., 0]
    np.testing.assert_array_equal(embedded, table[ids])
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_allclose(total, wanted.sum(), rtol=1e-5)
