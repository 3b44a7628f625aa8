"""Compute time of overlapped matmuls on one GPU with a mocked topology of eight, against unsplit and naive rings.

    python benchmarks/collective_matmul.py                  # on a GPU: `jax_mock_gpu_topology`, collectives are mocked
    python benchmarks/collective_matmul.py --platform cpu   # 8 simulated devices, small shapes, everything is real
    python benchmarks/collective_matmul.py --batch 4        # rows as [4, rows / 4], and a gated MLP, as in a model

With mocked collectives, matmuls and copies are real and transfers take no time, so the ratio to the unsplit form is the
cost of splitting the matmul; the benefit of hidden transfers is not measured. Forms are timed in turns, in a new random
order each round, because a chip is slower after a form that heats it more; the table has medians. A mocked gather
returns whatever was in memory, such as NaNs, which heat the chip less. So free memory is filled with numbers first, and
the last column reports whether all results were finite.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import time
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
parser.add_argument("--repeats", type=int, default=15)
parser.add_argument("--ways", type=int, default=8)
parser.add_argument("--inner", type=int, default=8, help="calls per timing")
parser.add_argument("--shape", nargs=3, type=int, metavar=("ROWS", "DIM", "HIDDEN"), help="only this shape")
parser.add_argument("--batch", type=int, default=0, help="size of a leading batch dim (default: none)")
parser.add_argument("--only", help="only this operation: gather, scatter, or (with --batch) 'gated MLP'")
parser.add_argument("--json", action="store_true")
ARGUMENTS = parser.parse_args()

if ARGUMENTS.platform == "gpu":
    # Otherwise a mocked topology waits for autotuning results of nonexistent processes.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_shard_autotuning=false"
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.15")  # enough, and quick to fill

import jax  # noqa: E402

if ARGUMENTS.platform == "gpu":
    jax.config.update("jax_mock_gpu_topology", f"1x{ARGUMENTS.ways}x1")
else:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", ARGUMENTS.ways)

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from meshwright.parallel import Form, gather_matmul, matmul_scatter  # noqa: E402
from meshwright.parallel.overlap.forms import FORMS  # noqa: E402
from meshwright.plan.compiled.collectives import read_schedule  # noqa: E402

WAYS = ARGUMENTS.ways
LEAD = [None] if ARGUMENTS.batch else []
ROWS, COLUMNS, UP, DOWN = P(*LEAD, "tp", None), P(*LEAD, None, "tp"), P(None, "tp"), P("tp", None)
SHAPES = {
    "gpu": [(16384, 8192, 28672), (8192, 8192, 28672), (16384, 4096, 14336), (32768, 5120, 13824)],
    "cpu": [(1024, 256, 1024), (512, 512, 1024)],
}


def naive_gather_ring(x: Any, w: Any) -> Any:
    place, num_rows = lax.axis_index("tp"), x.shape[0]
    out = lax.pcast(jnp.zeros((num_rows * WAYS, w.shape[1]), x.dtype), "tp", to="varying")
    shard = x
    for hop in range(WAYS):
        arriving = lax.ppermute(shard, "tp", [(j, (j - 1) % WAYS) for j in range(WAYS)]) if hop < WAYS - 1 else None
        out = lax.dynamic_update_slice_in_dim(out, shard @ w, ((place + hop) % WAYS) * num_rows, 0)
        shard = arriving
    return out


def naive_scatter_ring(x: Any, w: Any) -> Any:
    place, num_rows = lax.axis_index("tp"), x.shape[0] // WAYS
    total: Any = None
    for hop in range(WAYS):
        start = ((place + WAYS - 1 - hop) % WAYS) * num_rows
        product = lax.dynamic_slice_in_dim(x, start, num_rows, 0) @ w
        if total is None:
            total = product
        else:
            total = lax.ppermute(total, "tp", [(j, (j + 1) % WAYS) for j in range(WAYS)]) + product
    return total


def unsplit_gather(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "tp", axis=x.ndim - 2, tiled=True) @ w


def unsplit_scatter(x: Any, w: Any) -> Any:
    return lax.psum_scatter(x @ w, "tp", scatter_dimension=x.ndim - 2, tiled=True)


def gated(gather: Any, scatter: Any) -> Any:
    """Returns a gated MLP, in which two weights share one gather."""

    def block(x: Any, gate: Any, up: Any, down: Any) -> Any:
        a, b = gather(x, (gate, up))
        return x + scatter(jax.nn.silu(a) * b, down)

    return block


def unsplit_gather_of_two(x: Any, weights: Any) -> Any:
    gathered = lax.all_gather(x, "tp", axis=x.ndim - 2, tiled=True)
    return tuple(gathered @ w for w in weights)


GATHER, SCATTER = functools.partial(gather_matmul, axis="tp"), functools.partial(matmul_scatter, axis="tp")
RINGS = FORMS[ARGUMENTS.platform]
EVEN, EVENER = Form(ring=False, parts=(1, 1, 1, 1)), Form(ring=False, parts=(2, 2, 3, 4, 5))
GATHER_RING = functools.partial(GATHER, form=RINGS["gather_matmul"])
SCATTER_RING = functools.partial(SCATTER, form=RINGS["matmul_scatter"])
OPERATIONS: dict[str, dict[str, Any]] = {
    "gather": {
        "unsplit": unsplit_gather,
        "naive ring": naive_gather_ring,
        "ours": GATHER,
        "ring": GATHER_RING,
        "parts": functools.partial(GATHER, form="parts"),
        "even parts": functools.partial(GATHER, form=Form(ring=False, parts=(1,) * 6)),
        "parts, XLA": functools.partial(GATHER, form="parts", kernels=False),
    },
    "scatter": {
        "unsplit": unsplit_scatter,
        "naive ring": naive_scatter_ring,
        "ours": SCATTER,
        "ring": SCATTER_RING,
        "parts": functools.partial(SCATTER, form="parts"),
        "even parts": functools.partial(SCATTER, form=EVEN),
        "evener parts": functools.partial(SCATTER, form=EVENER),
        "parts, XLA": functools.partial(SCATTER, form="parts", kernels=False),
    },
}
if ARGUMENTS.batch:
    for forms in OPERATIONS.values():
        del forms["naive ring"]  # cuts the first dim
    OPERATIONS["gated MLP"] = {
        "unsplit": gated(unsplit_gather_of_two, unsplit_scatter),
        "ours": gated(GATHER, SCATTER),
        "ours, XLA": gated(functools.partial(GATHER, kernels=False), functools.partial(SCATTER, kernels=False)),
        "ring": gated(GATHER_RING, SCATTER_RING),
    }


def build(mesh: Mesh, operation: str, form: Any, shape: tuple[int, int, int], dtype: Any) -> tuple[Any, Any, Any]:
    rows, dim, hidden = shape
    lead = (ARGUMENTS.batch, rows // ARGUMENTS.batch) if ARGUMENTS.batch else (rows,)
    up, down = ((dim, hidden), UP), ((hidden, dim), DOWN)
    operands, out = {
        "gather": ([((*lead, dim), ROWS), up], COLUMNS),
        "scatter": ([((*lead, hidden), COLUMNS), down], ROWS),
        "gated MLP": ([((*lead, dim), ROWS), up, up, down], ROWS),
    }[operation]
    specs = tuple(spec for _, spec in operands)
    program = jax.jit(jax.shard_map(form, mesh=mesh, in_specs=specs, out_specs=out))
    arguments = [jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec)) for size, spec in operands]
    compiled = program.lower(*arguments).compile()
    return compiled, arguments, read_schedule(compiled.as_text())


def make(struct: Any, seed: int) -> Any:
    """Returns random values; under a mocked topology only this process's device has any."""

    def piece(index: Any) -> Any:
        sizes = [len(range(*part.indices(size))) for part, size in zip(index, struct.shape, strict=True)]
        return jax.random.normal(jax.random.key(seed), sizes, struct.dtype)

    return jax.make_array_from_callback(struct.shape, struct.sharding, piece)


