"""Checks the values of the kernels for matmuls in parts on the local GPU.

    PYTHONPATH=src python3 benchmarks/kernel_values.py           # a Hopper GPU
    PYTHONPATH=src python3 benchmarks/kernel_values.py --tiny    # the smallest shapes, interpreted on a CPU

Products of gathered rows use integers, which are exact in float32, so every element must match to the bit; so must the
columns of a cut weight. Each shape runs five times, because a missing barrier may not show in a single run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.parallel.kernels.copy_kernels import cut_columns
from meshwright.parallel.kernels.matmul_kernel import can_write, write_product

# Devices, blocks of rows, row boundaries of the parts, features of rows and of products, dtype.
PRODUCTS: list[tuple[int, int, tuple[int, ...], int, int, str]] = [
    (8, 1, (0, 16, 48), 128, 256, "bfloat16"),
    (2, 8, (0, 8, 24, 32), 64, 128, "float16"),
    (8, 1, (0, 144, 432, 1024, 2048), 4096, 3584, "bfloat16"),
    (8, 4, (0, 32, 104, 248, 512), 1024, 1792, "bfloat16"),
    (8, 1, (0, 704, 4096), 512, 1728, "bfloat16"),
]
# Rows of a weight, column boundaries of its parts, dtype.
CUTS: list[tuple[int, tuple[int, ...], str]] = [
    (64, (0, 256, 768), "bfloat16"),
    (24, (0, 384, 448), "float32"),
    (3584, (0, 512, 1536, 3584, 8192), "bfloat16"),
    (1792, (0, 1024, 2048, 3072, 4096), "bfloat16"),
    (1728, (0, 1280, 2560, 3840, 5120), "bfloat16"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    times, few = (1, 2) if tiny else (5, None)
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))):
        found = {f"products {shape}": wrong_products(*shape, times=times) for shape in PRODUCTS[:few]}
        found |= {f"cuts {shape}": wrong_cuts(*shape, times=times) for shape in CUTS[:few]}
    for what, count in found.items():
        print(f"{what}: {count} elements differ")
    sys.exit(1 if any(found.values()) else 0)


def wrong_products(
    size: int, blocks: int, edges: tuple[int, ...], depth: int, columns: int, dtype: str, *, times: int = 1
) -> int:
    """Returns the number of wrong elements in products of rows gathered in parts."""
    x = whole_numbers(0, (size, blocks, edges[-1], depth), dtype)
    w = whole_numbers(1, (depth, columns), dtype)
    assert can_write(x[0], [w], None, size), "needs a Hopper GPU or a CPU, and jax 0.11"

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        out = None
        for start, end in itertools.pairwise(edges):
            rows = x[:, :, start:end].reshape(-1, depth)
            out = write_product(out, rows, w, size=size, num_blocks=blocks, shard_rows=edges[-1], start=start)
        return out

    in_order = jnp.moveaxis(x, 0, 1).reshape(-1, depth)
    true = jnp.dot(in_order, w, preferred_element_type=jnp.float32).astype(dtype)
    return sum(int((run(x, w) != true).sum()) for _ in range(times))


def wrong_cuts(rows: int, edges: tuple[int, ...], dtype: str, *, times: int = 1) -> int:
    """Returns the number of wrong elements in the parts of a weight cut by the kernel."""
    w = jax.random.normal(jax.random.key(0), (rows, edges[-1]), dtype)
    pairs = list(itertools.pairwise(edges))[::-1]
    run = jax.jit(lambda w: cut_columns(w, pairs, kernels=True))
    parts = [zip(run(w), pairs, strict=True) for _ in range(times)]
    return sum(int((part != w[:, start:end]).sum()) for cut in parts for part, (start, end) in cut)


def whole_numbers(seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


if __name__ == "__main__":
    main()
