"""Cached logits equal to the bit those without a cache.

Each op of the token program rounds the same way whether the keys and values of earlier tokens come from a cache or from
the whole text. Programs differ in their last bits only because XLA fuses ops, contracts a product and a sum into one
rounding, and reduces matrices of one row in another order than those of many. So these tests compile without fusion,
and the reference passes one token at a time through each layer, as the token program does. It is otherwise a forward
pass without a cache: layer by layer, over all tokens of the text, with nothing carried from token to token.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.generate import make_generator
from meshwright.generate.cache import KeyValues, TokenContext, in_slots, slots_of
from meshwright.generate.limits import cache_shapes
from meshwright.generate.passes import _context, _embed, logits_of, read_tokens
from meshwright.models import Decoder
from meshwright.models.layer_context import Context

MODEL = Decoder(
    vocab_size=64, num_layers=2, d_model=32, num_heads=8, num_kv_heads=4, d_ff=64, sliding_window=5, layer_pattern="lg",
    local_rope_theta=100.0, qk_norm=True, norms="both", attention_soft_cap=20.0, logit_soft_cap=30.0,
    scaled_embeddings=True, norm_offset=True, activation="gelu_tanh",
)  # fmt: skip
LENGTH, ROWS = 12, 8
# Each axis, and each pair of axes that a cache can be split over. `test_generator.py` compares tokens on more meshes.
MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2", "pp:2,tp:4"]
NO_FUSION = {"xla_disable_hlo_passes": "fusion"}


@dataclass(frozen=True, kw_only=True)
class Collecting(Context):
    """Keeps the keys and values of a token, without attention."""

    found: list[Any] = field(default_factory=list)

    def attend(self, q, k, v, **options):
        self.found.append((k, v))
        return jnp.zeros_like(q)


class Rereading(TokenContext):
    """Attends to keys and values that were computed from the whole text."""

    def _written(self, cache, new):
        return cache


def without_cache(tree, tokens, spread):
    num_rows, size = tokens.shape
    shared, h = MODEL.prepare(jnp.arange(LENGTH)[None]), tokens.T

    def entered(number, h):
        return _embed(MODEL, tree, h[:, None], spread) if number == 0 else h

    def tables(place):
        return jax.tree.map(lambda table: table[0, jnp.full(num_rows, place)][:, None], shared)

    for number, layer in enumerate(tree["layers"]):

        def collect(x, number=number, layer=layer):
            context = Collecting(**_context(MODEL, number, tables(x[0]), spread), found=[])
            MODEL.layer(layer, entered(number, x[1]), context)
            return tuple(context.found)

        found = jax.lax.map(collect, (jnp.arange(size), h))
        window = MODEL.sliding_window if MODEL.layer_kinds[number] == "l" else None

        def attend(x, number=number, layer=layer, found=found, window=window):
            places = jnp.full(num_rows, x[0])
            slots = jnp.maximum(in_slots(places, slots_of(LENGTH, window)), 0)[:, None, :, None]
            caches = []
            for pair in found:
                whole = [spread.split_heads(jnp.moveaxis(part[:, :, 0], 0, 2), dim=1) for part in pair]
                seen = [spread.split_heads(jnp.take_along_axis(part, slots, axis=2), dim=1) for part in whole]
                caches.append(KeyValues(*seen))
            context = Rereading(
                **_context(MODEL, number, tables(x[0]), spread),
                places=places,
                spread=spread,
                caches=tuple(caches),
                kept=[],
            )
            return spread.split_features(MODEL.layer(layer, entered(number, x[1]), context))

        h = jax.lax.map(attend, (jnp.arange(size), h))
    return jax.lax.map(lambda h: spread.everywhere(logits_of(MODEL, tree, h, spread=spread)[:, 0]), h)


def with_cache(tree, tokens, spread):
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), CACHE)
    shared = MODEL.prepare(jnp.arange(LENGTH)[None])

    def one(carry, token):
        cache, places = carry
        h, cache = read_tokens(MODEL, tree, token, places, cache, shared, spread=spread)
        return (cache, places + 1), spread.everywhere(logits_of(MODEL, tree, h, spread=spread)[:, 0])

    return jax.lax.scan(one, (empty, jnp.zeros(len(tokens), jnp.int32)), tokens.T)[1]


GENERATOR = make_generator(MODEL, length=LENGTH)
CACHE = cache_shapes(MODEL, ROWS, LENGTH, GENERATOR.precision)


@pytest.mark.parametrize("mesh", [None, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES)])
def test_cached_logits_equal_uncached_ones_to_the_bit(mesh):
    params = MODEL.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), params)
    if mesh is not None:
        params = mw.make_layout(MODEL.rules, params, mw.create_mesh(mesh)).shard(params)
    weights = GENERATOR.load(params, num_rows=ROWS)
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
    cached, uncached = (
        np.asarray(jax.jit(run, static_argnums=2, compiler_options=NO_FUSION)(weights.tree, tokens, weights.spread))
        for run in (with_cache, without_cache)
    )
    assert np.isfinite(cached).all()
    np.testing.assert_array_equal(cached, uncached)
