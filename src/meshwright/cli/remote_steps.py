"""Checkpoints at a URL, for the commands that read them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from meshwright.checkpoint import DurableSteps
from meshwright.checkpoint.manifest import MANIFEST, STATE
from meshwright.errors import CheckpointError
from meshwright.layout.leaf import format_bytes
from meshwright.remote import ObjectStore, open_store


def copy_manifests(url: str) -> str:
    """Returns a temporary folder that holds the manifests of the steps at a URL, but none of their other files."""
    durable, step = find_steps(url)
    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for number in [step] if step is not None else [*durable.steps(), *durable.unfinished()]:
        (folder / str(number) / STATE).mkdir(parents=True)
        data = durable.store.read(f"{number}/{MANIFEST}")
        if data is not None:
            (folder / str(number) / MANIFEST).write_bytes(data)
    return str(folder if step is None else folder / str(step))


def verify_url(url: str, step: int | None) -> int:
    """Compares every byte of the steps at a URL with their manifests, without a copy; returns the exit code."""
    durable, named = find_steps(url)
    step = named if step is None else step
    finished = durable.steps()
    if step is not None and step not in finished:
        there = ", ".join(map(str, finished)) or "none"
        raise CheckpointError(f"{durable.store} has no finished step {step}.", hint=f"finished steps: {there}.")
    if not finished:
        raise CheckpointError(f"{url} has no finished step.", hint="pass the URL of a run.")
    if step is None:
        for number in durable.unfinished():
            print(f"step {number}: unfinished, not checked")
    bad = 0
    for number in finished if step is None else [step]:
        problems = durable.problems(number)
        bad += bool(problems)
        verdict = "DAMAGED"
        if not problems:
            manifest = durable.manifest(number)
            verdict = f"fine, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}"
        print("\n  ".join([f"step {number}: {verdict}", *problems]))
    return 1 if bad else 0


def find_steps(url: str) -> tuple[DurableSteps, int | None]:
    """Returns the steps at the URL of a run, of its checkpoints or of one step, and the number of that step."""
    store: ObjectStore = open_store(url)
    names = list(store.list())
    parent, _, last = store.url.rpartition("/")
    if MANIFEST in names and last.isdecimal():
        return DurableSteps(open_store(parent)), int(last)
    if any(name.startswith("checkpoints/") for name in names):
        return DurableSteps(store.below("checkpoints")), None
    return DurableSteps(store), None
