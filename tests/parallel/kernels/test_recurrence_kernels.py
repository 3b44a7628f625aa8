"""The kernels of a chunkwise linear recurrence, interpreted, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.hardware.flops import count_flops
from meshwright.parallel.kernels import pair_kernel
from meshwright.parallel.kernels import pair_tiles as pair_tiles_module
from meshwright.parallel.kernels.pair_kernel import gated_pairs, register_pairs
from meshwright.parallel.kernels.pair_tiles import Pairs, Tiles, pair_tiles
from meshwright.parallel.kernels.state_kernel import running_sums

from .recurrence import plain_pairs, plain_sums

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels need jax 0.11")
KINDS = {
    "outputs": Pairs(name="outputs", causal=True, normalize=True),
    "value gradients": Pairs(name="value_gradients", causal=False),
    "query gradients": Pairs(name="query_gradients", causal=True, bias="row", own=True, transposed=True),
    "key gradients": Pairs(name="key_gradients", causal=False, bias="column", own=True, transposed=True),
}


def normal(rng, *shape, dtype="bfloat16"):
    return jnp.asarray(0.5 * rng.standard_normal(shape), dtype)


def difference(got, true):
    got, true = np.asarray(got, np.float64), np.asarray(true, np.float64)
    return np.linalg.norm(got - true) / np.linalg.norm(true)


# Rounding to bfloat16 is at most 2^-9 of a number; operands and results round at random.
TOLERANCE = 2**-8


@needs_mosaic
@pytest.mark.parametrize(
    ("keys", "values", "chunk_size", "reverse"),
    [(128, 64, 128, False), (256, 128, 64, True), (64, 64, 128, True), (192, 320, 128, False)],
)
def test_sums_before_each_chunk(keys, values, chunk_size, reverse):
    rng, length = np.random.default_rng(0), 256
    a, c = normal(rng, 1, length, 2, keys), normal(rng, 1, length, 2, values)
    weights, keep = (jnp.asarray(rng.random((1, 2, n)), jnp.float32) for n in (length, length // chunk_size))
    got = jax.jit(lambda *args: running_sums(*args, reverse=reverse))(a, c, weights, keep)
    assert got.dtype == a.dtype
    assert difference(got, plain_sums(a, c, weights, keep, reverse=reverse)) < TOLERANCE


def pair_arguments(pairs, *, length=256, chunk_size=128, keys=64, values=128, heads=1):
    """Documents of random bounds."""
    rng, chunks = np.random.default_rng(0), length // chunk_size
    x_size, z_size = (values, keys) if pairs.transposed else (keys, values)
    x, y, z = (normal(rng, 1, length, heads, size) for size in (x_size, x_size, z_size))
    names = (*pairs.row_names, *pairs.column_names)
    vectors = {name: normal(rng, 1, heads, length, dtype="float32") for name in names}
    place, anywhere = np.arange(length) % chunk_size, rng.integers(0, chunk_size, (1, heads, length))
    bound = np.minimum(anywhere, place) if pairs.causal else np.maximum(anywhere, place)
    vectors["bound"] = jnp.asarray(bound, jnp.float32)
    if pairs.normalize:
        vectors["floor"] = jnp.abs(vectors["floor"]) + 0.1
    more = {}
    if pairs.own:
        own, per_chunk = normal(rng, 1, length, heads, z_size), normal(rng, 1, heads, chunks, z_size, dtype="float32")
        more = {"own": own, "chunk_vectors": per_chunk}
    return (x, y, z, normal(rng, 1, heads, chunks, keys, values), vectors), more


LARGER = {"length": 512, "chunk_size": 256, "keys": 128, "values": 64}
SHARED_COLUMNS = {"keys": 192, "values": 320}
"""Tiles share columns of values: 320 = 2 x 192 - 64."""


@needs_mosaic
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, LARGER, SHARED_COLUMNS], ids=str)
def test_pairs_equal_plain_jax(kind, sizes, monkeypatch):
    """With more tiles than blocks, so that blocks reuse their memory."""
    monkeypatch.setattr(pair_kernel, "_MULTIPROCESSORS", 2)
    equal_plain_jax(kind, sizes)


@needs_mosaic
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sizes", "width", "most"), [({"keys": 192, "values": 192}, 128, 128), (LARGER, 64, 64)])
def test_slices_of_features_add_up(kind, sizes, width, most, monkeypatch):
    """With shared memory for tiles of `width` columns and `most` features; 192 columns are two tiles that share 64."""
    monkeypatch.setattr(pair_kernel, "_MULTIPROCESSORS", 2)
    monkeypatch.setattr(pair_tiles_module, "_SLICE", most)
    monkeypatch.setattr(pair_tiles_module, "_SHARED_BYTES", 128 * max(most, width) * 2 + 3 * 64 * width * 2)
    pair_tiles.cache_clear()
    try:
        assert pair_tiles(sizes["keys"], sizes["values"]).slices == (most, sizes["keys"] - most)
        equal_plain_jax(kind, sizes)
    finally:
        pair_tiles.cache_clear()


def equal_plain_jax(kind, sizes):
    args, more = pair_arguments(KINDS[kind], **sizes)
    out, numbers = jax.jit(lambda args, more: gated_pairs(KINDS[kind], *args, **more))(args, more)
    expected, expected_numbers = plain_pairs(KINDS[kind], *args, **more)
    assert difference(out, expected) < TOLERANCE
    assert (numbers is None) == (expected_numbers is None)
    if numbers is not None:
        assert difference(numbers, expected_numbers) < TOLERANCE


@pytest.mark.parametrize(
    ("x_size", "z_size", "tiles"),
    [
        (256, 512, Tiles(256, (256,), 64, 256, 4)),
        (512, 256, Tiles(256, (512,), 64, 256, 3)),
        (128, 256, Tiles(256, (128,), 128, 128, 4)),
        (64, 256, Tiles(256, (64,), 64, 64, 4)),
        (192, 384, Tiles(192, (192,), 64, 192, 4)),
        (384, 320, Tiles(192, (384,), 64, 192, 4)),
        (320, 64, Tiles(64, (320,), 64, 64, 4)),
        (640, 128, Tiles(128, (640,), 64, 128, 4)),
        (1024, 512, Tiles(256, (512, 512), 64, 256, 3)),
        (704, 384, Tiles(192, (512, 192), 64, 64, 4)),
        (384, 768, Tiles(256, (384,), 64, 128, 4)),
        (100, 256, None),
    ],
)
def test_tiles_fit_shared_memory(x_size, z_size, tiles):
    assert pair_tiles(x_size, z_size) == tiles


def test_all_multiples_of_64_have_tiles():
    for x_size in range(64, 2049, 64):
        for z_size in range(64, 2049, 64):
            tiles = pair_tiles(x_size, z_size)
            assert sum(tiles.slices) == x_size
            assert tiles.width <= z_size
            assert all(size % tiles.y_columns == 0 for size in tiles.slices)
            assert 64 * tiles.width % (tiles.y_rows * tiles.y_columns) == 0  # so that views can have equal stages
            shared = 128 * max(*tiles.slices, tiles.width) * 2 + tiles.num_stages * 64 * tiles.width * 2
            assert shared <= 224 * 1024


@needs_mosaic
def test_flops_are_counted():
    pairs = KINDS["query gradients"]
    register_pairs(pairs)
    args, more = pair_arguments(pairs, length=512, chunk_size=256, keys=64, values=128, heads=2)
    found = count_flops(lambda args, more: gated_pairs(pairs, *args, **more), args, more)
    tokens, columns = 2 * 512, (128 + 256) // 2
    assert found.matmul == 2 * tokens * (columns * (64 + 128) + 64 * 128)
    a, c = args[2], args[0]
    sums = count_flops(running_sums, a, c, args[4]["row"], jnp.ones((1, 2, 2)))
    assert sums.matmul == 2 * tokens * 64 * 128
    assert found.notes == sums.notes == ()
