"""Checks the values of all kernels but those of the mLSTM's chunks (`mlstm_h200.py --values`) on the local GPU.

    PYTHONPATH=src python3 benchmarks/kernel_values.py           # a Hopper GPU
    PYTHONPATH=src python3 benchmarks/kernel_values.py --tiny    # the smallest shapes, interpreted on a CPU

Products of gathered rows, symmetric products and tokens of a recurrence use integers, which are exact in float32, so
every element must match to the bit; so must the columns of a cut weight, stacked arrays and casts to fp8. Gradients of
norms (also of heads, with their gate) and of the loss are compared with XLA in float32, relative to the largest
element. Each shape runs five times, because a missing barrier may not show in a single run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.parallel.fp8.casting import quantize
from meshwright.parallel.kernels.copy_kernels import cut_columns, stack
from meshwright.parallel.kernels.gradient_kernels import residual_norm, softmax_gradient
from meshwright.parallel.kernels.head_norm_kernel import (
    fits_heads,
    gated_head_norm,
    head_norm_forward,
    head_norm_gradient,
)
from meshwright.parallel.kernels.matmul_kernel import can_write, write_product
from meshwright.parallel.kernels.symmetric_kernel import symmetric_product
from meshwright.parallel.kernels.token_kernel import advance_memory, fits_token
from meshwright.parallel.tensor import sequence_norm

# Devices, blocks of rows, row boundaries of the parts, features of rows and of products, dtype.
PRODUCTS: list[tuple[int, int, tuple[int, ...], int, int, str]] = [
    (8, 1, (0, 16, 48), 128, 256, "bfloat16"),
    (2, 8, (0, 8, 24, 32), 64, 128, "float16"),
    (8, 1, (0, 144, 432, 1024, 2048), 4096, 3584, "bfloat16"),
    (8, 4, (0, 32, 104, 248, 512), 1024, 1792, "bfloat16"),
    (8, 1, (0, 704, 4096), 512, 1728, "bfloat16"),
]
# Number of matrices, their rows and features, dtype.
MIRRORS: list[tuple[int, int, int, str]] = [
    (1, 128, 64, "bfloat16"),
    (2, 384, 128, "float16"),
    (16, 2048, 2048, "float16"),
    (4, 2048, 5632, "float16"),
]
# Rows of a weight, column boundaries of its parts, dtype.
CUTS: list[tuple[int, tuple[int, ...], str]] = [
    (64, (0, 256, 768), "bfloat16"),
    (24, (0, 384, 448), "float32"),
    (3584, (0, 512, 1536, 3584, 8192), "bfloat16"),
    (1792, (0, 1024, 2048, 3072, 4096), "bfloat16"),
    (1728, (0, 1280, 2560, 3840, 5120), "bfloat16"),
]
# Number of arrays, their shape, dtype.
STACKS: list[tuple[int, tuple[int, ...], str]] = [(6, (64, 128), "bfloat16"), (16, (2048, 1408), "bfloat16")]
# Rows, columns, fp8 dtype.
CASTS: list[tuple[int, int, str]] = [
    (128, 256, "float8_e4m3fn"),
    (256, 128, "float8_e5m2"),
    (4096, 2048, "float8_e4m3fn"),
    (2048, 5632, "float8_e5m2"),
]
# Rows, heads, features of keys and of values.
TOKENS: list[tuple[int, int, int, int]] = [
    (1, 2, 128, 128),
    (2, 3, 256, 384),
    (70, 4, 128, 128),
    (1, 1, 128, 4096),
    (1, 4, 256, 512),
    (32, 8, 256, 512),
]
# Rows, features, dtype, largest relative difference: two roundings to bfloat16, or float32 in another order.
NORMS: list[tuple[int, int, str, float]] = [
    (70, 256, "bfloat16", 8e-3),
    (37, 384, "float32", 2e-6),
    (32768, 2048, "bfloat16", 8e-3),
    (4100, 4096, "float32", 4e-6),
]
# Rows, heads, features of a head, dtype, largest relative difference, as above.
HEADS: list[tuple[int, int, int, str, float]] = [
    (70, 2, 64, "bfloat16", 8e-3),
    (37, 3, 96, "float32", 4e-6),
    (32768, 4, 512, "bfloat16", 8e-3),
    (4099, 8, 256, "float32", 4e-6),
    (1025, 2, 1024, "float32", 4e-6),
]
# Rows, logits, dtype, largest relative difference.
LOSSES: list[tuple[int, int, str, float]] = [
    (6, 2056, "float32", 1e-5),
    (5, 5120, "bfloat16", 8e-3),
    (4096, 50304, "bfloat16", 8e-3),
    (8192, 32768, "bfloat16", 8e-3),
    (257, 128256, "float32", 1e-5),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    times, few = (1, 2) if tiny else (5, None)
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(jax.sharding.AxisType.Auto,))):
        found = {f"products {shape}": wrong_products(*shape, times=times) for shape in PRODUCTS[:few]}
        found |= {f"symmetric products {shape}": wrong_mirrors(*shape, times=times) for shape in MIRRORS[:few]}
        found |= {f"cuts {shape}": wrong_cuts(*shape, times=times) for shape in CUTS[:few]}
        found |= {f"stacks {shape}": wrong_stacks(*shape, times=times) for shape in STACKS[: few and 1]}
        found |= {f"casts {shape}": wrong_casts(*shape, times=times) for shape in CASTS[:few]}
        found |= {f"tokens {shape}": wrong_tokens(*shape, times=times) for shape in TOKENS[:few]}
        apart = {f"norms {shape}": norm_differences(*shape[:3], times=times) for shape in NORMS[:few]}
        apart |= {f"heads {shape}": head_norm_differences(*shape[:4], times=times) for shape in HEADS[:few]}
        apart |= {f"losses {shape}": loss_differences(*shape[:3], times=times) for shape in LOSSES[:few]}
    for what, count in found.items():
        print(f"{what}: {count} elements differ")
    tables: dict[str, list[Any]] = {"norms": NORMS, "heads": HEADS, "losses": LOSSES}
    allowed = {f"{what} {shape}": shape[-1] for what, shapes in tables.items() for shape in shapes}
    for what, differences in apart.items():
        print(f"{what}: {' '.join(f'{name} {value:.1e}' for name, value in differences.items())}")
    far = [what for what, differences in apart.items() if not max(differences.values()) <= allowed[what]]
    print(f"{sum(map(bool, found.values())) + len(far)} cases fail {' '.join(far)}")
    sys.exit(1 if any(found.values()) or far else 0)


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


def wrong_mirrors(count: int, rows: int, features: int, dtype: str, *, times: int = 1) -> int:
    """Returns the number of wrong elements in symmetric products."""
    x = whole_numbers(0, (count, rows, features), dtype)
    wide = np.asarray(x, np.float32)
    expected = np.asarray(jnp.asarray(0.5 * wide @ wide.transpose(0, 2, 1) + 3 * np.eye(rows), dtype))
    found = [np.asarray(symmetric_product(x, x, scale=0.5, diagonal=3.0)) for _ in range(times)]
    return sum(int((one != expected).sum()) for one in found)


def wrong_cuts(rows: int, edges: tuple[int, ...], dtype: str, *, times: int = 1) -> int:
    """Returns the number of wrong elements in the parts of a weight cut by the kernel."""
    w = jax.random.normal(jax.random.key(0), (rows, edges[-1]), dtype)
    pairs = list(itertools.pairwise(edges))[::-1]
    run = jax.jit(lambda w: cut_columns(w, pairs, kernels=True))
    parts = [zip(run(w), pairs, strict=True) for _ in range(times)]
    return sum(int((part != w[:, start:end]).sum()) for cut in parts for part, (start, end) in cut)


def wrong_stacks(count: int, shape: tuple[int, ...], dtype: str, *, times: int = 1) -> int:
    """Returns the number of wrong elements in stacked arrays."""
    arrays = [jax.random.normal(jax.random.key(seed), shape, dtype) for seed in range(count)]
    run = jax.jit(lambda arrays: stack(arrays, kernels=True))
    return sum(int((run(arrays) != jnp.stack(arrays)).sum()) for _ in range(times))


def wrong_casts(rows: int, columns: int, dtype: str, *, times: int = 1) -> int:
    """Returns the number of wrong elements in a matrix cast to fp8 and in its transpose; a wrong amax counts as all."""
    x = 3 * jax.random.normal(jax.random.key(0), (rows, columns), "bfloat16")
    amax = jnp.float32(8.0)  # Some elements saturate.
    plain = jax.jit(lambda x: quantize(x, amax, jnp.dtype(dtype)))(x)
    run = jax.jit(lambda x: quantize(x, amax, jnp.dtype(dtype), kernels=True))
    wrong = 0
    for _ in range(times):
        found = run(x)
        assert found.turned is not None
        wide = [part.astype(jnp.float32) for part in (found.value, found.turned.T, plain.value)]
        wrong += sum(int((part != wide[2]).sum()) for part in wide[:2])
        wrong += x.size if float(found.amax) != float(plain.amax) else 0
    return wrong


def wrong_tokens(rows: int, heads: int, keys: int, values: int, *, times: int = 1) -> int:
    """Returns the number of wrong elements after a token of a recurrence, in memories, normalisers and reads."""
    assert fits_token(keys, values), "the kernel does not support this size"
    shapes = [(rows, heads, keys, values), *[(rows, heads, keys)] * 3, (rows, heads, values), *[(rows, heads)] * 2]
    kinds = ["float32", "float32", *["bfloat16"] * 3, "float32", "float32"]
    given = [whole_numbers(seed, *made) for seed, made in enumerate(zip(shapes, kinds, strict=True))]
    memory, normaliser, q, k, v, keep, gain = (np.asarray(array, np.float64) for array in given)
    added = gain[..., None] * k
    memory = keep[..., None, None] * memory + added[..., None] * v[..., None, :]
    normaliser = keep[..., None] * normaliser + added
    true = memory, normaliser, np.einsum("bhk,bhkv->bhv", q, memory), (q * normaliser).sum(-1)
    run = jax.jit(lambda *given: advance_memory(*given))
    found = [run(*given) for _ in range(times)]
    return sum(int((np.asarray(one) != exact).sum()) for made in found for one, exact in zip(made, true, strict=True))


def norm_differences(rows: int, features: int, dtype: str, *, times: int = 1) -> dict[str, float]:
    """Returns the largest relative differences of both gradients of a norm with a residual stream."""
    keys = jax.random.split(jax.random.key(0), 4)
    h, *grads = (jax.random.normal(key, (rows, features), dtype) for key in keys[:3])
    scale = 1 + jax.random.normal(keys[3], (features,))

    @jax.jit
    def exactly(h: Any, scale: Any, grads: Any) -> Any:
        h, grads = jax.tree.map(lambda x: x.astype(jnp.float32), (h, grads))
        return jax.vjp(lambda h, scale: (h, sequence_norm(h, scale, axis=None)), h, scale)[1](tuple(grads))

    @jax.jit
    def run(h: Any, scale: Any, grads: Any) -> Any:
        return jax.vjp(lambda h, scale: residual_norm(h, scale, axis=None, kernels=True), h, scale)[1](tuple(grads))

    true = exactly(h, scale, grads)
    return largest_differences(("h", "scale"), lambda: run(h, scale, grads), true, times)


def head_norm_differences(rows: int, heads: int, features: int, dtype: str, *, times: int = 1) -> dict[str, float]:
    """Returns the largest relative differences of a gated head norm, its gradients and dots; some rows do not count."""
    keys = jax.random.split(jax.random.key(0), 4)
    h = jax.random.normal(keys[0], (1, rows, heads, features), dtype)
    gate, d_y = (2 * jax.random.normal(key, (1, rows, heads * features), dtype) for key in keys[1:3])
    scale, eps = 1 + jax.random.normal(keys[3], (heads * features,)), 0.1
    keep = (jnp.arange(rows) % 5 != 3)[None]
    assert fits_heads(h, gate), "the kernel does not support this size"

    @jax.jit
    def exactly(*given: Any) -> Any:
        h, gate, scale, d_y = (x.astype(jnp.float32) for x in given)

        def norm(h: Any, *others: Any) -> Any:
            return gated_head_norm(jnp.where(keep[..., None, None], h, 0), *others, eps=eps, kernels=False)

        y, pull = jax.vjp(norm, h, gate, scale)
        d_h, *others = pull(d_y)
        return y, d_h, *others, jnp.sum(d_h * h, axis=-1)

    def run(h: Any, gate: Any, scale: Any, d_y: Any) -> Any:
        counts = keep.astype(jnp.float32)
        return head_norm_forward(eps, h, gate, scale, counts), *head_norm_gradient(eps, h, gate, scale, d_y, counts)

    given = h, gate, scale, d_y
    return largest_differences(("y", "h", "gate", "scale", "dots"), lambda: run(*given), exactly(*given), times)


def loss_differences(rows: int, size: int, dtype: str, *, times: int = 1) -> dict[str, float]:
    """Returns the largest relative differences of the gradient of a cross-entropy and its statistics."""
    logits = 4 * jax.random.normal(jax.random.key(0), (rows, size), dtype)
    targets = jax.random.randint(jax.random.key(1), (rows,), 0, size)
    factors = jax.random.uniform(jax.random.key(2), (rows,))

    @jax.jit
    def exactly(logits: Any) -> Any:
        wide = logits.astype(jnp.float32)
        log_sum = jax.nn.logsumexp(wide, axis=1)
        of_target = jnp.take_along_axis(wide, targets[:, None], axis=1)[:, 0]
        d_logits = jnp.exp(wide - log_sum[:, None]) - jax.nn.one_hot(targets, size, dtype=jnp.float32)
        return d_logits * factors[:, None], log_sum, of_target, jnp.argmax(wide, axis=1)

    @jax.jit
    def others(got: Any, true: Any) -> Any:
        """The largest difference of a logit that is no target, relative to itself."""
        apart = jnp.abs(got.astype(jnp.float32) - true) / (jnp.abs(true) + 1e-6)
        return jnp.max(jnp.where(jnp.arange(size) == targets[:, None], 0, apart))

    run, true = jax.jit(lambda logits: softmax_gradient(logits, targets, factors)), exactly(logits)
    names = "d_logits", "log_sum", "of_target", "place"
    found = largest_differences(names, lambda: run(logits), true, times)
    return found | {"others": float(others(run(logits).d_logits, true[0]))}


def largest_differences(names: Any, run: Any, true: Any, times: int) -> dict[str, float]:
    """Returns the largest difference of each array in any run, relative to its largest element."""

    @jax.jit
    def compare(got: Any, true: Any) -> Any:
        got, true = got.astype(jnp.float32), true.astype(jnp.float32)
        return jnp.max(jnp.abs(got - true)) / jnp.max(jnp.abs(true))

    found = [[float(compare(got, exact)) for got, exact in zip(run(), true, strict=True)] for _ in range(times)]
    return {name: float(np.max([values[place] for values in found])) for place, name in enumerate(names)}


def whole_numbers(seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


if __name__ == "__main__":
    main()
