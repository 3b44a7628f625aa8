"""Sizes of caches: rings of sliding windows, growth with the text, and chunks that the host does not wait for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.generate import cache as caches
from meshwright.generate import growth, make_generator
from meshwright.generate.generator import _continue, _start
from meshwright.generate.limits import cache_bytes, cache_shapes
from meshwright.generate.passes import logits_of, read_prompts, read_tokens
from meshwright.generate.spread import Spread
from meshwright.models import XLSTM, Decoder
from meshwright.train.precision import Precision

SIZES = {"vocab_size": 64, "num_layers": 3, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ff": 64}
GEMMA = Decoder(**SIZES, sliding_window=5, layer_pattern="llg", local_rope_theta=100.0, qk_norm=True)
LENGTH = 24
PROMPTS = [[3, 14, 15, 9], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def params():
    """Random parameters whose greedy choices are far from ties."""
    params = GEMMA.init(jax.random.key(0))
    changed = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params)
    changed["head"] = jax.tree.map(lambda leaf: 3 * leaf, changed["head"])
    return changed


@pytest.fixture(scope="module")
def plain(params):
    """Tokens of a cache of full size, which the host reads chunk by chunk."""
    return tokens_of(params, 12)


def tokens_of(params, count, **options):
    generate = make_generator(GEMMA, length=LENGTH, **({"chunk": 4} | options))
    found = generate(generate.load(params, num_rows=3), PROMPTS, count)
    return [row.tolist() for row in found]


def logits_by_token(params, tokens, lengths):
    tree = make_generator(GEMMA, length=LENGTH).load(params).tree
    shared = GEMMA.prepare(jnp.arange(LENGTH)[None])

    def one(carry, token):
        cache, places = carry
        h, cache = read_tokens(GEMMA, tree, token, places, cache, shared, spread=Spread())
        return (cache, places + 1), logits_of(GEMMA, tree, h, spread=Spread())[:, 0]

    @jax.jit
    def run(tokens):
        _, cache = read_prompts(GEMMA, tree, tokens[:, :9], lengths, length=LENGTH, spread=Spread())
        places = lengths + np.arange(LENGTH - 9)[:, None]
        return jax.lax.scan(one, (cache, lengths), tokens[np.arange(3), places])[1]

    return np.asarray(run(tokens))


def test_rings_give_the_logits_of_full_caches(params, monkeypatch):
    """Also if a prompt is longer than the window, and rows of a batch wrap at different tokens."""
    tokens = np.random.default_rng(0).integers(0, 64, (3, LENGTH)).astype(np.int32)
    lengths = np.array([4, 1, 9], np.int32)
    ring = logits_by_token(params, tokens, lengths)
    monkeypatch.setattr(caches, "slots_of", lambda length, window, is_windowed=None: length)
    whole = logits_by_token(params, tokens, lengths)
    # Sums of up to 64 products, in another order.
    np.testing.assert_allclose(ring, whole, rtol=0, atol=64 * np.finfo(np.float32).eps * np.abs(whole).max())


def test_a_window_bounds_the_bytes_of_its_layers():
    """Gemma 3's five local layers per global one, with its window of 1,024."""
    model = Decoder(**(SIZES | {"num_layers": 6}), sliding_window=1024, layer_pattern="lllllg")
    shapes = cache_shapes(model, 2, 8192, Precision.named("mixed"))
    assert [layer[0].keys.shape[2] for layer in shapes] == [1024] * 5 + [8192]
    place = 2 * 2 * 2 * 8 * 2  # keys and values of 2 rows, with 2 heads of 8 features in bfloat16
    assert cache_bytes(model, 2, 8192, Precision.named("mixed")) == place * (5 * 1024 + 8192)
    assert cache_bytes(model, 2, 512, Precision.named("mixed")) == place * 6 * 512


def test_layers_of_unknown_kind_keep_all_slots():
    assert caches.slots_of(100, 10, is_windowed=jnp.asarray(True)) == 100


