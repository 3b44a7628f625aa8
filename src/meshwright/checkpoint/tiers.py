"""Checkpoints in two places: frequent ones in a fast local folder, every n-th also in an object store.

A step is written, hashed and finished in the folder first; then its files are uploaded, and its manifest last. Only
whole, verified steps move in either direction, so both places keep the promises of `Checkpoints`.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.durable import DurableSteps, step_files
from meshwright.checkpoint.file_hashes import compare_files
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.peers import Meeting, Meetings
from meshwright.checkpoint.restoring import Restored
from meshwright.checkpoint.retention import Keep, finished_steps, step_status, unfinished_steps
from meshwright.checkpoint.step_parts import is_shard, needed_files
from meshwright.checkpoint.store import Checkpoints
from meshwright.distributed.agreement import bytes_from_first, from_first, gather_texts, is_first, together
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, remove_folder, write_atomically
from meshwright.layout import Layout


class TieredCheckpoints(Checkpoints):
    """Checkpoints in a local folder and in an object store; restoring takes the newest intact step of both.

    At most one upload is in progress; training and local saves continue meanwhile. A failed upload never raises: it is
    reported like a failed save, and the step stays in the folder.

    Processes that share no folder pass one each, and `shared=False`. Each keeps the shards of its devices there,
    uploads a part of them, and fetches those that it needs and lacks.

    Args:
        durable: the steps in the store.
        keep_local: number of most recent steps to keep in the folder.
        trust_local: whether the folder may hold newer steps than the store, as that of the run's last writer does.
            Otherwise it is only a cache of the store.
        shared: whether all processes of the run see the folder.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        durable: DurableSteps,
        keep_local: int = 1,
        trust_local: bool = True,
        shared: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self._meetings = Meetings(shared)
        self.durable, self.keep_local, self.trust_local = durable, keep_local, trust_local
        self._uploading: threading.Thread | None = None
        self._upload_step: int | None = None
        self._wanted: Layout | None = None  # the layout that is being restored

    def steps(self) -> list[int]:
        """Returns the finished steps of both places in order."""
        return sorted({*self.durable.steps(), *(finished_steps(self.folder) if self.trust_local else ())})

    def durable_steps(self) -> list[int]:
        """Returns the finished steps in the store."""
        return self.durable.steps()

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a finished step."""
        is_local = self.trust_local and step in finished_steps(self.folder)
        return super().manifest(step) if is_local else self.durable.manifest(step)

    def close(self) -> None:
        """Waits for the save and the upload in progress."""
        self.wait()
        self._wait_for_upload()

    # --- Uploading ---

    def make_durable(self, step: int) -> None:
        """Waits until a saved step is in the store, after uploading it if it is only in the folder."""
        self.close()
        here = is_first() and step in finished_steps(self.folder) and not self._is_uploaded(step)
        if from_first(int(here)):
            self._upload(step, self._meetings.next())

    def _is_uploaded(self, step: int) -> bool:
        try:
            return step in self.durable.steps()
        except Exception:  # `_upload` reports it
            return False

    def _after_save(self, step: int, meeting: Meeting) -> None:
        if self.durable.is_due(step) or step in self.keep.steps:
            self._wait_for_upload()  # at most one step waits
            self._upload_step = step
            self._uploading = threading.Thread(target=self._upload, args=(step, meeting), name=f"upload {step}")
            self._uploading.start()
        busy = () if self._upload_step is None else (self._upload_step,)
        self._remove_old(step, Keep(last=self.keep_local, steps=(*self.keep.steps, *busy)))

    def _wait_for_upload(self) -> None:
        if self._uploading is not None:
            self._uploading.join()
            self._uploading = self._upload_step = None

    def _upload(self, step: int, meeting: Meeting) -> None:
        """Uploads a finished step; each process uploads a share of the files, and process 0 finishes it."""
        began, place = time.monotonic(), self.folder / str(step)
        try:
            try:
                share = meeting.share(place, step_files(place), lambda: self.durable.begin(step))
                self.durable.upload(place, share)
                if not is_first() and not meeting.shared:
                    self.durable.before_commit()
            except Exception as error:
                meeting.report(place, explain_failure(error))
                raise
            meeting.report(place, "")
            if is_first():
                meeting.hear(place)
                self.durable.keep = self.keep
                self.durable.commit(place, ignore=self._bad)
                seconds = time.monotonic() - began
                self._say("checkpoint", step, f"uploaded step {step} to {self.durable.store} in {seconds:.1f} s")
        except Exception as error:
            why = explain_failure(error).removeprefix("StoreError: ").partition(" hint:")[0]
            text = f"could not upload step {step}: {why}. Training continues; the step is in {self.folder}."
            self._complain(step, text)

    # --- Restoring ---

    def restore(self, layout: Layout, **options: Any) -> Restored:
        """Restores a state, as `Checkpoints.restore` does."""
        self._wanted = layout
        try:
            return super().restore(layout, **options)
        finally:
            self._wanted = None

    def verify(self, step: int) -> list[str]:
        """Returns the problems of a step, after fetching it if it is only in the store or damaged in the folder."""
        if not self._meetings.shared:
            return self._verify_own(step)
        place = self.folder / str(step)
        is_here = is_first() and _is_finished(place)
        in_store = is_first() and step in self.durable.steps()
        if is_here and in_store and not self.trust_local:
            is_here = self.durable.store.read(f"{step}/{MANIFEST}") == (place / MANIFEST).read_bytes()
        problems = super().verify(step) if from_first(int(is_here)) else ["not in the folder"]
        if not problems or not from_first(int(in_store)):
            return problems
        return self._fetch(step)

    def _fetch(self, step: int) -> list[str]:
        """Downloads a step of the store into the folder and returns its problems, on all processes."""
        place = self.folder / str(step)
        if is_first() and os.path.lexists(place):
            if step_status(place) == "foreign":
                raise CheckpointError(f"{place} exists and is not a checkpoint.", hint="move it elsewhere.")
            remove_folder(place)
        gather_texts("")  # nobody writes before the old files are gone
        share = (jax.process_index(), jax.process_count())

        def fetch() -> tuple[bytes, list[str]]:
            try:
                return self.durable.fetch(step, place, share=share)
            except CheckpointError as error:  # a damaged manifest, or a full disk
                return b"", [str(error).split("\nhint:")[0]]

        data, found = together("fetching a step", fetch)
        problems = _gathered(found)
        if is_first():
            if problems:
                remove_folder(place)
            else:
                write_atomically(place / MANIFEST, data)
        gather_texts("")
        return problems

    def _verify_own(self, step: int) -> list[str]:
        """Checks the files of a step that this process needs in its own folder, after fetching those that it lacks."""
        place, problems = self.folder / str(step), ["not in the folder"]
        found = together("reading a manifest", lambda: self._manifests(step) if is_first() else [])
        for number in range(from_first(len(found))):
            is_stored, data = found[number] if is_first() else (False, b"")
            is_stored, data = bool(from_first(is_stored)), bytes_from_first(data)
            lines = together("reading a step", functools.partial(self._complete, place, data, is_stored))
            problems = _gathered(lines)
            if problems and not is_stored and self._is_whole(place, data):
                # Another mesh or other processes need shards of each other, which they get from the store.
                self._upload(step, self._meetings.next())
                if from_first(is_first() and self._is_uploaded(step)):
                    lines = together("reading a step", functools.partial(self._complete, place, data, True))
                    problems = _gathered(lines)
            if not problems:
                write_atomically(place / MANIFEST, data)
                return []
        if step in unfinished_steps(self.folder):
            remove_folder(place)
        return problems

    def _is_whole(self, place: Path, data: bytes) -> bool:
        """Returns whether every process has its part of a step as it was saved."""

        def is_intact() -> bool:
            if not _is_finished(place) or (place / MANIFEST).read_bytes() != data:
                return False
            files = Manifest.from_json(data, where=str(place / MANIFEST)).files
            return not compare_files(
                place, {name: files[name] for name in step_files(place) if name in files}, leave_out=(MANIFEST,)
            )

        found = together("reading a step", is_intact)
        return all(text == "yes" for text in gather_texts("yes" if found else "no"))

    def _manifests(self, step: int) -> list[tuple[bool, bytes]]:
        """Returns the manifests of a step in the folder and in the store, and whether the store has the step."""
        place, stored = self.folder / str(step), None
        if step in self.durable.steps():
            stored = self.durable.store.read(f"{step}/{MANIFEST}")
        held = (place / MANIFEST).read_bytes() if self.trust_local and _is_finished(place) else None
        there = [] if held is None else [(held == stored, held)]
        return there if stored is None or stored == held else [*there, (True, stored)]

    def _complete(self, place: Path, data: bytes, is_stored: bool) -> list[str]:
        """Returns the problems of this process's part of a step; keeps only files with the hashes of the manifest."""
        try:
            manifest = Manifest.from_json(data, where=str(place / MANIFEST))
        except CheckpointError as error:
            return [str(error).split("\nhint:")[0]]
        if manifest.step != int(place.name):
            return [f"{MANIFEST}: belongs to step {manifest.step}, but the folder is named {place.name}"]
        if os.path.lexists(place) and (not _is_finished(place) or (place / MANIFEST).read_bytes() != data):
            if step_status(place) == "foreign":
                raise CheckpointError(f"{place} exists and is not a checkpoint.", hint="move it elsewhere.")
            remove_folder(place)
        place.mkdir(parents=True, exist_ok=True)
        forms = [name for name in manifest.files if not is_shard(name)]
        problems = self._obtain(place, manifest, forms, is_stored)
        if not problems:
            shards = [name for name in needed_files(place, manifest.files, self._wanted) if is_shard(name)]
            problems = self._obtain(place, manifest, shards, is_stored)
        return problems

    def _obtain(self, place: Path, manifest: Manifest, names: list[str], is_stored: bool) -> list[str]:
        """Verifies files in the folder, and fetches those that are missing or damaged; returns what remains wrong."""
        wanted = {name: manifest.files[name] for name in names}
        there = {name: item for name, item in wanted.items() if (place / name).is_file()}
        wrong = {line.partition(":")[0]: line for line in compare_files(place, there, strict=False)}
        wrong |= {name: f"{name}: missing here" for name in wanted if name not in there}
        if not wrong or not is_stored:
            return list(wrong.values())
        (place / MANIFEST).unlink(missing_ok=True)  # until everything is there
        return self.durable.fetch_files(manifest, [name for name in wanted if name in wrong], place)


def _gathered(found: list[str]) -> list[str]:
    """Returns the problems that any process found."""
    lines = [line for text in gather_texts("\n".join(found)) for line in text.split("\n") if line]
    return list(dict.fromkeys(lines))


def _is_finished(place: Path) -> bool:
    return place.is_dir() and step_status(place) == "finished"
