"""Generated tokens: equal to the model's own predictions, and the same on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.generate import Sampling, make_generator
from meshwright.generate.generator import _continue, _continue_one, _start, program_of
from meshwright.generate.loaded_weights import _needed_copies
from meshwright.generate.passes import logits_of, read_prompts, read_tokens
from meshwright.generate.spread import Spread
from meshwright.models import XLSTM, Decoder

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
LENGTH = 24
PROMPTS = [[3, 14, 15, 9], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
GEMMA = {
    "num_kv_heads": 4,
    "head_dim": 8,
    "sliding_window": 5,
    "layer_pattern": "lg",
    "attention_soft_cap": 20.0,
    "logit_soft_cap": 30.0,
    "query_scalar": 12.0,
    "qk_norm": True,
    "rope_scaling": "dynamic:factor=4,original=8",
    "local_rope_theta": 100.0,
    "norms": "both",
    "norm_offset": True,
    "scaled_embeddings": True,
    "activation": "gelu_tanh",
}
OLMO = {"qk_norm": True, "whole_qk_norm": True, "norms": "post", "sliding_window": 6, "layer_pattern": "ln"}
PHI = {
    "tied_embeddings": True,
    "num_kv_heads": 2,
    "qkv_bias": True,
    "rotary_fraction": 0.5,
    "rope_scaling": "linear:factor=2",
}
MODELS = {
    "llama": Decoder(**SIZES),
    "gemma": Decoder(**SIZES, **GEMMA),
    "olmo": Decoder(**SIZES, **OLMO),
    "phi": Decoder(**SIZES, **PHI),
    "xlstm": XLSTM(**SIZES, chunk_size=4),
}
MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,tp:4", "fsdp:2,tp:4", "dp:2,fsdp:2,tp:2", "dp:4,fsdp:2", "pp:2,tp:4"]
# Each axis, and each pair of axes, at least once.
FEW_MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2", "pp:2,tp:4"]


def some_slow(cases, fast):
    """Returns all cases, marked slow but for those numbered in `fast`."""
    return [case if n in fast else pytest.param(*([case] if isinstance(case, str) else case), marks=pytest.mark.slow)
            for n, case in enumerate(cases)]  # fmt: skip


@functools.cache
def sharpened(name):
    """Random parameters whose greedy choices are far from ties, so that rounding does not change them."""
    model = MODELS[name]
    params = model.init(jax.random.key(0))
    changed = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params)
    last = "embed" if model.tied_embeddings else "head"
    changed[last] = jax.tree.map(lambda leaf: 3 * leaf, changed[last])
    return changed


def padded(rows):
    tokens = np.zeros((len(rows), LENGTH), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    return tokens


@functools.cache
def greedy_reference(name):
    """Greedy decoding with a full forward pass per token, without a cache."""
    model, params = MODELS[name], sharpened(name)
    rows = [list(prompt) for prompt in PROMPTS]
    apply = jax.jit(model.apply)
    for _ in range(12):
        logits = np.asarray(apply(params, padded(rows)))
        for number, row in enumerate(rows):
            row.append(int(logits[number, len(row) - 1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def placed(name, mesh):
    layout = mw.make_layout(MODELS[name].rules, sharpened(name), mw.create_mesh(mesh))
    return layout.shard(sharpened(name))


def generated(name, params, num_rows=3):
    generate = make_generator(MODELS[name], length=LENGTH, chunk=8)
    return [tokens.tolist() for tokens in generate(generate.load(params, num_rows=num_rows), PROMPTS, 12)]


@pytest.mark.parametrize("name", MODELS)
def test_cached_tokens_equal_those_of_the_model(name):
    tokens = generated(name, sharpened(name))
    assert tokens == greedy_reference(name)
    assert len({*tokens[0], *tokens[1], *tokens[2]}) > 2


@pytest.mark.parametrize(
    ("name", "mesh"),
    some_slow([*(("gemma", mesh) for mesh in MESHES), *(("xlstm", mesh) for mesh in FEW_MESHES)], fast=(5, 11)),
)
def test_every_mesh_generates_the_same_tokens(name, mesh):
    assert generated(name, placed(name, mesh)) == greedy_reference(name)


# --- Logits of the cached program against those without a cache ---


def logits_by_token(name, weights, tokens, lengths):
    """Returns the logits of each token from `lengths` on, read one by one after prompts; prompts may be None."""
    model, spread = MODELS[name], weights.spread

    @jax.jit
    def prompts(tree, tokens, lengths):
        h, cache = read_prompts(model, tree, tokens, lengths, length=LENGTH, spread=spread)
        return spread.everywhere(logits_of(model, tree, h, spread=spread)), cache

    @jax.jit
    def one(tree, token, places, cache):
        shared = model.prepare(jnp.arange(LENGTH)[None])
        h, cache = read_tokens(model, tree, token, places, cache, shared, spread=spread)
        return spread.everywhere(logits_of(model, tree, h, spread=spread)[:, 0]), cache

    first, cache = prompts(weights.tree, tokens[:, : max(lengths)], np.asarray(lengths, np.int32))
    rows, places = np.arange(len(tokens)), np.asarray(lengths, np.int32)
    found = [dict(enumerate(np.asarray(first)[row, : lengths[row]])) for row in rows]
    while places.max() < LENGTH:
        logits, cache = one(weights.tree, tokens[rows, places], places, cache)
        for row in rows:
            found[row][int(places[row])] = np.asarray(logits)[row]
        places = places + 1
    return found


@pytest.mark.parametrize(("name", "mesh"), [("llama", None), ("gemma", "dp:2,fsdp:2,tp:2"), ("xlstm", None)])
def test_logits_equal_those_without_a_cache_up_to_rounding(name, mesh):
    """Each row is read to a different length as a prompt, and then token by token."""
    model, params = MODELS[name], sharpened(name)
    tokens = np.random.default_rng(0).integers(0, 64, (4, LENGTH)).astype(np.int32)
    wanted = np.asarray(jax.jit(model.apply)(params, tokens))
    generate = make_generator(model, length=LENGTH)
    weights = generate.load(params if mesh is None else placed(name, mesh), num_rows=4)
    found = logits_by_token(name, weights, tokens, lengths=[4, 1, 10, 7])
    # Sums of up to 64 products, in another order: their rounding is at most 64 units in the last place of the largest.
    bound = 64 * np.finfo(np.float32).eps * np.abs(wanted).max()
    for row, logits in enumerate(found):
        for place, values in logits.items():
            np.testing.assert_allclose(values, wanted[row, place], rtol=0, atol=bound)


@pytest.mark.parametrize("mesh", some_slow(FEW_MESHES[1:], fast=(2,)))
def test_a_row_gets_the_same_bits_whatever_the_other_rows_hold(mesh):
    weights = make_generator(MODELS["gemma"], length=LENGTH).load(placed("gemma", mesh), num_rows=8)
    tokens = np.random.default_rng(0).integers(0, 64, (8, LENGTH)).astype(np.int32)
    other = np.where(np.arange(8)[:, None] == 0, tokens, (tokens + 1) % 64)
    one, two = (logits_by_token("gemma", weights, text, lengths=[1] * 8)[0] for text in (tokens, other))
    assert all(np.array_equal(one[place], two[place]) for place in range(1, LENGTH))


# --- Programs and devices ---


def test_one_program_serves_all_prompts_lengths_seeds_and_temperatures(count_programs):
    model, params = MODELS["llama"], sharpened("llama")
    generate = make_generator(model, length=LENGTH)
    weights = generate.load(params)
    generate(weights, [[1, 2]], 4, sampling=Sampling(temperature=0.5))
    with count_programs() as compiled:
        generate(weights, [[5]], 20, sampling=Sampling(temperature=0.7, seed=3))
        generate(weights, [[1] * 16], 1, sampling=Sampling(temperature=1.0))
    assert not compiled


def test_the_cache_is_updated_in_place():
    generate = make_generator(MODELS["llama"], length=LENGTH)
    weights = generate.load(sharpened("llama"))
    values, stop = Sampling().values(64), np.zeros(0, np.int32)
    static = {"sizes": generate.sizes, "mode": "greedy", "spread": Spread()}
    ended = np.zeros(1, bool)
    rows, _ = _start(weights.tree, np.ones((1, 16), np.int32), np.ones(1, np.int32), ended, values, stop, **static)
    keys = rows.cache[0][0].keys
    place = keys.unsafe_buffer_pointer()
    rows, _ = _continue(weights.tree, rows, np.int32(3), ended, values, stop, **static)
    assert keys.is_deleted()
    assert rows.cache[0][0].keys.unsafe_buffer_pointer() == place


@pytest.mark.parametrize(
    ("mesh", "rows", "devices"),
    [("dp:8", 1, 1), ("dp:8", 8, 8), ("fsdp:8", 1, 8), ("dp:2,fsdp:2,tp:2", 1, 4), ("dp:4,tp:2", 1, 2)],
)
def test_replicas_do_not_repeat_the_work(mesh, rows, devices):
    params = placed("llama", mesh)
    fewer, part = _needed_copies(params, rows)
    assert part.size == devices
    buffers = {
        shard.device: shard.data.unsafe_buffer_pointer() for shard in params["embed"]["table"].addressable_shards
    }
    table = fewer["embed"]["table"]
    assert len(table.sharding.device_set) == devices
    assert all(buffers[shard.device] == shard.data.unsafe_buffer_pointer() for shard in table.addressable_shards)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(fewer), jax.device_get(params))


def test_weights_of_a_pipeline_are_split_by_features():
    weights = make_generator(MODELS["llama"], length=8).load(placed("llama", "pp:2,tp:4"))
    assert weights.tree["layers"][0]["attn"]["q"].sharding.spec == mw.P("pp", "tp")


def test_weights_stay_split_while_tokens_are_generated():
    """No collective of the token program moves a weight: its arrays are smaller than any of them."""
    model = Decoder(**(SIZES | {"d_model": 128, "d_ff": 256}))
    params = model.init(jax.random.key(0))
    weights = make_generator(model, length=8).load(
        mw.make_layout(model.rules, params, mw.create_mesh("fsdp:4,tp:2")).shard(params), num_rows=4
    )

    @jax.jit
    def one(tree, cache):
        shared = model.prepare(jnp.arange(8)[None])
        places = jnp.ones(4, jnp.int32)
        return read_tokens(model, tree, places, places, cache, shared, spread=weights.spread)

    lengths = np.ones(4, np.int32)
    _, cache = jax.eval_shape(
        lambda tree: read_prompts(model, tree, np.ones((4, 1), np.int32), lengths, length=8, spread=weights.spread),
        weights.tree,
    )
    text = one.lower(weights.tree, cache).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert not [line for line in gathers if "128,64" in line or "128,128" in line or "128,256" in line]


def test_a_step_can_donate_parameters_that_were_sampled_from():
    """Sampling may read the same buffers that the next step donates."""
    params = placed("llama", "dp:8")
    step = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params), donate_argnums=0)
    generate = make_generator(MODELS["llama"], length=8)
    for _ in range(2):
        before = params
        generate(generate.load(before), [[1]], 3)
        params = step(before)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_a_current_mesh_changes_nothing():
    expected = greedy_reference("llama")
    with jax.set_mesh(mw.create_mesh("dp:4,tp:2")):
        assert generated("llama", placed("llama", "dp:4,tp:2")) == expected


def test_precision_is_that_of_the_step():
    generate = make_generator(MODELS["llama"], length=8, precision="mixed")
    weights = generate.load(sharpened("llama"))
    assert weights.tree["layers"][0]["attn"]["q"].dtype == jnp.bfloat16
    assert weights.tree["final_norm"]["scale"].dtype == jnp.float32
    assert len(generate(weights, [[1]], 3)[0]) == 3


# --- Ends of rows, scores, errors ---


def test_stop_tokens_end_rows_separately():
    wanted = greedy_reference("llama")
    stop = wanted[0][4]
    generate = make_generator(MODELS["llama"], length=LENGTH, chunk=8)
    found = generate(generate.load(sharpened("llama"), num_rows=3), PROMPTS, 12, stop_tokens=[stop])
    for row, tokens in zip(wanted, found, strict=True):
        assert tokens.tolist() == (row[: row.index(stop) + 1] if stop in row else row)


def test_a_finished_row_gets_no_more_tokens():
    generate = make_generator(MODELS["llama"], length=LENGTH, chunk=8)
    stream = generate.stream(generate.load(sharpened("llama"), num_rows=3), PROMPTS, 12)
    parts = iter(stream)
    next(parts)
    stream.finish(1)
    assert [len(tokens) for tokens in next(parts)] == [8, 0, 8]


def test_scores_are_log_probabilities():
    model, params = MODELS["gemma"], sharpened("gemma")
    rows = [[1, 2, 3, 4, 5], [9, 8]]
    generate = make_generator(model, length=LENGTH)
    found = generate.score(generate.load(params), rows)
    for row, scores in zip(rows, found, strict=True):
        logs = jax.nn.log_softmax(model.apply(params, padded([row])))[0]
        wanted = [logs[place, token] for place, token in enumerate(row[1:])]
        np.testing.assert_allclose(scores.log_probs, wanted, rtol=1e-5, atol=1e-5)
        assert scores.is_likeliest.tolist() == [int(logs[n].argmax()) == token for n, token in enumerate(row[1:])]


@pytest.mark.parametrize(
    ("prompts", "options", "text"),
    [
        ([], {}, r"there are no prompts"),
        ([[]], {}, r"a prompt must be a non-empty list of token ids"),
        ([[64]], {}, r"holds token 64; the model's ids are 0 to 63"),
        ([[-1, 3]], {}, r"holds token -1"),
        ([["a"]], {}, r"got <U1\[1\]"),
        ([[1]], {"num_tokens": 24}, r"1 prompt tokens and 24 new tokens do not fit a length of 24"),
    ],
)
def test_invalid_prompts_are_errors(prompts, options, text):
    generate = make_generator(MODELS["llama"], length=LENGTH)
    weights = generate.load(sharpened("llama"))
    with pytest.raises(mw.MeshwrightError, match=text):
        generate(weights, prompts, **({"num_tokens": 3} | options))
    with pytest.raises(mw.MeshwrightError, match="length=1 cannot hold a prompt and a new token"):
        make_generator(MODELS["llama"], length=1)


@pytest.mark.parametrize(("length", "text"), [(10**9, r"the cache of 1 rows of 1,000,000,000 tokens takes"),
                                              (10**12, r"a row cannot have 1,000,000,000,000 tokens")])  # fmt: skip
def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(length, text):
    generate = make_generator(MODELS["llama"], length=length)
    with pytest.raises(mw.MeshwrightError, match=text):
        generate.stream(generate.load(sharpened("llama")), [[1]], 3)


def test_one_row_per_device_has_a_program_of_its_own():
    two = Spread.of(mw.create_mesh("dp:2,tp:4"), num_rows=2)
    found = [program_of(1, Spread()), program_of(2, two), program_of(2, Spread()), program_of(4, two)]
    assert found == [_continue_one, _continue_one, _continue, _continue]
