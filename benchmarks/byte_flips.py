"""Flips single bits in all files of a checkpoint and checks that each is detected and the file is named.

usage: python benchmarks/byte_flips.py [--flips 600] [--seed 0] [--restore 20]

The checkpoint is that of a small decoder with AdamW on eight simulated devices. Positions are drawn in three ways: any
byte of the checkpoint, any byte of a random file (so small files count as much as large ones), and any byte of the
manifest. Each flip is verified as in `restore`. Some go through a whole restore, which must name the file and fall back
to the previous step. For comparison, plain Orbax restores the same kind of flips in the array file.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import machine, table, verdict, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=600, help="number of flips (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restore", type=int, default=20, help="number of whole restores (default: 20)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        fine = measure(folder, args.flips, args.seed, args.restore)
    finally:
        shutil.rmtree(folder)
    sys.exit(0 if fine else 1)


def measure(folder: Path, num_flips: int, seed: int, num_restores: int) -> bool:
    layout, state = make_state()
    from meshwright.checkpoint import Checkpoints, verify_step

    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, step=step, layout=layout, facts={"config": {"seed": seed}})
    place = folder / "2"
    files = sorted(path for path in place.rglob("*") if path.is_file())
    sizes = {path: path.stat().st_size for path in files if path.stat().st_size}
    print(", ".join(f"{name} {version}" for name, version in versions("jax", "orbax-checkpoint").items()))
    print(f"machine: {machine()}")
    print(f"checkpoint: {len(files)} files, {sum(sizes.values())} bytes, {len(layout.leaves)} arrays; seed {seed}\n")
    rng = random.Random(seed)
    ways = {
        "any byte": lambda: rng.choices(list(sizes), weights=list(sizes.values()))[0],
        "any file": lambda: rng.choice(list(sizes)),
        "the manifest": lambda: place / "manifest.json",
    }
    rows, missed = [], 0
    for way, draw in ways.items():
        tried = num_flips // len(ways)
        found = 0
        for _ in range(tried):
            path = draw()
            with flipped(path, rng):
                problems = verify_step(place)
            found += len(problems) == 1 and path.relative_to(place).as_posix() in problems[0]
        missed += tried - found
        rows.append((way, tried, found, tried - found))
    assert verify_step(place) == []
    print(table(("position", "flips", "found and named", "missed"), rows) + "\n")
    fell_back = 0
    for _ in range(num_restores):
        path = rng.choice(list(sizes))
        with flipped(path, rng):
            restored = Checkpoints(folder).restore(layout)
        fell_back += restored.step == 1 and path.relative_to(place).as_posix() in restored.notes[0]
    print(f"{num_restores} damaged checkpoints restored: {fell_back} named the file and fell back to the previous step")
    silent, errors, tried = plain_orbax(place, layout, rng, num_restores)
    print(f"plain Orbax, {tried} flips in the array file: {silent} silently restored wrong numbers, {errors} errors")
    return all(
        [
            say(f"{num_flips - missed} of {num_flips} flips found (target: all)", missed == 0),
            say(f"{fell_back} of {num_restores} restores fell back (target: all)", fell_back == num_restores),
        ]
    )


def say(text: str, met: bool) -> bool:
    print(verdict(text, met))
    return met


class flipped:
    """Flips one bit of a file while the block runs."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path, self.place, self.mask = path, rng.randrange(path.stat().st_size), 1 << rng.randrange(8)

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with open(self.path, "r+b") as file:
            file.seek(self.place)
            byte = file.read(1)[0] ^ self.mask
            file.seek(self.place)
            file.write(bytes([byte]))


def plain_orbax(place: Path, layout: Any, rng: random.Random, count: int) -> tuple[int, int, int]:
    """Returns the number of flips that plain Orbax restored silently, the number of errors, and the number tried."""
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    from meshwright.checkpoint.arrays import abstract_stored

    abstract = abstract_stored(layout)

    def load() -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(ocp.load(place / "state", abstract))]

    known = load()
    largest = max((path for path in place.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    silent = errors = 0
    for _ in range(count):
        with flipped(largest, rng):
            try:
                silent += load() != known
            except Exception:  # any error counts as detected
                errors += 1
    return silent, errors, count


def make_state() -> tuple[Any, Any]:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    import numpy as np
    import optax

    import meshwright as mw
    from meshwright.models import Decoder
    from meshwright.train import language_job, state_layout

    job = language_job(Decoder.named("tiny"), batch_size=8, num_tokens=8)
    layout = state_layout(job, optax.adamw(1e-3), mw.create_mesh("fsdp:4,tp:2"))
    rng = np.random.default_rng(0)
    leaves = [
        jax.random.key(0) if leaf.name == "rng" else (rng.standard_normal(leaf.shape)).astype(leaf.dtype)
        for leaf in layout.leaves
    ]
    return layout, layout.shard(layout.structure.unflatten(leaves))


if __name__ == "__main__":
    main()
