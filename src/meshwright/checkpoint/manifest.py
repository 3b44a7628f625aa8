"""The manifest of a step: a hashed record of what was written, to verify what is read.

It is written last: a step without a manifest is unfinished, and damage to a step with one is detected.
"""

from __future__ import annotations

import ast
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

from meshwright.bounded_reader import MOST_DEPTH, parse_json, read_bytes, require_fields
from meshwright.checkpoint.file_hashes import FileHash, compare_files, unreadable
from meshwright.checkpoint.manifest_form import require_form
from meshwright.errors import CheckpointError, FileFormatError
from meshwright.files import write_atomically
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout
from meshwright.specs import spec_to_json

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"
_PLAIN = ("mesh", "layout", "rng", "facts", "versions")  # fields that are already JSON
_MOST_BYTES = 2**28
_DEPTH = 2 * MOST_DEPTH  # twice what `plain_facts` accepts


class StoredLeaf(NamedTuple):
    """One array of a checkpoint; `stored_shape` differs from `shape` if the layout padded it."""

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
    """The record of a finished step.

    Args:
        files: file hashes, by path relative to the step's folder.
        mesh: axes with sizes, number and kind of devices, number of processes.
        layout: spec of each leaf, as `spec_to_json` writes it.
        rng: implementation of each random key, by leaf name; the arrays hold only its bits.
        facts: the caller's facts, such as the configuration and the position in the data.
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
        """Reads a manifest; raises `CheckpointError` if a single byte of it has changed."""
        try:
            body = parse_json(data, where=where, depth=_DEPTH)
            require_fields(body, {"sha256": str, "format": int}, where=where)
        except FileFormatError as error:
            raise CheckpointError(f"{where} is not a manifest: {error}") from None
        found, written = body.pop("sha256"), body["format"]
        # Comparing the text as well detects changes that leave all values equal, such as a space.
        if found != _hash(body) or _dump(body | {"sha256": found}).encode() != data:
            raise CheckpointError(f"{where} was changed after it was written: its sha256 does not match.")
        if written != FORMAT:
            raise CheckpointError(
                f"{where} has format {written}; this release reads format {FORMAT}.", hint="update meshwright."
            )
        try:
            require_form(body, where=where)
        except FileFormatError as error:
            raise CheckpointError(f"{where} is not a manifest that Meshwright wrote: {error}") from None
        return cls(
            step=body["step"],
            files={name: FileHash(item["bytes"], item["sha256"]) for name, item in body["files"].items()},
            tree=tuple(StoredLeaf.from_json(item) for item in body["tree"]),
            **{name: body[name] for name in _PLAIN},
        )

    @property
    def num_bytes(self) -> int:
        """Size of all files except the manifest."""
        return sum(item.num_bytes for item in self.files.values())

    @property
    def mesh_text(self) -> str:
        """The mesh as text, such as `fsdp=4 x tp=2`."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh.get("axes", {}).items()) or "no axes"
        processes = self.mesh.get("num_processes", 1)
        return axes + (f" in {processes} processes" if processes > 1 else "")


