"""States of the mLSTM: carried from call to call, through documents and padding, with their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import (
    init_mlstm_state,
    mlstm_chunkwise,
    mlstm_recurrent,
)

from .mlstm_forms import (
    SEGMENTS,
    STATE_NAMES,
    WITH_STATE,
    B,
    H,
    K,
    S,
    V,
    assert_close,
    by_equations,
    in_units_of_one,
    some_state,
    state_gradients,
    tokens,
    value_and_gradients,
    weights,
)


@pytest.mark.parametrize("form", WITH_STATE)
def test_gradients_of_a_given_state(form):
    inputs = (*some_state()[:3], *tokens(4))
    value, gradients = state_gradients(form)(*inputs)

    def truth(*inputs):
        return sum(np.sum(np.sin(x)) for x in by_equations(*inputs[3:], state=inputs[:3], return_state=True))

    np.testing.assert_allclose(value, truth(*inputs), rtol=1e-5)
    for which, (name, gradient) in enumerate(zip(STATE_NAMES, gradients, strict=True)):
        towards = weights(inputs[which].shape, seed=which)
        up, down = (
            truth(*(np.asarray(x, np.float64) + (by * towards if n == which else 0.0) for n, x in enumerate(inputs)))
            for by in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(np.sum(gradient * towards), (up - down) / 2e-6, rtol=1e-4, err_msg=name)
    assert_close(gradients, state_gradients("recurrent")(*inputs)[1], names=STATE_NAMES)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("first", WITH_STATE)
def test_two_calls_with_the_carried_state_equal_one(first, segments):
    # The cut lies within a document, and in the packed rows, between two and within padding.
    segment_ids, args, cut = SEGMENTS[segments], tokens(5), 4
    second = next(name for name in WITH_STATE if name != first)

    def run(form, piece, state=None):
        return jitted(form)(*(x[:, piece] for x in args), state, segment_ids[:, piece])

    whole, after_whole = run(first, slice(None))
    start, state = run(first, slice(None, cut))
    for form in (first, second):
        rest, after = run(form, slice(cut, None), state)
        assert_close([np.concatenate([start, rest], axis=1)], [whole])
        assert_close(in_units_of_one(after), in_units_of_one(after_whole))
        np.testing.assert_array_equal(after.segment, after_whole.segment)


@functools.cache
def jitted(form):
    return jax.jit(lambda q, k, v, i, f, state, ids: WITH_STATE[form](q, k, v, i, f, state=state, segment_ids=ids))


def test_gradients_pass_through_a_carried_state():
    args = tokens(6)

    def loss(*args):
        first, state = mlstm_chunkwise(*(x[:, :7] for x in args), chunk_size=4, return_state=True)
        rest, _ = mlstm_recurrent(*(x[:, 7:] for x in args), state=state)
        return jnp.sum(jnp.concatenate([first, rest], axis=1) * weights(args[2].shape))

    ours = jax.jit(jax.grad(loss, argnums=range(5)))(*args)
    assert_close(ours, value_and_gradients("parallel")(*args, SEGMENTS["one document"])[0])


def test_the_first_document_continues_a_state_without_documents():
    args = tokens(16)

    @jax.jit
    def both(*args):
        whole = mlstm_chunkwise(*args, chunk_size=5)
        first, state = mlstm_chunkwise(*(x[:, :6] for x in args), chunk_size=5, return_state=True)
        ids = jnp.where(jnp.arange(S - 6) < 4, 3, 4) * jnp.ones((B, 1), int)
        rest = mlstm_chunkwise(*(x[:, 6:] for x in args), chunk_size=5, state=state, segment_ids=ids)
        return whole, jnp.concatenate([first, rest], axis=1)

    whole, in_two = both(*args)
    assert_close([in_two[:, :10]], [whole[:, :10]])
    assert np.abs(in_two[:, 10:] - whole[:, 10:]).max() > 0.1


def test_padding_does_not_change_the_state():
    args = tokens(7)
    padded = np.where(np.arange(S) < 4, np.ones((B, S), np.int32), 0)
    for form in WITH_STATE:
        _, after = jitted(form)(*args, None, padded)
        _, expected = jitted(form)(*(x[:, :4] for x in args), None, padded[:, :4])
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after, expected)
        _, after = jitted(form)(*args, None, 0 * padded)
        jax.tree.map(np.testing.assert_array_equal, after, init_mlstm_state(B, H, key_dim=K, value_dim=V))
