"""A folder of checkpoints: saved in the background, removed by policy, and verified before they are restored."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from jax.sharding import Mesh

from meshwright.checkpoint import arrays
from meshwright.checkpoint.file_hashes import is_unreadable
from meshwright.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    current_versions,
    describe_layout,
    plain_facts,
    read_manifest,
)
from meshwright.checkpoint.peers import Meeting, Meetings
from meshwright.checkpoint.restoring import Restored, part_of, problems_of, read_step
from meshwright.checkpoint.retention import Keep, finished_steps, remove_step, unfinished_steps
from meshwright.distributed.agreement import from_first, gather_texts, is_first
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, remove_folder
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.train.guards import require_live_state, require_same_state
from meshwright.types import PyTree

Tell = Callable[[str, int, str], Any]
"""`tell(kind, step, text)` with kind "checkpoint" or "checkpoint_failed"; may be called from another thread."""


class Checkpoints:
    """The checkpoints of a run, one folder per step, on a file system shared by all processes.

    Every process makes the same calls in the same order. A failed save never raises: it is reported to `tell` and
    `problems`, and its files are removed.

    Args:
        keep: which steps to keep once a newer one is finished.
        asynchronous: whether to write files in the background while training continues.
        tell: called with ("checkpoint", step, text) when a step is saved, and with ("checkpoint_failed", step, text).

    Example:
        >>> import tempfile, jax, optax, meshwright as mw
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
        self._meetings = Meetings(shared=True)
        self.keep = keep or Keep()
        self.problems: list[str] = []
        self.failures: dict[int, str] = {}  # the reason, by step
        self._asynchronous = asynchronous
        self._tell = tell
        self._thread: threading.Thread | None = None
        # Steps that this object saved or restored, which need not be written again.
        self._known: set[int] = set()
        self._bad: set[int] = set()
        # Steps left unfinished by earlier processes, and later by this object's own failed saves.
        self._dead = set(unfinished_steps(self.folder))

    # --- Saving ---

    def save(self, state: PyTree, *, step: int, layout: Layout, facts: Mapping[str, Any]) -> bool:
        """Starts saving a state; returns once its buffers may be donated, or False if nothing was started.

        It first waits for a save that is still in progress. A step that this object saved or restored is not written
        again; one that an earlier run left is replaced.

        Args:
            facts: other values that a resumed run needs, as JSON: configuration, position in the data.
        """
        if type(step) is not int or step < 0:
            raise CheckpointError(f"cannot save step {step!r}.", hint="pass an integer, 0 or more.")
        if not isinstance(layout.mesh, Mesh):
            raise CheckpointError("cannot save with the layout of an abstract mesh.", hint="use create_mesh(...).")
        require_live_state(state)
        require_same_state(state, layout)
        arrays.check_names([leaf.name for leaf in layout.leaves])
        kept_facts = plain_facts(facts)
        self.wait()
        # Process 0 decides, because only it knows how the last save ended.
        if from_first(int(step in self._known)):
            return False
        meeting = self._meetings.next()
        problems = gather_texts(self._make_room(step, layout, meeting) if self._writes else "")
        if any(problems):
            self._give_up(step, next(filter(None, problems)), meeting)
            return False

        # Start the thread first: while Orbax's threads are busy, starting one takes as long as all the rest.
        responses: SimpleQueue[Any] = SimpleQueue()
        finish = functools.partial(self._finish, step, layout, kept_facts, responses, meeting)
        self._thread = threading.Thread(target=finish, name=f"checkpoint {step}")
        self._thread.start()
        try:
            responses.put(meeting.start_writing(self.folder / str(step) / STATE, arrays.to_stored(state, layout)))
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
        """Waits for the save in progress; call it before the program ends. `problems` tells if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    close = wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _writes(self) -> bool:
        """Whether this process creates and removes the folders of steps."""
        return is_first() or not self._meetings.shared

    def _make_room(self, step: int, layout: Layout, meeting: Meeting) -> str:
        """Makes room for a step; returns the reason not to write it, or an empty string."""
        place = self.folder / str(step)
        try:
            self.clean()
            if (place / MANIFEST).exists():
                self._say("checkpoint", step, f"step {step}: replacing the checkpoint of an earlier run")
                remove_step(self.folder, step)
            if place.exists():
                return f"{place} exists and is not a checkpoint"
            existing = next(parent for parent in place.parents if parent.exists())
            free = shutil.disk_usage(existing).free
            needed = meeting.num_bytes(layout)
            if free < needed:
                return (
                    f"the disk is full (not enough space: the state takes {format_bytes(needed)}, but only "
                    f"{format_bytes(free)} are free)"
                )
            meeting.open(place)
        except (OSError, CheckpointError) as error:
            return explain_failure(error)
        return ""

    def _finish(
        self, step: int, layout: Layout, facts: dict[str, Any], responses: SimpleQueue[Any], meeting: Meeting
    ) -> None:
        """The background part of a save: waits for the arrays, hashes the files, writes the manifest."""
        began = time.monotonic()
        place = self.folder / str(step)
        try:
            response = responses.get()
            if isinstance(response, BaseException):
                raise response
            meeting.finish_writing(place, response)
            described = describe_layout(layout)
            unusual = meeting.finish(
                place,
                lambda files: Manifest(step=step, files=files, facts=facts, versions=current_versions(), **described),
            )
        except BaseException as error:
            self._give_up(step, explain_failure(error), meeting)
            return
        self._known.add(step)
        self._bad.discard(step)
        if is_first():
            seconds = time.monotonic() - began
            text = f"saved step {step}: {format_bytes(layout.bytes_total)} in {seconds:.1f} s"
            self._say("checkpoint", step, f"{text}; {unusual}" if unusual else text)
        self._after_save(step, meeting)

    def _after_save(self, step: int, meeting: Meeting) -> None:
        """Called in the background on every process, after a save."""
        self._remove_old(step, self.keep)

    def _remove_old(self, step: int, keep: Keep) -> None:
        """Removes the steps before this one that need not be kept."""
        if not self._writes:
            return
        # Later steps belong to a discarded course of the run, and are neither counted nor removed.
        steps = [other for other in finished_steps(self.folder) if other <= step and other not in self._bad]
        for old in keep.removable(steps):
            try:
                remove_step(self.folder, old)
            except OSError as error:
                self._complain(step, f"could not remove step {old}: {explain_failure(error)}")

    def _give_up(self, step: int, why: str, meeting: Meeting) -> None:
        self._dead.add(step)
        self.failures[step] = why
        freed = "its files were removed"
        try:
            meeting.give_up(self.folder / str(step), why)
            if self._writes and step in unfinished_steps(self.folder):
                remove_folder(self.folder / str(step))
        except (OSError, CheckpointError) as error:
            freed = f"its files will be removed before the next save ({explain_failure(error)})"
        self._complain(step, f"could not save step {step}: {why}. Training continues; {freed}.")

    def _complain(self, step: int, text: str) -> None:
        self.problems.append(text)
        self._say("checkpoint_failed", step, text)

    def _say(self, kind: str, step: int, text: str) -> None:
        if self._tell is None:
            return
        try:
            self._tell(kind, step, text)
        except Exception as error:  # it may write to the disk that is full
            self.problems.append(f"step {step}: could not report {text!r}: {explain_failure(error)}")

    # --- Listing and cleaning ---

    def steps(self) -> list[int]:
        """Returns the finished steps in order; reads only file names."""
        return finished_steps(self.folder)

    def durable_steps(self) -> list[int]:
        """Returns the finished steps that survive the loss of this machine, if they are known; else all of them."""
        return self.steps()

    def make_durable(self, step: int) -> None:
        """Waits until a saved step is in the durable place too; without one, it does nothing."""

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a finished step."""
        return read_manifest(self.folder / str(step))

    def latest(self) -> int | None:
        """Returns the last finished step, or None."""
        return max(self.steps(), default=None)

    def clean(self) -> list[int]:
        """Removes the files of killed or failed saves and returns their steps; every save does so first.

        Only folders that are named by a number, have no manifest and contain only files of a save are removed.
        """
        if not self._writes:
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
        """Restores a state onto a layout's mesh; verifies every byte before using any.

        Args:
            layout: the target, on any mesh and number of processes.
            step: the step to restore (default: the last good one; `notes` lists the skipped steps with reasons).
            cast: accepts float dtypes that differ from the stored ones.
            part: restores only the leaves below this name, such as `params`; the checkpoint may have more.
        """
        self.wait()
        layout = layout if part is None else part_of(layout, part)
        notes: list[str] = []
        if step is None:
            step, notes = self._last_to_restore()
        else:
            self.require_good(step)
        restored = read_step(self.folder / str(step), layout, cast=cast, part=part is not None)
        self._known = {step} if part is None else set()
        return dataclasses.replace(restored, notes=[*notes, *restored.notes])

    def _last_to_restore(self) -> tuple[int, list[str]]:
        step, damaged = self.last_good(pass_unreadable=False)
        unfinished = [other for other in unfinished_steps(self.folder) if other > (self.latest() or -1)]
        notes = [f"skipped checkpoint {other}, which is unfinished (it has no manifest)" for other in unfinished]
        notes += damaged
        if step is None:
            detail = "".join(f"\n  {note}" for note in notes)
            raise CheckpointError(f"there is no step to restore in {self.folder}.{detail}", hint="restore a backup.")
        return step, notes

    def last_good(self, *, pass_unreadable: bool = True) -> tuple[int | None, list[str]]:
        """Returns the last intact step, and a note on each later one.

        Args:
            pass_unreadable: whether to skip a step that cannot be read. Otherwise raise, since it may be intact, and a
                resumed run must not overwrite it.
        """
        notes: list[str] = []
        for step, problems in self._candidates():
            if not problems:
                return step, notes
            unreadable = all(map(is_unreadable, problems))
            if unreadable and not pass_unreadable:
                raise CheckpointError(
                    f"cannot restore step {step}: {_in_words(problems)}",
                    hint="check its permissions; to resume from an earlier step, move it elsewhere.",
                )
            if not unreadable:
                self._bad.add(step)
            what = "cannot be read" if unreadable else "is damaged"
            notes.append(f"skipped checkpoint {step}, which {what}: {_in_words(problems)}")
        return None, notes

    def last_good_or_raise(self, *, who: str = "") -> tuple[int, list[str]]:
        """Returns the same, or raises if no step is intact; `who` starts the error."""
        step, notes = self.last_good()
        if step is None:
            detail = "".join(f"\n  {note}" for note in notes)
            raise CheckpointError(f"{who}there is no good step in {self.folder}.{detail}", hint="restore a backup.")
        return step, notes

    def require_good(self, step: int) -> None:
        """Raises if a step is damaged or cannot be read; the error names the last good one."""
        problems = self.verify(step)
        if problems:
            self._bad.add(step)
            good = next((other for other, wrong in self._candidates(but=step) if not wrong), None)
            raise CheckpointError(
                f"cannot restore step {step}: {_in_words(problems)}",
                hint="restore a backup; no other step is intact."
                if good is None
                else f"restore step {good}, the last good one (the default if no step is given).",
            )

    def _candidates(self, *, but: int | None = None) -> Iterator[tuple[int, list[str]]]:
        """Returns the finished steps, last first, each with its problems; all processes must iterate over it."""
        steps = sorted((step for step in self.steps() if step != but), reverse=True) if is_first() else []
        count = from_first(len(steps))  # by then, process 0 has finished its save

        def verified(place: int) -> tuple[int, list[str]]:
            step = from_first(steps[place] if steps else -1)
            return step, self.verify(step)

        return map(verified, range(count))

    def verify(self, step: int) -> list[str]:
        """Reads every byte of a finished step and returns its problems, on all processes; empty if it is intact."""
        return problems_of(self.folder / str(step))


def _in_words(problems: list[str]) -> str:
    shown = "; ".join(problems[:5])
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"
