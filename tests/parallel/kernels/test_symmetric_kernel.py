"""The kernel for symmetric products: whole products with half of the work, to the bit, and where it can run."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshwright.hardware.flops import count_flops
from meshwright.parallel.kernels import symmetric_kernel
from meshwright.parallel.kernels.symmetric_kernel import can_mirror, symmetric_product

needs_refs = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 cannot interpret the kernel")


@needs_refs
@pytest.mark.parametrize(
    ("count", "rows", "features", "dtype"),
    [(1, 128, 64, "bfloat16"), (1, 256, 64, "bfloat16"), (2, 384, 128, "float16")],  # 1, 3 and 2 x 6 tiles
)
def test_products_are_whole_and_symmetric(count, rows, features, dtype):
    values = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "kernel_values.py"))
    assert values["wrong_mirrors"](count, rows, features, dtype) == 0


@needs_refs
def test_operations_count_as_those_of_a_whole_product():
    x = jax.ShapeDtypeStruct((3, 256, 128), jnp.float16)
    assert count_flops(lambda x: symmetric_product(x, x), x).matmul == 2 * 3 * 256 * 256 * 128


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "works"),
    [
        (2048, 5632, "float16", True),
        (256, 64, "bfloat16", True),
        (2048, 5632, "float32", False),
        (2176, 2048, "float16", True),
        (2112, 2048, "float16", False),  # half of a tile
        (2048, 100, "float16", False),
        (0, 64, "float16", False),
    ],
)
def test_shapes_and_dtypes_that_fit(rows, features, dtype, works, monkeypatch):
    monkeypatch.setattr(symmetric_kernel, "uses_hopper_kernels", lambda wanted: True)
    assert can_mirror(rows, features, dtype) is works


def test_a_cpu_uses_matmuls_of_xla_by_default():
    assert not can_mirror(2048, 2048, "float16")
