"""Finished steps in an object store: a step's manifest is its last object, and every byte has its hash in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from meshwright.checkpoint.file_hashes import FileHash, list_files
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.checkpoint.retention import Keep
from meshwright.errors import CheckpointError
from meshwright.layout.leaf import format_bytes
from meshwright.remote.object_store import ObjectStore
from meshwright.remote.transfer import download_files, hash_objects, upload_files


class DurableSteps:
    """The steps below a URL, as `STEP/manifest.json` and the files that it lists.

    Args:
        store: the store of the steps.
        keep: which steps to keep once a newer one is finished.
        every: which steps to upload: multiples of this (default: all).
        before_commit: called before a step is finished, e.g. to check that no other process took over.

    Example:
        >>> from meshwright.remote import open_store
        >>> store = open_store("memory://bucket/run/checkpoints")
        >>> durable = DurableSteps(store, every=20)
        >>> durable.steps(), durable.is_due(20), durable.is_due(30)
        ([], True, False)
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        keep: Keep | None = None,
        every: int | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.store, self.keep, self.every = store, keep or Keep(), every
        self.before_commit = before_commit

    def is_due(self, step: int) -> bool:
        """Returns whether to upload a step."""
        return self.every is None or step % self.every == 0

    def steps(self) -> list[int]:
        """Returns the finished steps in order; reads only names."""
        return sorted(step for step, names in self._objects().items() if MANIFEST in names)

    def unfinished(self) -> list[int]:
        """Returns the steps without a manifest, which do not count."""
        return sorted(step for step, names in self._objects().items() if MANIFEST not in names)

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step; raises `CheckpointError` if it is missing or was changed."""
        return self._read_manifest(step)[1]

    def _read_manifest(self, step: int) -> tuple[bytes, Manifest]:
        where = f"{self.store}/{step}/{MANIFEST}"
        data = self.store.read(f"{step}/{MANIFEST}")
        if data is None:
            raise CheckpointError(f"{where} is missing: the step is unfinished, or does not exist.")
        return data, Manifest.from_json(data, where=where)

    def problems(self, step: int) -> list[str]:
        """Reads every byte of a step and returns its problems; empty if it is intact."""
        try:
            manifest = self.manifest(step)
        except CheckpointError as error:
            return [str(error).split("\nhint:")[0]]
        place = self.store.below(str(step))
        problems, sizes = self._missing(step, manifest)
        arrived = hash_objects(place, {name: sizes[name] for name in manifest.files if name in sizes})
        for name, found in arrived.items():
            problems += _difference(name, manifest.files[name], found)
        if manifest.step != step:
            problems.append(f"{MANIFEST}: belongs to step {manifest.step}, but the object is in {step}/")
        return sorted(problems)

    # --- Uploading ---

    def begin(self, step: int) -> None:
        """Removes unfinished steps of killed uploads, and this step if an earlier course of the run left one."""
        self.before_commit()  # raises if another process took over; nothing is removed before
        for other in self.unfinished():
            self.remove(other)
        self.store.remove([f"{step}/{MANIFEST}"])

    def upload(self, place: Path, names: Iterable[str]) -> None:
        """Uploads some files of a step's folder, as one of several processes."""
        upload_files(self.store.below(place.name), place, names)

    def commit(self, place: Path, *, ignore: Collection[int] = ()) -> list[int]:
        """Uploads a step's manifest, which finishes it, and returns the steps that were removed by policy.

        Objects that are missing or have another size than the manifest says are uploaded first.

        Args:
            ignore: damaged steps, which neither count nor are removed.
        """
        step, data = int(place.name), (place / MANIFEST).read_bytes()
        manifest = Manifest.from_json(data, where=str(place / MANIFEST))
        store, there = self.store.below(str(step)), self._objects().get(step, {})
        wrong = [name for name, item in manifest.files.items() if there.get(name) != item.num_bytes]
        absent = [name for name in wrong if not (place / name).is_file()]
        if absent:  # a process with its own folder holds it
            raise CheckpointError(f"{len(absent)} of {len(manifest.files)} files did not arrive, such as {absent[0]}")
        upload_files(store, place, wrong)
        store.remove(name for name in there if name not in manifest.files)
        self.before_commit()
        store.put(MANIFEST, data)
        old = self.keep.removable([other for other in self.steps() if other <= step and other not in ignore])
        for other in old:
            self.remove(other)
        return old

    def remove(self, step: int) -> None:
        """Removes a step's manifest first, so that it no longer counts as a step, and then the rest."""
        store = self.store.below(str(step))
        store.remove([MANIFEST])
        store.remove(self._objects().get(step, {}))

    # --- Downloading ---

    def fetch(self, step: int, place: Path, *, share: tuple[int, int] = (0, 1)) -> tuple[bytes, list[str]]:
        """Downloads the files of a step; returns its manifest, to be written last, and the problems of what arrived.

        Args:
            share: `(i, n)` downloads only the i-th of n shares of the files, to split the work between processes.
        """
        data, manifest = self._read_manifest(step)
        place.mkdir(parents=True, exist_ok=True)
        problems, sizes = self._missing(step, manifest)
        rank, count = share
        wanted = [name for name in manifest.files if name in sizes][rank::count]
        return data, problems + self._download(
            manifest, {name: sizes[name] for name in wanted}, place, needed=manifest.num_bytes
        )

    def fetch_files(self, manifest: Manifest, names: Iterable[str], place: Path) -> list[str]:
        """Downloads some files of a step into its folder, and returns the problems of what arrived."""
        sizes = {name: manifest.files[name].num_bytes for name in names}
        return self._download(manifest, sizes, place, needed=sum(sizes.values()))

    def _download(self, manifest: Manifest, sizes: dict[str, int], place: Path, *, needed: int) -> list[str]:
        free = shutil.disk_usage(place).free
        if free < needed:
            raise CheckpointError(
                f"cannot download step {place.name} of {self.store}: it takes {format_bytes(needed)}, but only "
                f"{format_bytes(free)} are free in {place.parent}.",
                hint="free some space, or choose another folder with --local-run.",
            )
        arrived = download_files(self.store.below(place.name), sizes, place)
        return [line for name, found in arrived.items() for line in _difference(name, manifest.files[name], found)]

    def _missing(self, step: int, manifest: Manifest) -> tuple[list[str], dict[str, int]]:
        """Returns the objects that a step lacks or has beyond its manifest, as problems, and the sizes of all."""
        there = {name: size for name, size in self._objects().get(step, {}).items() if name != MANIFEST}
        problems = [f"{name}: missing" for name in manifest.files if name not in there]
        problems += [f"{name}: not in the manifest" for name in there if name not in manifest.files]
        return problems, there

    def _objects(self) -> dict[int, dict[str, int]]:
        """Returns the names and sizes of the objects of each step."""
        found: dict[int, dict[str, int]] = {}
        for path, size in self.store.list().items():
            step, _, name = path.partition("/")
            if name and step.isdecimal() and step == str(int(step)):
                found.setdefault(int(step), {})[name] = size
        return found


def step_files(place: Path) -> list[str]:
    """Returns the files of a finished step in a folder, without its manifest."""
    return [name for name in list_files(place) if name != MANIFEST and not name.startswith(".")]


def _difference(name: str, wanted: FileHash, found: tuple[int, str]) -> list[str]:
    num_bytes, sha256 = found
    if num_bytes != wanted.num_bytes:
        return [f"{name}: {num_bytes} bytes instead of {wanted.num_bytes}"]
    if sha256 != wanted.sha256:
        return [f"{name}: contents changed (sha256 {sha256[:12]} instead of {wanted.sha256[:12]})"]
    return []
