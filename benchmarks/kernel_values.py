"""Values of the matmul that writes products of gathered rows into their places, on the GPU that is here.

    PYTHONPATH=src python3 benchmarks/kernel_values.py           # a Hopper GPU
    PYTHONPATH=src python3 benchmarks/kernel_values.py --tiny    # the two smallest shapes, interpreted on a CPU

Whole numbers, whose products and sums are exact in float32, so that every element must be the same to the bit. Each
shape is run five times, since a missing barrier need not show in one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.parallel.matmul_kernel import can_write, write_product

# Devices, blocks of rows, where parts of a block's rows end, features of rows and of products.
SHAPES: list[tuple[int, int, tuple[int, ...], int, int, str]] = [
    (8, 1, (0, 16, 48), 128, 256, "bfloat16"),
    (2, 8, (0, 8, 24, 32), 64, 128, "float16"),
    (8, 1, (0, 144, 432, 1024, 2048), 4096, 3584, "bfloat16"),
    (8, 4, (0, 32, 104, 248, 512), 1024, 1792, "bfloat16"),
    (8, 1, (0, 704, 4096), 512, 1728, "bfloat16"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    with jax.set_mesh(jax.make_mesh((1,), ("one",))):
        wrong = [different(*shape, times=1 if tiny else 5) for shape in (SHAPES[:2] if tiny else SHAPES)]
    sys.exit(1 if any(wrong) else 0)


def different(
    size: int, blocks: int, edges: tuple[int, ...], depth: int, columns: int, dtype: str, *, times: int
) -> int:
    x = whole_numbers(0, (size, blocks, edges[-1], depth), dtype)
    w = whole_numbers(1, (depth, columns), dtype)
    assert can_write(x[0], [w], None, size), "not here: it needs a Hopper GPU, or a CPU, and jax 0.11"

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        out = None
        for start, end in itertools.pairwise(edges):
            rows = x[:, :, start:end].reshape(-1, depth)
            out = write_product(out, rows, w, size=size, num_blocks=blocks, shard_rows=edges[-1], start=start)
        return out

    in_order = jnp.moveaxis(x, 0, 1).reshape(-1, depth)
    true = jnp.dot(in_order, w, preferred_element_type=jnp.float32).astype(dtype)
    count = sum(int((run(x, w) != true).sum()) for _ in range(times))
    print(f"{size} x {blocks} x {edges} rows, {depth} -> {columns}, {dtype}: {count} elements differ", flush=True)
    return count


def whole_numbers(seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


if __name__ == "__main__":
    main()
