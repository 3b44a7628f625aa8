"""Overlapped matmuls, compiled ahead of time for hardware you don't have.

    python benchmarks/overlap.py --targets v5e:16x16 v5p:4x4x8 v6e:16x16 h200:1x8

For each operation and form: collectives hidden behind a matmul, bytes sent per device over the least possible, the
compiler's estimate of compute cycles over that of the unsplit form (TPUs only), and temporary memory. Needs the `tpu`
or `gpu` extra; no hardware is used or timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.linen import async_gather, async_scatter
from meshwright.parallel import gather_matmul, matmul_scatter
from meshwright.plan.compiled.collectives import ProgramSchedule, read_schedule
from meshwright.plan.compiled.topology import can_compile_for, target_devices, target_mesh

ROWS, COLUMNS = P("tp", None), P(None, "tp")
WAYS = {"v5e": 16, "v5p": 8, "v6e": 16, "h200": 8}


def whole_gather(x: Any, w: Any) -> Any:
    return lax.all_gather(x, "tp", axis=0, tiled=True) @ w


def whole_scatter(x: Any, w: Any) -> Any:
    return lax.psum_scatter(x @ w, "tp", scatter_dimension=0, tiled=True)


def ours_gather(x: Any, w: Any) -> Any:
    return gather_matmul(x, w, axis="tp")


def ours_scatter(x: Any, w: Any) -> Any:
    return matmul_scatter(x, w, axis="tp")


def seed_gather(x: Any, w: Any) -> Any:
    """The older toolkit's form: features are split, and each device multiplies every arriving slice."""
    size, place = lax.axis_size("tp"), lax.axis_index("tp")
    width = x.shape[-1]
    parts = async_gather(x, "tp")
    return sum(
        part @ lax.dynamic_slice_in_dim(w, lax.rem(place - k + size, size) * width, width, 0)
        for k, part in enumerate(parts)
    )


def seed_scatter(x: Any, w: Any) -> Any:
    size, place = lax.axis_size("tp"), lax.axis_index("tp")
    width = w.shape[-1] // size
    cut = [lax.dynamic_slice_in_dim(w, lax.rem(place + size - 1 - k, size) * width, width, 1) for k in range(size)]
    return async_scatter([x @ part for part in cut], "tp")


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, d: jax.vjp(f, x, w)[1](d)


