"""Weights at a URL (`--init-from s3://...`): a model folder is read by byte ranges, a step is fetched and verified."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.convert.config_json import CONFIG, read_model_json
from meshwright.checkpoint.convert.pretrained import TOKENIZER_FILES
from meshwright.checkpoint.convert.tensor_writer import INDEX, SINGLE
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.data.cache_folder import default_cache
from meshwright.data.fetched_data import fetch_named, versions_of
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout.leaf import LeafLayout
from meshwright.loop.settings.init_options import InitOptions
from meshwright.loop.weights.initial_weights import FolderWeights
from meshwright.remote import ObjectStore, open_store

_MOST_HEADER = 100_000_000  # bytes, as safetensors itself limits it
_STEP = re.compile(r"(?P<run>.+)/checkpoints(/(?P<step>[0-9]+))?")


def find_remote_weights(options: InitOptions) -> RemoteFolderWeights | Callable[[], Path]:
    """Returns the weights at the URL that `--init-from` names, or a function that fetches their step."""
    url = (options.init_from or "").strip().rstrip("/")
    store = open_store(url)
    infos = store.infos()
    if CONFIG in infos:
        if options.init_step is not None or options.init_part == "all":
            raise ConfigError(
                "--init-step and --init-part all need a run; --init-from is a Hugging Face folder.",
                hint="leave them out.",
            )
        return RemoteFolderWeights(store, infos, ignore=options.init_ignore)
    from meshwright.loop.folder.remote_run import fetch_step

    found, step = _STEP.fullmatch(url), options.init_step
    if found is not None and found["step"] is not None and MANIFEST in infos:
        if step is not None:
            raise ConfigError("--init-step has no effect: --init-from is the folder of a step.", hint="leave it out.")
        step = int(found["step"])
    elif not any(name.endswith(f"/{MANIFEST}") for name in infos):
        raise ConfigError(
            f"--init-from {url} holds neither {CONFIG} nor checkpoints.",
            hint="pass the URL of a Hugging Face model folder, a run, or a step.",
        )

    def fetch() -> Path:
        folder, number = fetch_step(url if found is None else found["run"], step)
        return Path(folder) / "checkpoints" / str(number)

    return fetch


class RemoteFolderWeights(FolderWeights):
    """The weights of a Hugging Face model folder in a store, read by byte ranges.

    A local folder holds the small files and, for each file of weights, its header in a sparse file of the same size,
    which safetensors checks like any other.
    """

    def __init__(self, store: ObjectStore, infos: Mapping[str, Mapping[str, Any]], *, ignore: tuple[str, ...]) -> None:
        names = [name for name in infos if name in (CONFIG, INDEX, *TOKENIZER_FILES)]
        small = fetch_named(store, names, default_cache() / "models")
        folder = Path(tempfile.mkdtemp(prefix="meshwright-headers-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in names:
            shutil.copyfile(small / name, folder / name)
        files = [SINGLE]
        if INDEX in names:
            index = read_model_json(folder / INDEX).get("weight_map")
            files = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
        self._store, self._files = store, [name for name in files if name in infos and "/" not in name]
        self._versions = versions_of({name: infos[name] for name in self._files})
        for name in self._files:
            _write_header(store, name, int(infos[name]["size"]), folder / name)
        self.folder_url = store.url
        super().__init__(folder, ignore=ignore, store=store)

    @property
    def pretrained(self) -> dict[str, Any]:
        return {**super().pretrained, "folder": self.folder_url}

    def read(self, leaves: Mapping[str, LeafLayout], mesh: Any) -> dict[str, jax.Array]:
        arrays = super().read(leaves, mesh)
        infos = self._store.infos()
        now = versions_of({name: infos[name] for name in self._files if name in infos})
        changed = [name for name in self._files if now.get(name) != self._versions[name]]
        if changed:
            raise CheckpointError(f"{self._store}/{changed[0]} changed while it was read.", hint="start again.")
        return arrays


def _write_header(store: ObjectStore, name: str, size: int, path: Path) -> None:
    length = store.read_range(name, 0, 8)
    count = int.from_bytes(length, "little")
    if len(length) < 8 or count > min(_MOST_HEADER, size - 8):
        raise CheckpointError(f"{store}/{name} is not a safetensors file.", hint="upload it again.")
    with path.open("wb") as file:
        file.write(length + store.read_range(name, 8, 8 + count))
        file.truncate(size)
