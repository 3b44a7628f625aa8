"""Trains a small model of every family from an imported folder, on one device and on dp:2,fsdp:2,tp:2.

usage: python benchmarks/family_training.py [--rate RATE] [CASE ...]

The folders are those of tests/checkpoint/convert/families (configurations that transformers wrote, weights drawn by the
names of the tensors). Each model takes twenty SGD steps in float32 on 4 rows of 32 tokens. The losses of both meshes
must agree within 2e-5, relatively. Cases that amplify rounding at a learning rate of 0.05 take 0.005.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import ROOT, machine, table, verdict, versions

STEPS, TOLERANCE = 20, 2e-5
CHOSEN = {"qwen2": "qwen2_window", "gemma3_text": "gemma3"}
"""The cases of families that have several; others have a case of their name."""
RATES = {"llama_llama3": 0.005, "smollm3": 0.005, "phi3": 0.005}
"""Learning rates of cases that do not take 0.05."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--rate", type=float, help="learning rate")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(ROOT))
    from tests.checkpoint.convert.test_pretrained_families import write_folder

    import meshwright as mw
    from meshwright.checkpoint.convert.families import FAMILIES

    print(", ".join(f"{name} {version}" for name, version in versions("jax", "optax").items()))
    print(f"machine: {machine()}\n")
    meshes = mw.create_mesh("dp:1", devices=1), mw.create_mesh("dp:2,fsdp:2,tp:2")
    rows, worst = [], 0.0
    for case in options.cases or [CHOSEN.get(family, family) for family in FAMILIES]:
        source = write_folder(Path(tempfile.mkdtemp()) / "hf", case)
        one, many = (losses_of(source, mesh, options.rate or RATES.get(case, 0.05)) for mesh in meshes)
        difference = max(abs(a - b) / abs(a) for a, b in zip(one, many, strict=True))
        worst = max(worst, difference)
        rows.append((case, f"{one[0]:.4f}", f"{one[-1]:.4f}", f"{many[-1]:.4f}", f"{difference:.1e}"))
        print(*rows[-1], file=sys.stderr, flush=True)
    headings = ("case", "first loss", "last loss, 1 device", "last loss, 8 devices", "largest difference")
    print(table(headings, rows) + "\n")
    fine = worst <= TOLERANCE
    print(verdict(f"losses differ by at most {worst:.1e} (target: {TOLERANCE:.0e})", fine))
    sys.exit(0 if fine else 1)


def losses_of(source: Path, mesh: Any, rate: float) -> list[float]:
    import jax
    import numpy as np
    import optax

    from meshwright.checkpoint.convert.pretrained import read_pretrained
    from meshwright.train import init_state, language_job, make_train_step, state_layout

    found, optimizer = read_pretrained(source, mesh=mesh), optax.sgd(rate)
    job = language_job(found.model, batch_size=4, num_tokens=32)
    layout = state_layout(job, optimizer, mesh)
    state = init_state(job, optimizer, layout, jax.random.key(0))
    state = dataclasses.replace(state, params=found.params)
    step = make_train_step(job, optimizer, layout)
    tokens = np.random.default_rng(0).integers(0, found.model.vocab_size, (4, 33)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    main()
