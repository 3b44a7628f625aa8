"""A folder of checkpoints: saved beside training, kept by policy, verified before anything is restored."""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from meshwright.checkpoint import arrays
from meshwright.checkpoint.manifest import MANIFEST, STATE, Manifest, current_versions, describe_layout, plain_facts
from meshwright.checkpoint.restoring import Restored, part_of, problems_of, read_step
from meshwright.checkpoint.retention import SAVING, Keep, finished_steps, remove_step, unfinished_steps
from meshwright.checkpoint.saving import finish_save
from meshwright.checkpoint.step_files import FileHash, explain_failure, is_unreadable, remove_folder
from meshwright.checkpoint.stored_tree import check_names, to_stored
from meshwright.distributed.agreement import from_first, gather_texts, is_first
from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.layout.leaf import format_bytes
from meshwright.train.guards import require_live_state, require_same_state
from meshwright.types import PyTree

Tell = Callable[[str, int, str], Any]
"""`tell(kind, step, text)`; kinds are "checkpoint" and "checkpoint_failed". It may be called from another thread."""


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
        decision = gather_texts(self._prepared(step, layout) if is_first() else "")[0]
        if decision:
            if decision != _KNOWN:
                self._give_up(step, decision)
            return False

        # Asked for when all is written: what takes time and can wait does not keep the run.
        def manifest(files: dict[str, FileHash]) -> Manifest:
            described = describe_layout(layout)
            return Manifest(step=step, files=files, facts=kept_facts, versions=current_versions(), **described)

        # The thread starts first: while Orbax's own threads are busy, starting one takes as long as all the rest.
        responses: SimpleQueue[Any] = SimpleQueue()
        finish = functools.partial(self._finish, step, responses, manifest, layout.bytes_total)
        self._thread = threading.Thread(target=finish, name=f"checkpoint {step}")
        self._thread.start()
        try:
            responses.put(arrays.start_writing(self.folder / str(step) / STATE, to_stored(state, layout)))
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, state: PyTree, step: int, layout: Layout) -> None:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"cannot save step {step!r}.", hint="a step is a whole number, 0 or more.")
        if not isinstance(layout.mesh, Mesh):
            raise CheckpointError("cannot save with the layout of a machine that is not here.")
        require_live_state(state)
        require_same_state(state, layout)
        check_names([leaf.name for leaf in layout.leaves])

    def _prepared(self, step: int, layout: Layout) -> str:
        """Makes room for a step; returns why it is not to be written, or nothing."""
        if step in self._known:
            return _KNOWN
        try:
            return self._make_room(step, layout)
        except (OSError, CheckpointError) as error:
            return explain_failure(error)

    def _make_room(self, step: int, layout: Layout) -> str:
        # A disk that is busy writing can keep a new folder waiting for seconds, so Orbax makes them in the background.
        self.clean()
        place = self.folder / str(step)
        if (place / MANIFEST).exists():
            self._say("checkpoint", step, f"step {step}: replaces a checkpoint from before this run")
            remove_step(self.folder, step)
        if place.exists():
            return f"{place} exists, and is not ours"
        free = shutil.disk_usage(_existing(self.folder)).free
        if free < layout.bytes_total:
            return (
                f"the disk is full (not enough space: the state takes {format_bytes(layout.bytes_total)}, "
                f"{format_bytes(free)} are free)"
            )
        if jax.process_count() > 1:
            place.mkdir(parents=True)
            (place / SAVING).touch()
        return ""

    def _finish(
        self, step: int, responses: SimpleQueue[Any], manifest: Callable[[Any], Manifest], num_bytes: int
    ) -> None:
        began = time.monotonic()
        try:
            response = responses.get()
            if isinstance(response, BaseException):
                raise response
            finish_save(self.folder / str(step), response, manifest)
        except BaseException as error:
            self._give_up(step, explain_failure(error))
            return
        self._known.add(step)
        self._bad.discard(step)
        if not is_first():
            return
        self._say(
            "checkpoint", step, f"saved step {step}: {format_bytes(num_bytes)} in {time.monotonic() - began:.1f} s"
        )
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
        removed = []
        for step in unfinished_steps(self.folder):
            place = self.folder / str(step)
            if step in self._dead:
                remove_folder(place)
                self._dead.discard(step)
                removed.append(step)
        return removed

    def drop_after(self, step: int) -> list[int]:
        """Removes all steps after one, for a run that goes another way from there; returns which they were."""
        self.wait()
        later = [other for other in self.steps() if other > step]
        if is_first():
            for other in later:
                remove_step(self.folder, other)
        self._known = {other for other in self._known if other <= step}
        return later

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
        restored = self._last_good(layout, cast, part) if step is None else self._named(step, layout, cast, part)
        self._known = {restored.step} if part is None else set()
        return restored

    def _last_good(self, layout: Layout, cast: bool, part: str | None) -> Restored:
        notes: list[str] = []
        candidates = self._candidates()
        unfinished = [other for other in unfinished_steps(self.folder) if other > (self.latest() or -1)]
        notes += [f"step {other} has no manifest: it was not finished, and is passed over" for other in unfinished]
        for candidate, problems in candidates:
            if not problems:
                restored = read_step(self.folder / str(candidate), layout, cast=cast, part=part is not None)
                return Restored(restored.state, candidate, restored.facts, [*notes, *restored.notes])
            if all(map(is_unreadable, problems)):  # it may be whole, so what follows it must not be written over it
                raise CheckpointError(
                    f"step {candidate} cannot be restored: {_in_words(problems)}",
                    hint="who may read it? To go on from an earlier step, move it elsewhere.",
                )
            self._bad.add(candidate)
            notes.append(f"step {candidate} is damaged and passed over: {_in_words(problems)}")
        detail = "".join(f"\n  {note}" for note in notes)
        raise CheckpointError(
            f"there is no step to restore in {self.folder}.{detail}", hint="start anew, or look for a copy elsewhere."
        )

    def _candidates(self, *, but: int | None = None) -> Iterator[tuple[int, list[str]]]:
        """Returns the finished steps, the last one first, each with what is wrong with it; all processes go through."""
        steps = sorted((step for step in self.steps() if step != but), reverse=True) if is_first() else []
        count = from_first(len(steps))  # by then, the first process has finished what it was writing

        def verified(place: int) -> tuple[int, list[str]]:
            step = from_first(steps[place] if steps else -1)
            return step, problems_of(self.folder / str(step))

        return map(verified, range(count))

    def last_good(self) -> tuple[int | None, list[str]]:
        """Returns the last step in which every byte is as it was written, and what is wrong with those after it."""
        notes: list[str] = []
        for step, problems in self._candidates():
            if not problems:
                return step, notes
            what = "cannot be read" if all(map(is_unreadable, problems)) else "is damaged"
            notes.append(f"step {step} {what} and passed over: {_in_words(problems)}")
        return None, notes

    def _named(self, step: int, layout: Layout, cast: bool, part: str | None) -> Restored:
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
        return read_step(self.folder / str(step), layout, cast=cast, part=part is not None)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _in_words(problems: list[str]) -> str:
    shown = "; ".join(problems[:5])
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"
