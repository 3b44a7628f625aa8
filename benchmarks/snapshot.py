"""Times snapshots in host memory beside checkpoints on disk: how long training waits, and how long restoring takes.

    python benchmarks/snapshot.py --megabytes 512

One process with eight simulated devices. "Waits" is the time until training may continue; the rest happens in threads.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from measure import machine, median, versions

import meshwright as mw
from meshwright.checkpoint import Checkpoints
from meshwright.checkpoint.snapshot import Snapshots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state")
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = mw.create_mesh("fsdp:8")
    leaves = {
        f"w{number}": np.zeros((args.megabytes * 2**20 // 16 // 4 // 1024, 1024), np.float32) for number in range(16)
    }
    layout = mw.make_layout([("w", mw.P("fsdp"))], leaves, mesh)
    state = jax.jit(lambda: {name: jax.random.normal(jax.random.key(0), leaf.shape) for name, leaf in leaves.items()},
                    out_shardings=layout.shardings)()  # fmt: skip
    jax.block_until_ready(state)
    memory = Path(f"/dev/shm/meshwright-benchmark-{secrets.token_hex(4)}")
    memory.mkdir(mode=0o700)
    found: dict[str, list[list[float]]] = {"snapshot in /dev/shm": [], "checkpoint on disk": []}
    try:
        with tempfile.TemporaryDirectory() as disk:
            snapshots, checkpoints = Snapshots(memory), Checkpoints(disk)
            for step in range(1, args.times + 2):
                times = [time.perf_counter()]
                snapshots.take(state, step=step, layout=layout, facts={})
                times.append(time.perf_counter())
                snapshots.wait()
                times.append(time.perf_counter())
                snapshots.restore(layout, after=0)
                found["snapshot in /dev/shm"].append([*times, time.perf_counter()])
                times = [time.perf_counter()]
                checkpoints.save(state, step=step, layout=layout, facts={})
                times.append(time.perf_counter())
                checkpoints.wait()
                times.append(time.perf_counter())
                checkpoints.restore(layout)
                checkpoints._known.clear()
                found["checkpoint on disk"].append([*times, time.perf_counter()])
    finally:
        shutil.rmtree(memory)
    print(f"{machine()}; {versions('jax', 'orbax-checkpoint')}; {args.megabytes} MiB, median of {args.times}")
    for name, rows in found.items():
        waits, written, restored = (median([row[i + 1] - row[i] for row in rows[1:]]) for i in range(3))
        print(f"{name}: training waits {waits:.2f} s, then written after {written:.2f} s; restored in {restored:.2f} s")


if __name__ == "__main__":
    main()
