"""The xLSTM matches a recurrent reference with any chunk size, packed or not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import XLSTM, mlstm_recurrent

SIZES = {"vocab_size": 32, "num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48}


def make(**changes):
    model = XLSTM(**(SIZES | changes))
    params = model.init(jax.random.key(0))
    # Scales other than 1 and open gates reveal the use of a wrong one.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    params["layers"]["mlstm"]["i_bias"] += 10.0
    return model, params, jax.random.randint(jax.random.key(1), (2, 12), 0, 32)


def reference(model, params, tokens):
    """The model written from the papers, with the recurrent form of the cell."""

    def rms(x, scale):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * scale

    def cap(x, limit):
        return x if limit is None else limit * jnp.tanh(x / limit)

    h, heads = params["embed"]["table"][tokens], model.num_heads
    for number in range(model.num_layers):
        w = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        cell, mlp = w["mlstm"], w["mlp"]
        x = rms(h, w["mlstm_norm"])
        q, k, v = ((x @ cell[name]).reshape(*x.shape[:2], heads, -1) for name in "qkv")
        i = cap(x @ cell["i_gate"] + cell["i_bias"], model.gate_soft_cap)
        f = cap(x @ cell["f_gate"] + cell["f_bias"], model.gate_soft_cap)
        y, _ = mlstm_recurrent(q, k, v, i, f)
        y = rms(y, cell["head_norm"].reshape(heads, -1)).reshape(x.shape)
        h = h + (y * jax.nn.sigmoid(x @ cell["o_gate"])) @ cell["out"]
        x = rms(h, w["mlp_norm"])
        h = h + (jax.nn.silu(x @ mlp["gate"]) * (x @ mlp["up"])) @ mlp["down"]
    return cap(rms(h, params["final_norm"]["scale"]) @ params["head"]["kernel"], model.logit_soft_cap)


@pytest.mark.parametrize("changes", [
    {"chunk_size": 4},
    {"chunk_size": 5, "logit_soft_cap": 5.0},
    {"chunk_size": 64, "gate_soft_cap": None, "qk_factor": 1.0},
], ids=str)  # fmt: skip
def test_loss_and_gradients_match_the_recurrent_form(changes):
    model, params, tokens = make(**changes)

    def loss(logits):
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 3])

    ours = jax.jit(jax.value_and_grad(lambda params: loss(model.apply(params, tokens))))(params)
    with jax.enable_x64(True):
        recurrent = jax.jit(jax.value_and_grad(lambda params: loss(reference(model, params, tokens))))
        exact = recurrent(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params))
        rounded = [recurrent(jax.tree.map(functools.partial(nudge, seed=seed), params)) for seed in range(3)]
    # float32 may change a result by a few times the effect of rounding the weights (at most 8 times was measured, with
    # SSE4.2, AVX2 and AVX-512), plus the last bits of large terms that cancel, as in `i_bias`.
    last_bits = 2**-21 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(exact))
    for (path, a), b, *others in zip(
        jax.tree.leaves_with_path(ours), *(jax.tree.leaves(tree) for tree in (exact, *rounded)), strict=True
    ):
        noise = max(np.abs(other - b).max() for other in others)
        np.testing.assert_allclose(a, b, rtol=0, atol=10 * noise + last_bits, err_msg=jax.tree_util.keystr(path))


def nudge(leaf, *, seed):
    """Moves every element up or down by half of its last float32 bit; returns float64."""
    signs = np.random.default_rng(seed).choice([-1, 1], leaf.shape)
    return np.asarray(leaf, np.float64) * (1 + 2.0**-24 * signs)


def test_packed_documents_do_not_share_memory():
    model, params, tokens = make(chunk_size=4)
    apply = jax.jit(model.apply)
    alone = jnp.concatenate([apply(params, tokens[:1, :5]), apply(params, tokens[:1, 5:])], 1)
    packed = apply(params, tokens[:1], segment_ids=jnp.array([[1] * 5 + [2] * 7]))
    np.testing.assert_allclose(packed, alone, atol=1e-5)
    assert np.abs(packed - apply(params, tokens[:1])).max() > 1e-3  # the boundary matters


def test_tokens_do_not_see_later_tokens():
    model, params, tokens = make(chunk_size=4)
    before, after = (jax.jit(model.apply)(params, t) for t in (tokens, tokens.at[:, 7:].add(1) % 32))
    np.testing.assert_allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert np.abs(before[:, 7:] - after[:, 7:]).max() > 1e-3


def test_num_params_of_the_7b_model():
    assert round(XLSTM.named("7b").num_params / 1e6) == 6865
