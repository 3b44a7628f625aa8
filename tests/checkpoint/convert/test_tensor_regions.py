"""Regions of tensors in files: every cast, transposed or not, in any split, by exactly the bytes that are wanted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.checkpoint.convert import tensor_regions
from meshwright.checkpoint.convert.tensor_regions import Region, StoredTensor, fill_regions, zero_array

ROWS, COLUMNS, FIRST = 530, 300, 40  # beyond one block of the transpose


@pytest.fixture(params=[2**21, 7000], ids=["one read", "many reads"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(tensor_regions, "CHUNK", request.param)


@pytest.mark.parametrize("kinds", [*itertools.product(["bfloat16", "float16", "float32"], repeat=2)], ids="-".join)
def test_regions_equal_slices(kinds, chunk, tmp_path):
    stored, wanted = map(jnp.dtype, kinds)
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(stored)
    path = tmp_path / "data"
    path.write_bytes(b"x" * FIRST + values.tobytes())
    tensor = StoredTensor(path, values.shape, stored, FIRST)
    spans = list(itertools.product([(0, 265), (265, 530)], [(0, 100), (200, 300)]))
    for turned in (False, True):
        targets = [zero_array((b - a, d - c)[:: -1 if turned else 1], wanted) for (a, b), (c, d) in spans]
        regions = [
            Region(rows, columns, target.T if turned else target)
            for (rows, columns), target in zip(spans, targets, strict=True)
        ]
        assert fill_regions([(tensor, regions)], targets) == ROWS * 200 * stored.itemsize  # 100 columns are not read
        for ((a, b), (c, d)), target in zip(spans, targets, strict=True):
            expected = values[a:b, c:d].astype(wanted)
            np.testing.assert_array_equal(target, expected.T if turned else expected)


def test_special_values_survive_the_cast_by_bits(tmp_path):
    values = np.array([[np.inf, -np.inf, np.nan, -0.0, 1e-40, 3e38]], jnp.bfloat16)
    (tmp_path / "data").write_bytes(values.tobytes())
    out = np.empty(values.shape, np.float32)
    tensor = StoredTensor(tmp_path / "data", values.shape, values.dtype, 0)
    fill_regions([(tensor, [Region((0, 1), (0, 6), out)])])
    np.testing.assert_array_equal(out, values.astype(np.float32))
    assert np.signbit(out[0, 3])


def test_a_file_that_became_shorter_is_an_error(tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    tensor = StoredTensor(tmp_path / "data", (2, 2), jnp.dtype("float32"), 0)
    with pytest.raises(OSError, match="data ends early"):
        fill_regions([(tensor, [Region((0, 2), (0, 2), np.empty((2, 2), np.float32))])])


def test_large_arrays_are_used_without_a_copy_and_survive_donation():
    host = zero_array((1024, 512), np.float32)
    host[...] = 3
    device = jax.devices()[0]
    placed, replica = jax.device_put(host, device), jax.device_put(host, jax.devices()[1])
    assert placed.unsafe_buffer_pointer() == replica.unsafe_buffer_pointer() == host.ctypes.data
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(placed)
    assert float(result[0, 0]) == 4
    assert float(replica[5, 5]) == host[5, 5] == 3  # the replica shares the memory, and keeps its values
