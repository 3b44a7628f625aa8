"""The manifest of a step: what was written, so that what is read can be held against it.

It is written last. A step without one is unfinished, and a step with one is whole or is found out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.checkpoint.file_hashes import FileHash, compare_files, unreadable
from meshwright.errors import CheckpointError
from meshwright.files import write_atomically
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.specs import spec_to_json

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"
_PLAIN = ("mesh", "layout", "rng", "facts", "versions")  # fields of a manifest that are JSON as they are


class StoredLeaf(NamedTuple):
    """One array of a checkpoint; `stored_shape` differs from `shape` where the layout padded it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored_shape: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        item = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        return item if self.shape == self.stored_shape else item | {"stored_shape": list(self.stored_shape)}

    @classmethod
    def from_json(cls, item: Mapping[str, Any]) -> StoredLeaf:
        shape = tuple(item["shape"])
        return cls(item["name"], shape, item["dtype"], tuple(item.get("stored_shape", shape)))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a finished step.

    Args:
        files: hashes by path relative to the step's folder.
        mesh: axes and sizes, number of devices and of processes, and their kind.
        layout: each leaf's spec, as `spec_to_json` writes it.
        rng: the implementation of each random key, by leaf name; the checkpoint holds its bits as numbers.
        facts: what the caller said: configuration, state of the data, and so on.
    """

    step: int
    files: Mapping[str, FileHash]
    tree: tuple[StoredLeaf, ...]
    mesh: Mapping[str, Any]
    layout: Mapping[str, Any]
    rng: Mapping[str, str]
    facts: Mapping[str, Any]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        """Returns the manifest as text that ends with the hash of the rest."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "files": {name: {"bytes": item.num_bytes, "sha256": item.sha256} for name, item in self.files.items()},
            "tree": [leaf.to_json() for leaf in self.tree],
            **{name: getattr(self, name) for name in _PLAIN},
        }
        return _dump(body | {"sha256": _hash(body)})

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> Manifest:
        """Reads a manifest, or raises `CheckpointError` if a single byte of it is not as it was written."""
        try:
            text = data.decode()
            body = json.loads(text)
            found = body.pop("sha256")
            written = body["format"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is not a manifest: {type(error).__name__}: {error}.") from None
        # Written again it must give the same bytes: so a changed space or digit shows as well as a changed value.
        if found != _hash(body) or _dump(body | {"sha256": found}) != text:
            raise CheckpointError(f"{where} was changed after it was written: its own sha256 does not fit.")
        if written != FORMAT:
            raise CheckpointError(
                f"{where} is of format {written}; this release reads format {FORMAT}.", hint="update meshwright."
            )
        return cls(
            step=body["step"],
            files={name: FileHash(item["bytes"], item["sha256"]) for name, item in body["files"].items()},
            tree=tuple(StoredLeaf.from_json(item) for item in body["tree"]),
            **{name: body[name] for name in _PLAIN},
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(item.num_bytes for item in self.files.values())

    @property
    def mesh_text(self) -> str:
        """The mesh in words."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh["axes"].items()) or "no axes"
        processes = self.mesh["num_processes"]
        return axes + (f" in {processes} processes" if processes > 1 else "")


def read_manifest(folder: Path | str) -> Manifest:
    """Returns the manifest of a step's folder; raises `CheckpointError` where there is none or it was changed."""
    path = Path(folder) / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is an unfinished step, or not one of ours.",
            hint="restore another step; `meshwright checkpoint ls` shows those that are finished.",
        ) from None
    except OSError as error:
        raise CheckpointError(unreadable(str(path), error), hint="who may read it?") from error
    return Manifest.from_json(data, where=str(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest into a step's folder, whole or not at all, which makes the step a finished one."""
    write_atomically(folder / MANIFEST, manifest.to_json())


def verify_step(folder: Path | str, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Returns everything that is wrong with a step, each problem with the name of the file; nothing if all is well.

    Every byte of every file is read.

    Args:
        share: `(i, n)` hashes the i-th of n shares of the files, for n processes that each do one.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).split("\nhint:")[0]]
    problems = compare_files(
        folder, manifest.files, leave_out=(MANIFEST,), own=lambda place: place % share[1] == share[0]
    )
    if folder.name.isdecimal() and manifest.step != int(folder.name):
        problems.append(f"{MANIFEST}: is of step {manifest.step}, in a folder named {folder.name}")
    return problems


# --- What goes in ---


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Returns the fields of a manifest that a layout decides."""
    devices = list(layout.mesh.devices.flat)
    return {
        "tree": tuple(stored_leaf(leaf) for leaf in layout.leaves),
        "mesh": {
            "axes": dict(layout.mesh.shape),
            "num_devices": len(devices),
            "device_kind": devices[0].device_kind,
            "num_processes": jax.process_count(),
        },
        "layout": {leaf.name: spec_to_json(leaf.spec) for leaf in layout.leaves},
        "rng": {leaf.name: key_impl(leaf.dtype) for leaf in layout.leaves if is_key(leaf.dtype)},
    }


def stored_leaf(leaf: LeafLayout) -> StoredLeaf:
    """Returns a leaf of a layout as a manifest notes it."""
    return StoredLeaf(leaf.name, tuple(leaf.shape), dtype_name(leaf.dtype), tuple(leaf.stored_shape))


def is_key(dtype: Any) -> bool:
    """Returns whether this is the dtype of typed random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl(dtype: Any) -> str:
    """Returns the name of a key dtype's generator, as `jax.random.key(impl=...)` takes it.

    Example:
        >>> key_impl(jax.random.key(0).dtype)
        'threefry2x32'
    """
    found: list[str] = []
    # Only keys know the name, not their dtype; tracing makes one out of nothing.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


def dtype_name(dtype: Any) -> str:
    """Returns a dtype in words; random keys are `key<threefry2x32>`."""
    return f"key<{key_impl(dtype)}>" if is_key(dtype) else str(dtype)


PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "tensorstore", "grain")
"""Packages that decide what a run computes, and how it is stored."""


def current_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):  # of a source tree that is not installed
            found[name] = version(name)
    return found


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of facts as JSON keeps them, or raises where it would not keep them."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the facts of a checkpoint must be JSON: {error}.", hint="numbers, text, lists, dicts; no arrays."
        ) from None
    return kept


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=1) + "\n"


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(body).encode()).hexdigest()


def model_fact(model: Any) -> dict[str, Any]:
    """Returns a model as facts hold it under `model`: its class and its fields, of which a later class may have more.

    Example:
        >>> from meshwright.models import Decoder
        >>> model_fact(Decoder.named("tiny"))["fields"]["num_layers"]
        2
    """
    return {"class": type(model).__name__, "fields": plain_facts(dataclasses.asdict(model))}


def model_text(fact: Any) -> str | None:
    """Returns a model's fact as text, such as `Decoder(num_layers=2)`, which is all that older checkpoints hold.

    Example:
        >>> model_text({"class": "Decoder", "fields": {"num_layers": 2}})
        'Decoder(num_layers=2)'
    """
    if isinstance(fact, Mapping):
        return f"{fact['class']}({', '.join(f'{name}={value!r}' for name, value in fact['fields'].items())})"
    return fact if isinstance(fact, str) else None