def mlp(gather: Callable[..., Any], scatter: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, up, down: x + scatter(jax.nn.gelu(gather(x, up)), down)


def both_passes(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with output and all gradients of a block, so that neither pass is dropped."""

    def run(x: Any, up: Any, down: Any, d: Any) -> Any:
        y, pull = jax.vjp(block, x, up, down)
        return y, pull(d)

    return run


def unrolled(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns both passes of two consecutive layers, whose temporary memory must not add up."""

    def run(x: Any, ups: Any, downs: Any, d: Any) -> Any:
        y, pull = jax.vjp(lambda x, ups, downs: block(block(x, ups[0], downs[0]), ups[1], downs[1]), x, ups, downs)
        return y, pull(d)

    return run


def scanned(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns both passes of four checkpointed layers in a scan."""

    def layers(x: Any, ups: Any, downs: Any) -> Any:
        return lax.scan(lambda c, w: (jax.checkpoint(block)(c, *w), None), x, (ups, downs))[0]

    return both_passes(layers)


def cases(s: int, d: int, f: int) -> dict[str, tuple[dict[str, Any], tuple[Any, ...], Any, tuple[Any, ...], float]]:
    """Returns forms, in_specs, out_specs, shapes and least bytes (in gathered operands) of each operation."""
    forms = {"ours": (ours_gather, ours_scatter), "unsplit": (whole_gather, whole_scatter)}
    stack_c, stack_r = P(None, None, "tp"), P(None, "tp", None)
    block_in, block_out = (ROWS, COLUMNS, ROWS, ROWS), (ROWS, (ROWS, COLUMNS, ROWS))
    scan_in, scan_out = (ROWS, stack_c, stack_r, ROWS), (ROWS, (ROWS, stack_c, stack_r))
    return {
        "gather": ({k: g for k, (g, _) in forms.items()}, (ROWS, COLUMNS), COLUMNS, ((s, d), (d, f)), 1),
        "scatter": ({k: r for k, (_, r) in forms.items()}, (COLUMNS, ROWS), ROWS, ((s, f), (f, d)), 1),
        "gather grad": (
            {k: gradient(g) for k, (g, _) in forms.items()},
            (ROWS, COLUMNS, COLUMNS),
            (ROWS, COLUMNS),
            ((s, d), (d, f), (s, f)),
            2,
        ),
        "scatter grad": (
            {k: gradient(r) for k, (_, r) in forms.items()},
            (COLUMNS, ROWS, ROWS),
            (COLUMNS, ROWS),
            ((s, f), (f, d), (s, d)),
            1,
        ),
        "MLP f+b": (
            {k: both_passes(mlp(*pair)) for k, pair in forms.items()},
            block_in,
            block_out,
            ((s, d), (d, f), (f, d), (s, d)),
            5,
        ),
        "two blocks": (
            {k: unrolled(mlp(*pair)) for k, pair in forms.items()},
            (ROWS, (COLUMNS, COLUMNS), (ROWS, ROWS), ROWS),
            (ROWS, (ROWS, (COLUMNS, COLUMNS), (ROWS, ROWS))),
            ((s, d), ((d, f), (d, f)), ((f, d), (f, d)), (s, d)),
            2 * 5,
        ),
        "scan of 4": (
            {k: scanned(mlp(*pair)) for k, pair in forms.items()},
            scan_in,
            scan_out,
            ((s, d), (4, d, f), (4, f, d), (s, d)),
            4 * 6,
        ),
        "features gather (seed)": ({"seed": seed_gather}, (COLUMNS, COLUMNS), COLUMNS, ((s, d), (d, f)), 1),
        "features scatter (seed)": ({"seed": seed_scatter}, (COLUMNS, ROWS), COLUMNS, ((s, f), (f, d)), 1),
    }


def measure(target: str, run: Any, in_specs: Any, out_specs: Any, shapes: Any) -> tuple[ProgramSchedule, Any, float]:
    ways = WAYS[target.partition(":")[0]]
    mesh = target_mesh(target, (len(target_devices(target)) // ways, ways), ("dp", "tp"))
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=frozenset({"tp"}))
    )
    arguments = jax.tree.map(
        lambda spec, shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)),
        in_specs,
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    begin = time.perf_counter()
    compiled = program.lower(*arguments).compile()
    return read_schedule(compiled.as_text()), compiled.memory_analysis(), time.perf_counter() - begin


def measure_jit(target: str, s: int, d: int, f: int) -> tuple[ProgramSchedule, Any, float]:
    """Measures both passes of the MLP block in plain `jit` with sharding constraints."""
    ways = WAYS[target.partition(":")[0]]
    mesh = target_mesh(target, (len(target_devices(target)) // ways, ways), ("dp", "tp"))

    def constrain(x: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def block(x: Any, up: Any, down: Any) -> Any:
        hidden = constrain(jax.nn.gelu(constrain(x, ROWS) @ up), COLUMNS)
        return x + constrain(hidden @ down, ROWS)

    specs, shapes = (ROWS, COLUMNS, ROWS, ROWS), ((s, d), (d, f), (f, d), (s, d))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    outs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (ROWS, (ROWS, COLUMNS, ROWS)))
    begin = time.perf_counter()
    compiled = jax.jit(both_passes(block), out_shardings=outs).lower(*arguments).compile()
    return read_schedule(compiled.as_text()), compiled.memory_analysis(), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["v5e:16x16", "v5p:4x4x8", "v6e:16x16", "h200:1x8"])
    parser.add_argument("--shape", nargs=3, type=int, default=[16384, 8192, 28672], metavar=("ROWS", "DIM", "HIDDEN"))
    parser.add_argument("--only", nargs="*", default=[], help="names of operations to run (default: all)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    s, d, f = arguments.shape
    found = []
    for target in arguments.targets:
        if not can_compile_for(target):
            print(f"{target}: its compiler is not installed")
            continue
        ways = WAYS[target.partition(":")[0]]
        for operation, (forms, in_specs, out_specs, shapes, units) in cases(s, d, f).items():
            if arguments.only and operation not in arguments.only:
                continue
            floor = units * s * d * 2 * (ways - 1) / ways
            results = {name: measure(target, run, in_specs, out_specs, shapes) for name, run in forms.items()}
            if operation == "MLP f+b":
                results["plain jit"] = measure_jit(target, s, d, f)
            base = results.get("unsplit", next(iter(results.values())))[0].estimated_cycles or 1
            for name, (schedule, memory, seconds) in results.items():
                row = {
                    "target": target,
                    "operation": operation,
                    "form": name,
                    "hidden": f"{schedule.num_hidden}/{schedule.count()}",
                    "bytes": round(schedule.wire_bytes / floor, 3),
                    "cycles": round(schedule.estimated_cycles / base, 3) if schedule.estimated_cycles else None,
                    "temp_mib": round(memory.temp_size_in_bytes / 2**20),
                    "compile_s": round(seconds, 1),
                }
                found.append(row)
                if not arguments.json:
                    print(
                        "  ".join(
                            f"{value!s:>{width}}"
                            for value, width in zip(row.values(), (10, 24, 9, 8, 6, 6, 6, 5), strict=True)
                        ),
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps({"jax": jax.__version__, "shape": arguments.shape, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
