"""Checkpoints in two places: frequent ones in a fast local folder, every n-th also in an object store.

A step is written, hashed and finished in the folder first; then its files are uploaded, and its manifest last. Only
whole, verified steps move in either direction, so both places keep the promises of `Checkpoints`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.durable import DurableSteps, step_files
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.retention import Keep, finished_steps, step_status
from meshwright.checkpoint.store import PEER_SECONDS, Checkpoints
from meshwright.distributed.agreement import from_first, gather_texts, is_first
from meshwright.errors import CheckpointError
from meshwright.files import explain_failure, remove_folder, write_atomically


class TieredCheckpoints(Checkpoints):
    """Checkpoints in a local folder and in an object store; restoring takes the newest intact step of both.

    The folder must be shared by all processes of the run. At most one upload is in progress; training and local saves
    continue meanwhile. A failed upload never raises: it is reported like a failed save, and the step stays in the
    folder.

    Args:
        durable: the steps in the store.
        keep_local: number of most recent steps to keep in the folder.
        trust_local: whether the folder may hold newer steps than the store, as that of the run's last writer does.
            Otherwise it is only a cache of the store.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        durable: DurableSteps,
        keep_local: int = 1,
        trust_local: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(folder, **options)
        self.durable, self.keep_local, self.trust_local = durable, keep_local, trust_local
        self._uploading: threading.Thread | None = None
        self._upload_step: int | None = None

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
            self._upload(step)

    def _is_uploaded(self, step: int) -> bool:
        try:
            return step in self.durable.steps()
        except Exception:  # `_upload` reports it
            return False

    def _after_save(self, step: int) -> None:
        if self.durable.is_due(step) or step in self.keep.steps:
            self._wait_for_upload()  # at most one step waits
            self._upload_step = step
            self._uploading = threading.Thread(target=self._upload, args=(step,), name=f"upload {step}")
            self._uploading.start()
        busy = () if self._upload_step is None else (self._upload_step,)
        self._remove_old(step, Keep(last=self.keep_local, steps=(*self.keep.steps, *busy)))

    def _wait_for_upload(self) -> None:
        if self._uploading is not None:
            self._uploading.join()
            self._uploading = self._upload_step = None

    def _upload(self, step: int) -> None:
        """Uploads a finished step; each process uploads a share of the files, and process 0 finishes it."""
        began, place = time.monotonic(), self.folder / str(step)
        rank, count = jax.process_index(), jax.process_count()
        try:
            try:
                if is_first():
                    self.durable.begin(step)
                self.durable.upload(place, step_files(place)[rank::count])
            except Exception as error:
                self._note(step, rank, explain_failure(error))
                raise
            self._note(step, rank, "")
            if is_first():
                self._wait_for_peers(step)
                self.durable.keep = self.keep
                self.durable.commit(place, ignore=self._bad)
                seconds = time.monotonic() - began
                self._say("checkpoint", step, f"uploaded step {step} to {self.durable.store} in {seconds:.1f} s")
        except Exception as error:
            why = explain_failure(error).removeprefix("StoreError: ").partition(" hint:")[0]
            text = f"could not upload step {step}: {why}. Training continues; the step is in {self.folder}."
            self._complain(step, text)

    def _note(self, step: int, rank: int, text: str) -> None:
        """Tells process 0 about the upload of this process, by a file in the shared folder."""
        if rank:
            write_atomically(self.folder / f".uploaded-{step}-{rank}", text)

    def _wait_for_peers(self, step: int) -> None:
        deadline = time.monotonic() + PEER_SECONDS
        for peer in range(1, jax.process_count()):
            note = self.folder / f".uploaded-{step}-{peer}"
            while not note.exists():
                if time.monotonic() > deadline:
                    raise CheckpointError(f"process {peer} of this run did not upload its share")
                time.sleep(0.05)
            problem = note.read_text()
            note.unlink()
            if problem:
                raise CheckpointError(f"process {peer} of this run could not upload its share: {problem}")

    # --- Restoring ---

    def verify(self, step: int) -> list[str]:
        """Returns the problems of a step, after fetching it if it is only in the store or damaged in the folder."""
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
        try:
            data, found = self.durable.fetch(step, place, share=share)
        except CheckpointError as error:  # a damaged manifest, or a full disk
            data, found = b"", [str(error).split("\nhint:")[0]]
        lines = [line for text in gather_texts("\n".join(found)) for line in text.split("\n") if line]
        problems = list(dict.fromkeys(lines))
        if is_first():
            if problems:
                remove_folder(place)
            else:
                write_atomically(place / MANIFEST, data)
        gather_texts("")
        return problems


def _is_finished(place: Path) -> bool:
    return place.is_dir() and step_status(place) == "finished"
