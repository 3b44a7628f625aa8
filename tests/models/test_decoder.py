"""The decoder computes the same function with every form of its loop, every remat policy, packed or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.models import Decoder, Execution

TINY = {"vocab_size": 32, "num_layers": 4, "d_model": 32, "num_heads": 4, "d_ff": 48}
VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "tied": {"tied_embeddings": True},
    "normed": {"qk_norm": True},
    "capped": {"logit_soft_cap": 5.0, "attention_soft_cap": 3.0},
    "wide_heads": {"head_dim": 16},
}


def make(**changes):
    model = Decoder(**(TINY | changes))
    params = model.init(jax.random.key(0))
    # Scales other than 1 reveal the use of a wrong one.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 32)
    return model, params, tokens


def loss_and_grads(model, params, tokens, **options):
    def loss(params):
        logits = model.apply(params, tokens, **options)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None] * 0 + 3, -1))

    return jax.jit(jax.value_and_grad(loss))(params)


def reference(model, params, tokens):
    """A float64 decoder written from the papers, one row and one layer at a time."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def rms(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm_eps) * scale

    def cap(x, limit):
        return x if limit is None else limit * np.tanh(x / limit)

    heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
    size = model.head_dim or model.d_model // heads
    rows = []
    for row in np.asarray(tokens):
        h, count = p["embed"]["table"][row], len(row)
        angles = np.arange(count)[:, None] * model.rope_theta ** (-np.arange(0, size, 2) / size)

        def turn(x, angles=angles):  # [S, H, K]
            a, b = np.split(x, 2, -1)
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        for number in range(model.num_layers):
            w = jax.tree.map(lambda leaf, number=number: leaf[number], p["layers"])
            x = rms(h, w["attn_norm"])
            q = (x @ w["attn"]["q"]).reshape(count, heads, size)
            k = (x @ w["attn"]["k"]).reshape(count, groups, size)
            v = (x @ w["attn"]["v"]).reshape(count, groups, size)
            if model.qk_norm:
                q, k = rms(q, w["attn"]["q_norm"]), rms(k, w["attn"]["k_norm"])
            q, k = turn(q), turn(k)
            ys = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = cap(q[:, head] @ k[:, group].T / np.sqrt(size), model.attention_soft_cap)
                scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                ys.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
            h = h + np.concatenate(ys, -1) @ w["attn"]["o"]
            x = rms(h, w["mlp_norm"])
            gate = x @ w["mlp"]["gate"]
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w["mlp"]["up"])) @ w["mlp"]["down"]
        head = p["embed"]["table"].T if model.tied_embeddings else p["head"]["kernel"]
        rows.append(cap(rms(h, p["final_norm"]["scale"]) @ head, model.logit_soft_cap))
    return np.stack(rows)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_follow_the_papers(variant):
    model, params, tokens = make(**VARIANTS[variant])
    logits = jax.jit(model.apply)(params, tokens)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference(model, params, tokens), atol=2e-4)


@pytest.mark.parametrize("options", [
    {"run": Execution(layers="unroll")},
    {"run": Execution(layers=2)},
    {"remat": "dots"},
    {"remat": "full"},
    {"remat": "offload"},
    {"remat": "full", "run": Execution(layers="unroll")},
    {"remat": jax.checkpoint_policies.everything_saveable, "run": Execution(layers=4)},
], ids=["unroll", "blocks", "dots", "full", "offload", "full_unroll", "policy"])  # fmt: skip
def test_execution_does_not_change_loss_or_gradients(options):
    model, params, tokens = make()
    loss, grads = loss_and_grads(model, params, tokens)
    other_loss, other_grads = loss_and_grads(model, params, tokens, **options)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other_grads, grads)


def test_remat_recomputes():
    model, params, tokens = make()

    def memory(remat):
        gradient = jax.grad(lambda params: model.apply(params, tokens, remat=remat).sum())
        return jax.jit(gradient).lower(params).compile().memory_analysis().temp_size_in_bytes

    assert memory("full") < memory("dots") < memory("none")


def test_packed_documents_do_not_see_each_other():
    model, params, tokens = make()
    apply = jax.jit(model.apply)
    alone = [apply(params, tokens[:1, :5]), apply(params, tokens[:1, 5:])]
    segments = jnp.array([[1] * 5 + [2] * 7])
    packed = apply(params, tokens[:1], segment_ids=segments)
    np.testing.assert_allclose(packed, jnp.concatenate(alone, 1), atol=1e-5)
    assert np.abs(packed - apply(params, tokens[:1])).max() > 1e-3  # the boundary matters


def test_tokens_do_not_see_later_tokens():
    model, params, tokens = make()
    changed = tokens.at[:, 8:].add(1) % 32
    before, after = (jax.jit(model.apply)(params, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :8], after[:, :8])
    assert np.abs(before[:, 8:] - after[:, 8:]).max() > 1e-3


def test_dropout_needs_a_key_and_differs_between_layers():
    model, params, tokens = make(dropout=0.5)
    quiet, loud = (jax.jit(model.apply)(params, tokens, rng=rng) for rng in (None, jax.random.key(5)))
    np.testing.assert_array_equal(quiet, jax.jit(make()[0].apply)(params, tokens))
    assert np.abs(quiet - loud).max() > 1e-2


@pytest.mark.parametrize(("size", "params"), [("956m", 956), ("1b", 1236), ("7b", 6738), ("70b", 70554)])
def test_num_params_of_named_sizes(size, params):
    assert round(Decoder.named(size).num_params / 1e6) == params


def test_errors():
    with pytest.raises(mw.MeshwrightError, match=r"no size '7B'.*\n?hint: did you mean '7b'\?"):
        Decoder.named("7B")
    model, params, tokens = make()
    with pytest.raises(mw.LayoutError, match=r"4 layers cannot be run in blocks of 3.\nhint: .*1, 2, 4"):
        model.apply(params, tokens, run=Execution(layers=3))
    with pytest.raises(mw.MeshwrightError, match=r"unknown remat policy 'dot'.\nhint: did you mean 'dots'"):
        model.apply(params, tokens, remat="dot")
    with pytest.raises(mw.PlacementError, match=r"tokens of shape \(12,\)"):
        model.apply(params, tokens[0])
    grouped = Decoder(**(TINY | {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8}))
    with (
        jax.set_mesh(mw.create_mesh("tp:2", devices=2)),
        pytest.raises(mw.PlacementError, match="3 key/value heads are not divisible by the 2 devices"),
    ):
        jax.eval_shape(grouped.apply, jax.eval_shape(grouped.init, jax.random.key(0)), tokens)
