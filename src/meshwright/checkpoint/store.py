"""A folder of checkpoints: saved beside training, kept by policy, verified before anything is restored."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import jax
from jax.sharding import Mesh

from meshwright.checkpoint import arrays
from meshwright.checkpoint.file_hashes import FileHash, hash_files, is_unreadable, list_files
from meshwright.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    current_versions,
    describe_layout,
    plain_facts,
    write_manifest,
)
from meshwright.checkpoint.restoring import Restored, part_of, problems_of, read_step
from meshwright.checkpoint.retention import SAVING, Keep, finished_steps, remove_step, unfinished_steps
from meshwright.distributed.agreement import from_first, gather_texts, is_first
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, remove_folder, sync_folder, write_atomically
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.train.guards import require_live_state, require_same_state
from meshwright.types import PyTree

Tell = Callable[[str, int, str], Any]
"""`tell(kind, step, text)`; kinds are "checkpoint" and "checkpoint_failed". It may be called from another thread."""

PEER_SECONDS = 600.0
"""How long the first process waits for the hashes of the others."""

_KNOWN = "saved before"


class Checkpoints:
    """The checkpoints of a run, one folder per step, on a file system that all processes of the run see.

    Every process makes the same calls in the same order. A save that fails never raises: it is told, noted in
    `problems`, and what it wrote is removed.

    Args:
        keep: which steps stay once a newer one is finished.
        asynchronous: whether files are written while training goes on.
        tell: called with ("checkpoint", step, text) when a step is finished, and with ("checkpoint_failed", ...).

    Example:
        >>> import tempfile, optax, meshwright as mw
        >>> from meshwright.train import init_state, state_layout
        >>> job = mw.Job(init=lambda key: {"w": jax.random.normal(key, (64, 8))}, rules=[("w", mw.P("fsdp"))])
        >>> layout = state_layout(job, optax.adam(1e-3), mw.create_mesh("fsdp:8"))
        >>> state = init_state(job, optax.adam(1e-3), layout, jax.random.key(0))
        >>> with Checkpoints(tempfile.mkdtemp(), keep=Keep(last=2)) as checkpoints:
        ...     for step in (10, 20, 30):
        ...         started = checkpoints.save(state, step=step, layout=layout, facts={"data": {"next_row": 8 * step}})
        ...     checkpoints.wait()
        ...     checkpoints.steps()
        [20, 30]
        >>> restored = checkpoints.restore(layout)
        >>> restored.step, restored.facts
        (30, {'data': {'next_row': 240}})
    """

    def __init__(
        self, folder: Path | str, *, keep: Keep | None = None, asynchronous: bool = True, tell: Tell | None = None
    ) -> None:
        self.folder = Path(folder).absolute()
        self.keep = keep or Keep()
        self.problems: list[str] = []
        self.failures: dict[int, str] = {}  # why a step was not saved
        self._asynchronous = asynchronous
        self._tell = tell
        self._thread: threading.Thread | None = None
        # What this object itself saved or restored: the same step again would be the same state.
        self._known: set[int] = set()
        self._bad: set[int] = set()
        # What was unfinished when this object was made, by a save that is dead; later, what its own saves could not do.
        self._dead = set(unfinished_steps(self.folder))

    # --- Saving ---

    def save(self, state: PyTree, *, step: int, layout: Layout, facts: Mapping[str, Any]) -> bool:
        """Starts to save a state; returns once its buffers may be donated, False where nothing was started.

        A save that is still being written is waited for. A step that this object saved or restored before is not
        written again; one that an earlier run left is replaced.

        Args:
            facts: what else a resumed run needs, as JSON: configuration, position in the data.
        """
        self._check(state, step, layout)
        kept_facts = plain_facts(facts)
        self.wait()
        # The first process decides, because only it knows how the last save ended.
        decision = gather_texts(self._make_room(step, layout) if is_first() else "")[0]
        if decision:
            if decision != _KNOWN:
                self._give_up(step, decision)
            return False

        # The thread starts first: while Orbax's own threads are busy, starting one takes as long as all the rest.
        responses: SimpleQueue[Any] = SimpleQueue()
        finish = functools.partial(self._finish, step, layout, kept_facts, responses)
        self._thread = threading.Thread(target=finish, name=f"checkpoint {step}")
        self._thread.start()
        try:
            responses.put(arrays.start_writing(self.folder / str(step) / STATE, arrays.to_stored(state, layout)))
        except BaseException as error:
            responses.put(error)
            self.wait()
            if isinstance(error, Exception) and not isinstance(error, CheckpointError):
                return False
            raise
        if self._asynchronous:
            return True
        self.wait()
        return bool(from_first(step in self._known))

    def wait(self) -> None:
        """Returns once no save is being written any more; how it ended is in `steps()` and `problems`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for what is being written; call it before the program ends."""
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, state: PyTree, step: int, layout: Layout) -> None:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"cannot save step {step!r}.", hint="a step is a whole number, 0 or more.")
        if not isinstance(layout.mesh, Mesh):
            raise CheckpointError("cannot save with the layout of a machine that is not here.")
        require_live_state(state)
        require_same_state(state, layout)
        arrays.check_names([leaf.name for leaf in layout.leaves])

    def _make_room(self, step: int, layout: Layout) -> str:
        """Makes room for a step; returns why it is not to be written, or nothing."""
        if step in self._known:
            return _KNOWN
        place = self.folder / str(step)
        try:
            # A disk that is busy writing can keep a new folder waiting for seconds, so Orbax makes them in the
            # background.
            self.clean()
            if (place / MANIFEST).exists():
                self._say("checkpoint", step, f"step {step}: replaces a checkpoint from before this run")
                remove_step(self.folder, step)
            if place.exists():
                return f"{place} exists, and is not ours"
            existing = next(parent for parent in place.parents if parent.exists())
            free = shutil.disk_usage(existing).free
            if free < layout.bytes_total:
                return (
                    f"the disk is full (not enough space: the state takes {format_bytes(layout.bytes_total)}, "
                    f"{format_bytes(free)} are free)"
                )
            if jax.process_count() > 1:
                place.mkdir(parents=True)
                (place / SAVING).touch()
        except (OSError, CheckpointError) as error:
            return explain_failure(error)
        return ""

    def _finish(self, step: int, layout: Layout, facts: dict[str, Any], responses: SimpleQueue[Any]) -> None:
        """The part of a save that runs beside training: waits for the arrays, hashes files, writes the manifest."""
        began = time.monotonic()
        place = self.folder / str(step)
        try:
            response = responses.get()
            if isinstance(response, BaseException):
                raise response
            arrays.finish_writing(response, is_alive=(place / SAVING).exists if jax.process_count() > 1 else None)
            files = _hash_together(place)
            if is_first():
                described = describe_layout(layout)
                manifest = Manifest(step=step, files=files, facts=facts, versions=current_versions(), **described)
                write_manifest(place, manifest)
        except BaseException as error:
            self._give_up(step, explain_failure(error))
            return
        self._known.add(step)
        self._bad.discard(step)
        if not is_first():
            return
        seconds = time.monotonic() - began
        self._say("checkpoint", step, f"saved step {step}: {format_bytes(layout.bytes_total)} in {seconds:.1f} s")
        # Later steps come from another course of the run: they are not ours to count or to remove.
        steps = [other for other in self.steps() if other <= step and other not in self._bad]
        for old in self.keep.removable(steps):
            try:
                remove_step(self.folder, old)
            except OSError as error:
                self._complain(step, f"step {old} could not be removed: {explain_failure(error)}")

    def _give_up(self, step: int, why: str) -> None:
        self._dead.add(step)
        self.failures[step] = why
        freed = "what it wrote was removed"
        try:
            (self.folder / str(step) / SAVING).unlink(missing_ok=True)
            if is_first() and step in unfinished_steps(self.folder):
                remove_folder(self.folder / str(step))
        except (OSError, CheckpointError) as error:
            freed = f"what it wrote will be removed before the next save, since now: {explain_failure(error)}"
        self._complain(step, f"step {step} was not saved: {why}. Training can go on; {freed}.")

    def _complain(self, step: int, text: str) -> None:
        self.problems.append(text)
        self._say("checkpoint_failed", step, text)

    def _say(self, kind: str, step: int, text: str) -> None:
        if self._tell is None:
            return
        try:
            self._tell(kind, step, text)
        except Exception as error:  # who tells may write to the disk that is full
            self.problems.append(f"step {step}: could not tell {text!r}: {explain_failure(error)}")

    # --- What there is ---

    def steps(self) -> list[int]:
        """Returns the finished steps in order; nothing is read but names."""
        return finished_steps(self.folder)

    def latest(self) -> int | None:
        """Returns the last finished step."""
        return max(self.steps(), default=None)

    def clean(self) -> list[int]:
        """Removes what saves left behind that were killed before this object was made; every save does so first.

        Only folders that are named by a number, have no manifest and hold nothing but what we write are touched.
        """
        if not is_first():
            return []
        removed = [step for step in unfinished_steps(self.folder) if step in self._dead]
        for step in removed:
            remove_folder(self.folder / str(step))
            self._dead.discard(step)
        return removed

    # --- Restoring ---

    def restore(
        self, layout: Layout, *, step: int | None = None, cast: bool = False, part: str | None = None
    ) -> Restored:
        """Returns a state on a layout's mesh, every byte of it verified before any is used.

        Args:
            layout: where to put it: any mesh, any number of processes.
            step: this step or none. By default the last good one; `notes` says which were passed over, and why.
            cast: accepts float dtypes other than the stored ones.
            part: restores only what is below this name, such as `params`, from a checkpoint that may have more.
        """
        self.wait()
        layout = layout if part is None else part_of(layout, part)
        notes: list[str] = []
        if step is None:
            step, notes = self._last_to_restore()
        else:
            self._require_good(step)
        restored = read_step(self.folder / str(step), layout, cast=cast, part=part is not None)
        self._known = {step} if part is None else set()
        return dataclasses.replace(restored, notes=[*notes, *restored.notes])

    def _last_to_restore(self) -> tuple[int, list[str]]:
        step, damaged = self.last_good(pass_unreadable=False)
        unfinished = [other for other in unfinished_steps(self.folder) if other > (self.latest() or -1)]
        notes = [f"step {other} has no manifest: it was not finished, and is passed over" for other in unfinished]
        notes += damaged
        if step is None:
            detail = "".join(f"\n  {note}" for note in notes)
            raise CheckpointError(
                f"there is no step to restore in {self.folder}.{detail}",
                hint="start anew, or look for a copy elsewhere.",
            )
        return step, notes

    def last_good(self, *, pass_unreadable: bool = True) -> tuple[int | None, list[str]]:
        """Returns the last step in which every byte is as it was written, and what is wrong with those after it.

        Args:
            pass_unreadable: where False, raises at a step that cannot be read: it may be whole, and what a run then
                saves must not be written over it.
        """
        notes: list[str] = []
        for step, problems in self._candidates():
            if not problems:
                return step, notes
            unreadable = all(map(is_unreadable, problems))
            if unreadable and not pass_unreadable:
                raise CheckpointError(
                    f"step {step} cannot be restored: {_in_words(problems)}",
                    hint="who may read it? To go on from an earlier step, move it elsewhere.",
                )
            if not unreadable:
                self._bad.add(step)
            what = "cannot be read" if unreadable else "is damaged"
            notes.append(f"step {step} {what} and passed over: {_in_words(problems)}")
        return None, notes

    def _require_good(self, step: int) -> None:
        problems = problems_of(self.folder / str(step))
        if problems:
            self._bad.add(step)
            good = next((other for other, wrong in self._candidates(but=step) if not wrong), None)
            raise CheckpointError(
                f"step {step} cannot be restored: {_in_words(problems)}",
                hint="no other step is good: look for a copy elsewhere."
                if good is None
                else f"the last good step is {good}, which is taken where no step is named.",
            )

    def _candidates(self, *, but: int | None = None) -> Iterator[tuple[int, list[str]]]:
        """Returns the finished steps, the last one first, each with what is wrong with it; all processes go through."""
        steps = sorted((step for step in self.steps() if step != but), reverse=True) if is_first() else []
        count = from_first(len(steps))  # by then, the first process has finished what it was writing

        def verified(place: int) -> tuple[int, list[str]]:
            step = from_first(steps[place] if steps else -1)
            return step, problems_of(self.folder / str(step))

        return map(verified, range(count))


def _hash_together(place: Path) -> dict[str, FileHash]:
    """Returns the hashes of a step's files, each process hashing its share; only the first one gets all of them."""
    rank, count = jax.process_index(), jax.process_count()
    names = [f"{STATE}/{name}" for name in list_files(place / STATE)]
    hashes = hash_files(place, names[rank::count], sync=True)
    if rank != 0:
        write_atomically(_note(place, rank), json.dumps(hashes))
        return hashes
    for peer in range(1, count):
        hashes |= _hashes_of(place, peer)
    # A file that no process took, because its view of the folder was old, is hashed here.
    hashes |= hash_files(place, [name for name in names if name not in hashes], sync=True)
    if count > 1:
        for peer in range(1, count):
            _note(place, peer).unlink()
        (place / SAVING).unlink()
    for folder, _, _ in os.walk(place):
        sync_folder(Path(folder))
    return {name: hashes[name] for name in names}


def _hashes_of(place: Path, peer: int) -> dict[str, FileHash]:
    note, deadline = _note(place, peer), time.monotonic() + PEER_SECONDS
    while not note.exists():
        if not (place / SAVING).exists():
            raise CheckpointError(f"process {peer} of this run could not write its share")
        if time.monotonic() > deadline:
            raise CheckpointError(f"process {peer} of this run gave no hashes in {PEER_SECONDS:.0f} s")
        time.sleep(0.05)
    return {name: FileHash(*item) for name, item in json.loads(note.read_text()).items()}


def _note(place: Path, rank: int) -> Path:
    return place / f".hashes-{rank}.json"


def _in_words(problems: list[str]) -> str:
    shown = "; ".join(problems[:5])
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"
