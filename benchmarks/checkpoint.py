"""Time to save and restore a state on eight simulated devices, with hashing, against plain Orbax.

usage: python benchmarks/checkpoint.py [--layers 17] [--rounds 3] [--folder DIR] [--cold] [--json]

The state is that of the 956M decoder with 17 layers: 1.008B float32 parameters without optimizer state, 3.8 GiB, to fit
small machines. The sides take turns in one process. Each saves asynchronously and restores its checkpoint:

    blocked     until the save call returns: the time a training loop waits
    save        until the checkpoint is finished; for Meshwright, with all files hashed and the manifest written
    restore     until all arrays are on their devices; for Meshwright, after all files are verified
    CPU         CPU seconds of the process on all cores, less sensitive to other processes

Plain Orbax is `save_async` and `load` with their defaults, which compress. A third side disables compression, as
Meshwright does. `--cold` drops the files from the page cache before restoring.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import machine, median, table, verdict, versions

TARGET_TIME, TARGET_BLOCKED = 1.15, 1.2
FIGURES = ("blocked", "save", "restore", "save CPU", "restore CPU")
OURS, PLAIN, RAW = "meshwright", "Orbax", "Orbax, uncompressed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=17, help="number of layers (default: 17)")
    parser.add_argument("--rounds", type=int, default=3, help="saves and restores per side (default: 3)")
    parser.add_argument("--folder", help="output folder, needs room for three states (default: a temporary folder)")
    parser.add_argument("--cold", action="store_true", help="restore from disk instead of the page cache")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        result = measure(folder, args.layers, args.rounds, cold=args.cold)
    finally:
        shutil.rmtree(folder)
    if args.json:
        print(json.dumps(result | {"machine": machine()}, indent=1))
    else:
        show(result)
    sys.exit(0 if result["met"] else 1)


def measure(folder: Path, num_layers: int, rounds: int, *, cold: bool) -> dict[str, Any]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    small, _ = make_state(1, d_model=256)
    for side in SIDES:  # excludes compilation and first-use costs
        one_round(side, small, make_state(1, d_model=256)[1], folder, cold=False)
    layout, state = make_state(num_layers)
    # The first large save pays for page allocation, so it is not counted.
    figures, state = one_round(RAW, layout, state, folder, cold=cold)
    print(f"warmup, {RAW}: {_words(figures)}", file=sys.stderr, flush=True)
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    order = list(SIDES)
    for number in range(rounds):
        for side in order[number % len(order) :] + order[: number % len(order)]:
            figures, state = one_round(side, layout, state, folder, cold=cold)
            runs[side].append(figures)
            print(f"round {number + 1}, {side}: {_words(figures)}", file=sys.stderr, flush=True)
    medians = {side: {name: median([run[name] for run in done]) for name in FIGURES} for side, done in runs.items()}
    # Ratios per round, because the machine's speed varies between rounds.
    ratios = {
        name: median([ours[name] / plain[name] for ours, plain in zip(runs[OURS], runs[PLAIN], strict=True)])
        for name in FIGURES
    }
    return {
        "sides": medians,
        "ratios": ratios,
        "runs": runs,
        "bytes": layout.bytes_total,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "cold": cold,
        "versions": versions("jax", "orbax-checkpoint", "tensorstore"),
        "met": max(ratios["save"], ratios["restore"]) <= TARGET_TIME and ratios["blocked"] <= TARGET_BLOCKED,
    }


def make_state(num_layers: int, **sizes: int) -> tuple[Any, Any]:
    """Returns the layout and a state of random numbers, which is faster than the model's init."""
    import jax
    import numpy as np
    import optax

    import meshwright as mw
    from meshwright.models import Decoder
    from meshwright.train import language_job, state_layout

    model = Decoder.named("956m", num_layers=num_layers, **sizes)
    job = language_job(model, batch_size=8, num_tokens=8)
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:4,tp:2"))
    rng = np.random.default_rng(0)
    leaves = []
    for leaf in layout.leaves:
        sharding = jax.sharding.NamedSharding(layout.mesh, leaf.spec)
        if leaf.name == "rng":
            leaves.append(jax.device_put(jax.random.key(0), sharding))
        elif leaf.dtype == np.float32:
            leaves.append(jax.device_put(rng.standard_normal(leaf.shape, np.float32), sharding))
        else:
            leaves.append(jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding))
    return layout, jax.block_until_ready(layout.structure.unflatten(leaves))


