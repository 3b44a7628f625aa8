"""Linear layer and cross-entropy with gradients, chunked, against forms that keep all logits.

Computes the loss and the gradients of `x` and `head` in bfloat16 with float32 losses. Kept logits are bfloat16, with a
float32 log-softmax and plain autodiff. The target's entry is selected by index, the usual form, or by comparison, whose
gradient XLA fuses. Times are medians of synchronized calls, all forms in turns; memory is the compiled program's
temporary memory. Ratios are to the faster form that keeps logits; the last column is relative to the form by index.

usage: python benchmarks/cross_entropy.py [--rows 32768] [--dim 4096] [--vocab 131072] [--chunks 1024 4096] [--tiny]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from measure import machine, median, spread, table, verdict, versions

from meshwright.parallel import linear_cross_entropy

BY_INDEX, BY_COMPARISON, OURS = "kept, by index", "kept, by comparison", "ours"


def kept(x: Any, head: Any, targets: Any, *, by_index: bool) -> Any:
    log_p = jax.nn.log_softmax((x @ head).astype(jnp.float32))
    if by_index:
        return -jnp.take_along_axis(log_p, targets[:, None], axis=-1).sum()
    places = lax.broadcasted_iota(jnp.int32, log_p.shape, 1)
    return -jnp.where(places == targets[:, None], log_p, 0.0).sum()


def chunked(x: Any, head: Any, targets: Any, **options: Any) -> Any:
    return linear_cross_entropy(x, head, targets, **options).total


def three_matmuls(x: Any, head: Any, targets: Any) -> Any:
    """The matmuls that every form needs."""
    logits = lax.optimization_barrier(x @ head)
    return logits[0, 0].astype(jnp.float32), (logits @ head.T, x.T @ logits)


def forms(chunks: list[int]) -> dict[str, Callable[..., Any]]:
    losses = {
        BY_COMPARISON: functools.partial(kept, by_index=False),
        BY_INDEX: functools.partial(kept, by_index=True),
        "kept, by index, checkpoint": jax.checkpoint(functools.partial(kept, by_index=True)),
        OURS: chunked,
        "ours, float32 logits": functools.partial(chunked, logits_dtype=jnp.float32),
        **{f"ours, {rows} rows": functools.partial(chunked, chunk_rows=rows) for rows in chunks},
    }
    return {
        "three matmuls alone": three_matmuls,
        **{name: jax.value_and_grad(loss, argnums=(0, 1)) for name, loss in losses.items()},
    }


def make_arguments(rows: int, dim: int, vocab: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (rows, dim), jnp.bfloat16),
        jax.random.normal(keys[1], (dim, vocab), jnp.bfloat16) * jnp.bfloat16(dim**-0.5),
        jax.random.randint(keys[2], (rows,), 0, vocab),
    )


@jax.jit
def differences(got: Any, true: Any) -> Any:
    """Returns the relative difference of loss and gradients."""

    def norm(leaf: Any) -> Any:
        return jnp.sqrt(jnp.sum(jnp.square(leaf), dtype=jnp.float32))

    return jax.tree.map(lambda a, b: norm(a.astype(jnp.float32) - b.astype(jnp.float32)) / norm(b), got, true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--chunks", type=int, nargs="*", default=[1024, 4096, 8192], help="rows per chunk to try")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="small sizes for a CPU, without a verdict")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.rows, args.dim, args.vocab, args.chunks = 1024, 64, 8192, [128]

    arguments = jax.block_until_ready(
        jax.jit(make_arguments, static_argnums=(0, 1, 2))(args.rows, args.dim, args.vocab)
    )
    built, seconds, apart, true = {}, {}, {}, None
    for name, form in forms(args.chunks).items():
        built[name], seconds[name] = jax.jit(form).lower(*arguments).compile(), []
        result = jax.block_until_ready(built[name](*arguments))
        true = result if name == BY_COMPARISON else true
        if true is not None:
            apart[name] = max(float(leaf) for leaf in jax.tree.leaves(differences(result, true)))
        del result
    true = None
    for _ in range(args.rounds):
        for name, program in built.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds[name].append(time.perf_counter() - begin)

    memory = {name: program.memory_analysis().temp_size_in_bytes for name, program in built.items()}
    times = {name: median(values) for name, values in seconds.items()}
    best = min((BY_COMPARISON, BY_INDEX), key=lambda name: times[name])
    rows = [
        {
            "form": name,
            "ms": round(times[name] * 1e3, 1),
            "range_ms": spread(seconds[name]),
            "time": round(times[name] / times[best], 3),
            "gib": round(memory[name] / 2**30, 2),
            "memory": round(memory[name] / memory[best], 3),
            "apart": apart.get(name),
            "by_index": (round(times[name] / times[BY_INDEX], 3), round(memory[name] / memory[BY_INDEX], 3)),
        }
        for name in built
    ]
    device = jax.devices()[0].device_kind
    about = {"sizes": [args.rows, args.dim, args.vocab], "device": device, "versions": versions("jax", "jaxlib")}
    if args.json:
        print(json.dumps(about | {"rows": rows}, indent=1))
    else:
        print(f"{args.rows} tokens, D {args.dim}, vocabulary {args.vocab}, bfloat16; {device}; {machine()}")
        print(", ".join(f"{name} {version}" for name, version in about["versions"].items()), end="\n\n")
        cells = [
            (
                row["form"],
                f"{row['ms']} ({row['range_ms']})",
                f"{row['time']:.3f}x",
                f"{row['gib']:.2f} GiB",
                f"{row['memory']:.3f}x",
                "-" if row["apart"] is None else f"{row['apart']:.1e}",
                f"{row['by_index'][0]:.3f}x, {row['by_index'][1]:.3f}x",
            )
            for row in rows
        ]
        print(table(["form", "ms", "time", "temporary", "memory", "apart", "to by index"], cells))
    if args.tiny:
        return
    ours = next(row for row in rows if row["form"] == OURS)
    judged = {
        f"time {ours['time']:.3f}x, at most 1.05x": ours["time"] <= 1.05,
        f"memory {ours['memory']:.3f}x, at most 0.2x": ours["memory"] <= 0.2,
    }
    if not args.json:
        print("\n" + "\n".join(verdict(text, met) for text, met in judged.items()))
    sys.exit(not all(judged.values()))


if __name__ == "__main__":
    main()
