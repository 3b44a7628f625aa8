"""Speed and peak memory of `Layout.shard` and `gather` on eight simulated devices, against one `device_put` per leaf.

usage: python benchmarks/placement.py [--mib 1024] [--rounds 5] [--json]

Each measurement runs in a separate process, so that its peak memory is separate; the sides take turns. The source tree
stays alive, as while a checkpoint is loaded, and accounts for 1x of the peak. Memory is counted from just before that
tree is created, with JAX already running.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine, median, peak_resident, run_child, spread, table, verdict, versions

TARGET_RATIO = 1.0
TARGET_MEMORY = 2.2
NOISE = 0.05  # difference between two runs of the same side on an idle machine
NUM_LAYERS = 60
LEAVES_PER_LAYER = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the tree (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="processes per side (default: 5)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.mib)))
        return
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    sides = list(SIDES)
    for number in range(args.rounds):
        # Each round starts with another side, so that a busy moment of the machine affects all.
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            runs[side].append(run_child([sys.executable, __file__, "--side", side, "--mib", str(args.mib)]))
    result = summarise(runs)
    if args.json:
        print(json.dumps(result | {"machine": machine(), "runs": runs}, indent=1))
    else:
        show(result, runs)
    sys.exit(0 if result["met"] else 1)


# --- One process ---


def measure(side: str, mib: int) -> dict[str, Any]:
    import jax
    import numpy as np

    import meshwright as mw
    from meshwright import P

    mw.simulate_cpu_devices(8)
    mesh = mw.create_mesh("fsdp:4,tp:2")
    rules = [("(q|up)/kernel", P("fsdp", "tp")), ("(out|down)/kernel", P("tp", "fsdp")), ("norm/scale", P())]
    # Excludes imports and other first-use memory.
    warm = make_tree(dim=8)
    SIDES[side](mw.make_layout(rules, warm, mesh), warm)

    width = width_for(mib)
    layout = mw.make_layout(rules, jax.eval_shape(lambda: make_tree(width, np_like=jax.numpy)), mesh)
    before = resident_bytes()
    tree = make_tree(width)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size == layout.bytes_total
    shard_seconds, gather_seconds, back = SIDES[side](layout, tree)
    peak = peak_resident()
    same = jax.tree.all(jax.tree.map(np.array_equal, tree, back))
    assert same, "the tree came back changed"
    return {
        "shard": shard_seconds,
        "gather": gather_seconds,
        "total": shard_seconds + gather_seconds,
        "memory": (peak - before) / size,
        "tree_bytes": size,
        "num_leaves": len(layout.leaves),
        "versions": versions("meshwright", "jax", "numpy"),
    }


def width_for(mib: int) -> int:
    """Returns the width, a multiple of 8, of a 60-layer tree with about this many MiB."""
    return max(8, round((mib * 2**20 / (NUM_LAYERS * 4 * 10)) ** 0.5 / 8) * 8)


def make_tree(dim: int, np_like: Any = None) -> dict[str, Any]:
    """Returns 60 layers of two square and two 1:4 matrices and a vector each, with every page written."""
    import numpy as np

    xp = np_like or np
    shapes = {
        "q": {"kernel": (dim, dim)},
        "out": {"kernel": (dim, dim)},
        "up": {"kernel": (dim, 4 * dim)},
        "down": {"kernel": (4 * dim, dim)},
        "norm": {"scale": (dim,)},
    }
    return {
        f"layer_{layer}": {
            name: {
                leaf: xp.full(shape, layer + 0.5, dtype="float32") if np_like else _noise(shape, layer)
                for leaf, shape in part.items()
            }
            for name, part in shapes.items()
        }
        for layer in range(NUM_LAYERS)
    }


def _noise(shape: tuple[int, ...], seed: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def resident_bytes() -> int:
    """Returns the resident memory; without /proc, the peak so far, which makes the result look better."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed(place: Callable[[], Any], fetch: Callable[[Any], Any]) -> tuple[float, float, Any]:
    import jax

    start = time.perf_counter()
    holder = [jax.block_until_ready(place())]
    middle = time.perf_counter()
    # `fetch` gets the only reference, so that it may free arrays that it has read.
    back = fetch(holder.pop())
    return middle - start, time.perf_counter() - middle, back


def by_layout(layout: Any, tree: Any) -> tuple[float, float, Any]:
    return timed(lambda: layout.shard(tree), lambda placed: layout.gather(placed, donate=True))


def by_layout_keeping(layout: Any, tree: Any) -> tuple[float, float, Any]:
    return timed(lambda: layout.shard(tree), layout.gather)


def by_functions(layout: Any, tree: Any) -> tuple[float, float, Any]:
    import meshwright as mw

    shard, gather = mw.make_shard_and_gather_fns(layout.specs, mesh=layout.mesh)
    return timed(lambda: mw.tree_apply(shard, tree), lambda placed: mw.tree_apply(gather, placed))


def by_device_put(layout: Any, tree: Any) -> tuple[float, float, Any]:
    import jax
    import numpy as np

    return timed(
        lambda: jax.tree.map(jax.device_put, tree, layout.shardings),
        lambda placed: jax.tree.map(np.asarray, placed),
    )


SIDES: dict[str, Callable[[Any, Any], tuple[float, float, Any]]] = {
    "Layout, donate=True": by_layout,
    "Layout": by_layout_keeping,
    "make_shard_and_gather_fns": by_functions,
    "one device_put per leaf": by_device_put,
}
OURS, BASELINE = "Layout, donate=True", "one device_put per leaf"


# --- All of them ---


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    medians = {
        side: {name: median([run[name] for run in done]) for name in ("shard", "gather", "total")}
        | {"memory": max(run["memory"] for run in done)}
        for side, done in runs.items()
    }
    for side, done in runs.items():
        # Ratios per round, because the machine's speed varies between rounds.
        medians[side]["speed"] = median([b["total"] / a["total"] for a, b in zip(done, runs[BASELINE], strict=True)])
    ratio, memory = medians[OURS]["speed"], medians[OURS]["memory"]
    return {
        "sides": medians,
        "ratio": ratio,
        "memory": memory,
        "met": ratio >= TARGET_RATIO - NOISE and memory < TARGET_MEMORY,
    }


def show(result: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> None:
    some = runs[OURS][0]
    print(", ".join(f"{name} {version}" for name, version in some["versions"].items()))
    print(f"machine: {machine()}")
    print(f"tree: {some['tree_bytes'] / 2**20:.0f} MiB in {some['num_leaves']} leaves, on fsdp=4 x tp=2\n")
    rows = [
        (
            side,
            *(f"{figures[name]:.2f} s" for name in ("shard", "gather", "total")),
            f"{spread([run['total'] for run in runs[side]])} ms",
            f"{figures['speed']:.2f}x",
            f"{figures['memory']:.2f}x",
        )
        for side, figures in result["sides"].items()
    ]
    print(table(("way", "shard", "gather", "total", "range", "speed", "peak memory / tree"), rows))
    ratio, memory = result["ratio"], result["memory"]
    print("" if round(some["tree_bytes"] / 2**30, 1) >= 1 else "\nthe targets below are for --mib 1024")
    fast = f"{ratio:.2f}x the speed of one device_put per leaf (target: not slower, within {NOISE:.0%})"
    print(verdict(fast, ratio >= TARGET_RATIO - NOISE))
    print(verdict(f"peak memory {memory:.2f}x the tree (target: under {TARGET_MEMORY}x)", memory < TARGET_MEMORY))


if __name__ == "__main__":
    main()
