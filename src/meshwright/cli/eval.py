"""`meshwright eval`: loss, perplexity and bits per byte of a run's model on text."""

from __future__ import annotations

import json as json_lib
import sys
from typing import Literal

from meshwright.cli import require_one_process, simulate_devices
from meshwright.errors import ConfigError


def evaluate(
    run: str,
    data: tuple[str, ...],
    step: int | None = None,
    mesh: str | None = None,
    devices: int | None = None,
    batch_size: int | None = None,
    num_tokens: int | None = None,
    max_batches: int | None = None,
    weights: Literal["auto", "ema", "last"] = "auto",
    precision: Literal["auto", "float32", "mixed", "bfloat16"] = "auto",
    json: bool = False,
) -> int:
    """Evaluate the model of a run on text: loss, perplexity and bits per byte of each file, and of all together.

    Args:
        run: run folder, or its URL in an object store.
        data: files, folders or globs of text, .jsonl or .array_record; every file is a source; URLs too.
        step: step of the checkpoint (default: the last good one).
        mesh: mesh such as dp:2,tp:4 (default: all accelerators that can split the heads; one CPU device).
        devices: number of devices to use; without accelerators, to simulate (default: 8 with --mesh, else 1).
        batch_size: rows per batch (default: that of the run).
        num_tokens: tokens per row (default: that of the run).
        max_batches: maximum number of batches per file (default: all rows).
        weights: ema, the moving average that a run with --ema keeps; last, the parameters themselves; auto, the average
            if there is one.
        precision: compute precision; auto is float32 on CPUs and mixed elsewhere.
        json: print the results as JSON.
    """
    numbers = {"--batch-size": batch_size, "--num-tokens": num_tokens, "--max-batches": max_batches}
    for name, value in {**numbers, "--devices": devices}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}.", hint="pass a positive number.")
    if not data:
        raise ConfigError("--data is missing.", hint="pass files or folders of text.")
    require_one_process("eval")
    simulate_devices(devices or (1 if mesh is None else 8))
    from meshwright.layout.leaf import text_table
    from meshwright.loop.results.saved_run import mesh_to_use, open_run, precision_to_use
    from meshwright.loop.results.source_scores import evaluate_run

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    saved = open_run(run, step=step)
    placed = mesh_to_use(saved.model, mesh, devices=devices)
    params, found, notes = saved.restore(placed, weights=weights)
    for note in notes:
        tell(note)
    tell(f"step {found} of {run}, on {', '.join(f'{axis}:{size}' for axis, size in placed.shape.items())}")
    scores = []
    for score in evaluate_run(
        saved,
        params,
        placed,
        data,
        batch_size=batch_size,
        num_tokens=num_tokens,
        precision=precision_to_use(precision),
        max_batches=max_batches,
        tell=tell,
    ):
        tell(f"{score.source}: loss {score.loss:.4f}")
        scores.append(score)
    if json:
        print(json_lib.dumps({"run": run, "step": found, "sources": [score.to_json() for score in scores]}, indent=1))
        return 0
    rows = [
        (
            score.source,
            f"{score.num_targets:,}",
            f"{score.loss:.4f}",
            f"{score.perplexity:.2f}",
            f"{score.bits_per_byte:.4f}",
            f"{score.accuracy:.4f}",
        )
        for score in scores
    ]
    print(text_table(("source", "tokens", "loss", "perplexity", "bits per byte", "accuracy"), rows))
    return 0