def time_calls(compiled: Any, values: Any) -> tuple[float, bool]:
    """Returns seconds per call and whether all results are finite."""
    if ARGUMENTS.platform == "gpu":
        fill_memory()
    for _ in range(ARGUMENTS.inner // 2 + 1):
        result = compiled(*values)
    jax.block_until_ready(result)
    begin = time.perf_counter()
    for _ in range(ARGUMENTS.inner):
        result = compiled(*values)
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - begin) / ARGUMENTS.inner
    shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(result)]
    return seconds, all(bool(jnp.isfinite(shard).all()) for shard in shards)


@functools.partial(jax.jit, static_argnums=1)
def repeated(x: Any, count: int) -> Any:
    return jnp.broadcast_to(x, (count, x.size))


def fill_memory() -> None:
    """Fills the free memory of this process's GPU with random numbers."""
    device, pattern = jax.local_devices()[0], jax.random.normal(jax.random.key(0), (1 << 20,), jnp.bfloat16)
    filled = []
    for _ in range(64):
        count = device.memory_stats()["largest_free_block_bytes"] // pattern.nbytes
        if not count:
            break
        filled.append(jax.block_until_ready(repeated(pattern, count)))


def main() -> None:
    dtype = jnp.bfloat16 if ARGUMENTS.platform == "gpu" else jnp.float32
    mesh = Mesh(jax.devices()[:WAYS], ("tp",), axis_types=(AxisType.Auto,))
    found = []
    shapes = [tuple(ARGUMENTS.shape)] if ARGUMENTS.shape else SHAPES[ARGUMENTS.platform]
    for shape in shapes:
        for operation, forms in OPERATIONS.items():
            if ARGUMENTS.only not in (None, operation):
                continue
            built, timings, finite = {}, {name: [] for name in forms}, dict.fromkeys(forms, True)
            for name, form in forms.items():
                try:
                    built[name] = build(mesh, operation, form, shape, dtype)
                except Exception as error:  # report forms that do not compile and continue
                    print(f"{operation} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            arguments = next(iter(built.values()))[1]
            values = [make(struct, seed) for seed, struct in enumerate(arguments)]
            for repeat in range(ARGUMENTS.repeats + 2):
                for name in random.Random(repeat).sample(list(built), len(built)):
                    seconds, numbers = time_calls(built[name][0], values)
                    if repeat >= 2:
                        timings[name].append(seconds)
                        finite[name] &= numbers
            base = statistics.median(timings["unsplit"])
            for name, (_, _, schedule) in built.items():
                median = statistics.median(timings[name])
                asynchronous = f"{sum(c.is_async for c in schedule.collectives)}/{schedule.count()}"
                hidden = f"{schedule.num_hidden}/{schedule.count()}"
                row = {
                    "shape": "x".join(map(str, shape)),
                    "operation": operation,
                    "form": name,
                    "ms": round(median * 1e3, 3),
                    "over_unsplit": round(median / base, 3),
                    "async": asynchronous,
                    "hidden": hidden,
                    "finite": finite[name],
                }
                found.append(row)
                if not ARGUMENTS.json:
                    widths = (18, 9, 16, 8, 7, 6, 6, 5)
                    print("  ".join(f"{v!s:>{w}}" for v, w in zip(row.values(), widths, strict=True)), flush=True)
    if ARGUMENTS.json:
        print(json.dumps({"jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