def one_round(side: str, layout: Any, state: Any, folder: Path, *, cold: bool) -> tuple[dict[str, float], Any]:
    """Saves, deletes and restores a state, checks a part of it, and returns the seconds and the restored state."""
    import jax
    import numpy as np

    place = folder / "one"
    save, finish, restore = SIDES[side](place, layout)
    known = np.array(state.params["layers"]["attn"]["q"][0])
    os.sync()
    start, start_cpu = time.perf_counter(), time.process_time()
    save(state)
    blocked = time.perf_counter() - start
    finish()
    saved, saved_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    if cold:
        drop_from_cache(place)
    start, start_cpu = time.perf_counter(), time.process_time()
    back = jax.block_until_ready(restore())
    restored, restored_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    shutil.rmtree(place)
    assert np.array_equal(known, np.array(back.params["layers"]["attn"]["q"][0])), "the state came back changed"
    figures = {"blocked": blocked, "save": saved, "restore": restored, "bytes": size}
    return figures | {"save CPU": saved_cpu, "restore CPU": restored_cpu}, back


def drop_from_cache(place: Path) -> None:
    os.sync()
    for path in place.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


Side = tuple[Callable[[Any], Any], Callable[[], Any], Callable[[], Any]]


def ours(place: Path, layout: Any) -> Side:
    from meshwright.checkpoint import Checkpoints

    checkpoints = Checkpoints(place)

    def finish() -> None:
        checkpoints.wait()
        assert checkpoints.steps() == [1], checkpoints.problems

    return (
        lambda state: checkpoints.save(state, step=1, layout=layout, facts={}),
        finish,
        lambda: Checkpoints(place).restore(layout).state,
    )


def plain(place: Path, layout: Any, *, compressed: bool = True) -> Side:
    from orbax.checkpoint import v1 as ocp

    from meshwright.checkpoint.arrays import abstract_stored, from_stored, to_stored

    def save(state: Any) -> None:
        context = ocp.Context()
        context.array.saving.use_compression = compressed
        with context:
            response.append(ocp.save_async(place, to_stored(state, layout)))

    response: list[Any] = []
    abstract = abstract_stored(layout)
    return save, lambda: response.pop().result(), lambda: from_stored(ocp.load(place, abstract), layout)


def uncompressed(place: Path, layout: Any) -> Side:
    return plain(place, layout, compressed=False)


SIDES: dict[str, Callable[[Path, Any], Side]] = {OURS: ours, PLAIN: plain, RAW: uncompressed}


def _words(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {figures[name]:.3f} s" for name in FIGURES)


def show(result: dict[str, Any]) -> None:
    print(", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    print(f"machine: {machine()}")
    cache = "from the disk" if result["cold"] else "from the page cache"
    print(f"state: {result['num_params'] / 1e9:.3f}B parameters, {result['bytes'] / 2**30:.2f} GiB; restored {cache}\n")
    rows = []
    for side, figures in result["sides"].items():
        done = result["runs"][side]
        ranges = (
            f"{min(run[name] for run in done):.1f}-{max(run[name] for run in done):.1f}" for name in ("save", "restore")
        )
        cpu = (f"{figures[name]:.1f} s" for name in ("save CPU", "restore CPU"))
        rows.append(
            (side, f"{figures['blocked'] * 1e3:.0f} ms", f"{figures['save']:.2f} s", f"{figures['restore']:.2f} s",
             *ranges, *cpu, f"{done[0]['bytes'] / 2**30:.2f} GiB")
        )  # fmt: skip
    headings = ("side", "blocked", "save", "restore", "saves", "restores", "save CPU", "restore CPU", "on disk")
    print(table(headings, rows) + "\n")
    for name, target in (("save", TARGET_TIME), ("restore", TARGET_TIME), ("blocked", TARGET_BLOCKED)):
        ratio = result["ratios"][name]
        print(verdict(f"{name} {ratio:.2f}x that of plain Orbax (target: at most {target}x)", ratio <= target))
    for name in ("save CPU", "restore CPU"):
        print(f"{name}: {result['ratios'][name]:.2f}x that of plain Orbax")


if __name__ == "__main__":
    main()