# --- Growth ---


def test_a_growing_cache_gives_the_same_tokens(params, plain, monkeypatch):
    monkeypatch.setattr(growth, "_LEAST", 4)
    monkeypatch.setattr(growth, "_WORTHWHILE", 0)
    params = mw.make_layout(GEMMA.rules, params, mw.create_mesh("dp:2,tp:2", devices=4)).shard(params)
    grown, real = [], growth.grown

    def watched(layers, targets, **options):
        found = real(layers, targets, **options)
        grown.append([layer[0].keys.shape[2] for layer in found])
        assert not layers
        return found

    monkeypatch.setattr("meshwright.generate.generator.grown", watched)
    assert tokens_of(params, 12) == plain
    assert grown == [[5, 5, 24]]  # from 16; rings of the window stay


def test_only_heavy_caches_grow():
    precision = Precision.named("float32")
    small = make_generator(GEMMA, length=1000)
    weights = small.load(GEMMA.init(jax.random.key(0)))
    assert growth.rooms_of(GEMMA, 1, 300, precision, weights) == (300,)  # 12 KiB, beside weights of 130 KiB
    assert growth.rooms_of(GEMMA, 64, 1000, precision, weights) == (256, 512, 1000)
    assert growth.rooms_of(GEMMA, 64, 256, precision, weights) == (256,)
    recurrent = XLSTM(vocab_size=64, num_layers=1, d_model=32, num_heads=2, d_ff=64)
    state = make_generator(recurrent, length=1000).load(recurrent.init(jax.random.key(0)))
    assert growth.rooms_of(recurrent, 64, 1000, precision, state) == (1000,)


# --- Running ahead of the host ---


@pytest.mark.parametrize("count", [12, 10, 1])
def test_a_device_ahead_of_the_host_gives_the_same_tokens(params, plain, count):
    assert tokens_of(params, count, run_ahead=True) == [row[:count] for row in plain]


def test_the_host_reads_one_chunk_behind_the_device(params, monkeypatch):
    """Stop tokens and finished rows still end their rows, and the stream."""
    generate = make_generator(GEMMA, length=LENGTH, chunk=4, run_ahead=True)
    weights, events = generate.load(params, num_rows=3), []

    def watched(*args, **options):
        events.append("device")
        return _continue(*args, **options)

    monkeypatch.setattr("meshwright.generate.generator._continue", watched)
    stream = generate.stream(weights, PROMPTS, 12)
    found = []
    for number, part in enumerate(stream):
        events.append("host")
        found.append([len(row) for row in part])
        stream.finish(number)
    assert events == ["device", "host", "device", "host", "device", "host"]
    assert found == [[1, 1, 1], [0, 4, 4], [0, 0, 4]]
    (row, *_), count = generate(weights, PROMPTS, 12), 6
    stopped = generate(weights, PROMPTS, 12, stop_tokens=[int(row[count])])[0]
    assert stopped.tolist() == row.tolist()[: row.tolist().index(row[count]) + 1]


def test_a_device_ahead_knows_the_number_of_steps(params):
    """A loop with an unknown number of steps makes a GPU wait for the host after each token."""

    def has_count(run_ahead):
        generate = make_generator(GEMMA, length=LENGTH, chunk=4, run_ahead=run_ahead)
        tree, one, given = generate.load(params).tree, np.ones(1, np.int32), ({}, np.zeros(0, np.int32))
        options = {"sizes": generate.sizes, "mode": "greedy", "spread": Spread()}
        start = functools.partial(_start, **options)
        rows, _ = jax.eval_shape(start, tree, one[None], one, np.zeros(1, bool), *given)
        lowered = _continue.lower(tree, rows, np.int32(3), np.zeros(1, bool), *given, **options)
        return "known_trip_count" in lowered.compile().as_text()

    assert has_count(True)
    assert not has_count(False)