def read_manifest(folder: Path | str) -> Manifest:
    """Returns the manifest in a step's folder; raises `CheckpointError` if it is missing or was changed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> empty = dict(files={}, tree=(), mesh={}, layout={}, rng={}, versions={})
        >>> write_manifest(folder, Manifest(step=3, facts={"seed": 0}, **empty))
        >>> read_manifest(folder).step, read_manifest(folder).facts
        (3, {'seed': 0})
    """
    path = Path(folder) / MANIFEST
    try:
        data = read_bytes(path, most=_MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is an unfinished step, or not a Meshwright checkpoint.",
            hint="choose a finished step; `meshwright checkpoint ls` lists them.",
        ) from None
    except OSError as error:
        raise CheckpointError(unreadable(str(path), error), hint="check its permissions.") from error
    except FileFormatError as error:
        raise CheckpointError(str(error)) from None
    return Manifest.from_json(data, where=str(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest into a step's folder atomically, which marks the step as finished."""
    write_atomically(folder / MANIFEST, manifest.to_json())


def verify_step(folder: Path | str, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Reads every byte of a step and returns its problems, each with the name of the file; empty if it is intact.

    Args:
        share: `(i, n)` hashes only the i-th of n shares of the files, to split the work between processes.

    Example:
        >>> import tempfile
        >>> from meshwright.checkpoint.file_hashes import hash_files
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "x").write_bytes(b"abc")
        >>> others = dict(tree=(), mesh={}, layout={}, rng={}, facts={}, versions={})
        >>> write_manifest(folder, Manifest(step=1, files=hash_files(folder, ["x"]), **others))
        >>> _ = (folder / "x").write_bytes(b"abd")
        >>> verify_step(folder)
        ['x: contents changed (sha256 a52d159f262b instead of ba7816bf8f01)']
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).split("\nhint:")[0]]
    rank, count = share
    problems = compare_files(folder, manifest.files, leave_out=(MANIFEST,), own=lambda place: place % count == rank)
    if folder.name.isdecimal() and manifest.step != int(folder.name):
        problems.append(f"{MANIFEST}: belongs to step {manifest.step}, but the folder is named {folder.name}")
    return problems


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Returns the manifest fields that depend on the layout."""
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
    """Returns the manifest entry of a layout's leaf; random keys have the dtype `key<threefry2x32>`."""
    dtype = f"key<{key_impl(leaf.dtype)}>" if is_key(leaf.dtype) else str(leaf.dtype)
    return StoredLeaf(leaf.name, tuple(leaf.shape), dtype, tuple(leaf.stored_shape))


def is_key(dtype: Any) -> bool:
    """Returns whether this is the dtype of typed random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl(dtype: Any) -> str:
    """Returns the generator of a key dtype, as `jax.random.key(impl=...)` takes it.

    Example:
        >>> key_impl(jax.random.key(0).dtype)
        'threefry2x32'
    """
    found: list[str] = []
    # Only a key has this name, not its dtype; tracing makes a key without allocating one.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), jax.ShapeDtypeStruct((), dtype))
    return found[0]


PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint", "tensorstore", "grain")
"""Packages that affect what a run computes and how it is stored."""


def current_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Returns the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):  # a source tree that is not installed
            found[name] = version(name)
    return found


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the facts as JSON stores them; raises if they are not JSON."""
    try:
        kept: dict[str, Any] = parse_json(json.dumps(facts), where="the value")
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the facts of a checkpoint must be JSON: {error}.",
            hint="use numbers, strings, lists and dicts, not arrays.",
        ) from None
    return kept


def _dump(body: Mapping[str, Any]) -> str:
    return json.dumps(body, indent=1) + "\n"


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(body).encode()).hexdigest()


def model_fact(model: Any) -> dict[str, Any]:
    """Returns the class and fields of a model, for the fact `model`.

    Example:
        >>> from meshwright.models import Decoder
        >>> model_fact(Decoder.named("tiny"))["fields"]["num_layers"]
        2
    """
    return {"class": type(model).__name__, "fields": plain_facts(dataclasses.asdict(model))}


def model_text(fact: Any) -> str | None:
    """Returns a model's fact as text, such as `Decoder(num_layers=2)`; older checkpoints hold only this text.

    Example:
        >>> model_text({"class": "Decoder", "fields": {"num_layers": 2}})
        'Decoder(num_layers=2)'
    """
    if isinstance(fact, Mapping):
        return f"{fact['class']}({', '.join(f'{name}={value!r}' for name, value in fact['fields'].items())})"
    return fact if isinstance(fact, str) else None


def parse_model(text: str) -> dict[str, Any]:
    """Returns the fact of a model from its text, which is not executed; raises `SyntaxError` or `ValueError`.

    Example:
        >>> parse_model("Decoder(num_layers=2)")
        {'class': 'Decoder', 'fields': {'num_layers': 2}}
    """
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("it is not a class with named fields")
    return {
        "class": ast.unparse(call.func),
        "fields": {str(item.arg): ast.literal_eval(item.value) for item in call.keywords},
    }
