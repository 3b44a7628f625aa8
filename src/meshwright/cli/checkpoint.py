"""`meshwright checkpoint`: which checkpoints there are, what they hold, whether they are whole; other forms of them."""

from __future__ import annotations

import functools
import json as json_lib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from meshwright.checkpoint import keeping, read_manifest, verify_step
from meshwright.checkpoint.manifest import MANIFEST, Manifest
from meshwright.errors import CheckpointError
from meshwright.layout.leaf import format_bytes
from meshwright.layout.table import text_table
from meshwright.specs import format_spec, spec_from_json

_FORM = re.compile(r"(?P<path>[^=]+)=(?P<mode>none|gather|scatter):(?P<size>\d+)(?P<more>(:pieces|:split)*)")


def ls(folder: Annotated[str, tyro.conf.Positional], /, json: bool = False) -> int:
    """List the steps of a run: size, mesh, and whether they are finished. Nothing but manifests is read.

    Args:
        folder: the run's folder, or that of its checkpoints.
        json: print JSON.
    """
    place = _steps_folder(folder)
    found = [_entry(place / str(step)) for step in keeping.all_steps(place)]
    if json:
        print(json_lib.dumps(found, indent=1))
    else:
        rows = [(str(entry["step"]), entry["status"], _size(entry), entry["mesh"] or "-") for entry in found]
        print(text_table(("step", "status", "bytes", "mesh"), rows) if rows else f"no checkpoints in {place}")
    return 0


def show(folder: Annotated[str, tyro.conf.Positional], /, step: int | None = None, json: bool = False) -> int:
    """Show what a step holds: its tree, mesh, layout, versions and facts.

    Args:
        folder: the run's folder, that of its checkpoints, or that of a step.
        step: the last finished one by default.
        json: print the manifest itself.
    """
    place = _step_folder(folder, step)
    manifest = read_manifest(place)
    if json:
        print(manifest.to_json(), end="")
        return 0
    rows = [
        (
            leaf.name,
            "x".join(map(str, leaf.shape)) or "scalar",
            leaf.dtype,
            format_spec(spec_from_json(manifest.layout[leaf.name])),
        )
        for leaf in manifest.tree
    ]
    print(f"step {manifest.step}: {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}")
    print(f"mesh: {manifest.mesh_text}, {manifest.mesh['num_devices']} devices ({manifest.mesh['device_kind']})")
    print(f"versions: {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}")
    print(f"facts: {json_lib.dumps(manifest.facts, indent=1)}")
    print(text_table(("leaf", "shape", "dtype", "spec"), rows))
    return 0


def verify(folder: Annotated[str, tyro.conf.Positional], /, step: int | None = None) -> int:
    """Read every byte of every finished step and hold it against the manifests; exits with 1 where one differs.

    Args:
        folder: the run's folder, that of its checkpoints, or that of a step.
        step: only this one; all by default.
    """
    if step is not None or (Path(folder) / MANIFEST).exists():
        places = [_step_folder(folder, step)]
    else:
        top = _steps_folder(folder)
        places = [top / str(number) for number in keeping.finished_steps(top)]
        for number in keeping.unfinished_steps(top):
            print(f"step {number}: unfinished, not looked at")
        if not places:
            raise CheckpointError(f"there is no finished step in {top}.")
    damaged = 0
    for place in places:
        problems = verify_step(place)
        damaged += bool(problems)
        print(f"step {place.name}: {'DAMAGED' if problems else _fine(read_manifest(place))}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def convert(
    source: Annotated[str, tyro.conf.Positional],
    target: Annotated[str, tyro.conf.Positional],
    /,
    step: int | None = None,
    dtype: str | None = None,
    model: str | None = None,
    model_options: tuple[str, ...] = (),
    shard_bytes: int = 5 * 10**9,
    linen: tuple[str, ...] = (),
) -> int:
    """Convert parameters: a checkpoint to a Hugging Face Llama in safetensors files, or such a folder to a checkpoint.

    A tree that Orbax wrote of a model with tensor-parallel linen layers becomes a checkpoint as well, of whole arrays;
    --linen says where those layers are.

    Args:
        source: a run's folder, or that of its checkpoints; a Hugging Face folder; or a folder of Orbax.
        target: a new folder.
        step: which checkpoint to read, or the number of the one to write (0 by default).
        dtype: casts all weights, to bfloat16, say; kept as they are by default.
        model: which decoder a checkpoint holds, where it does not say so itself: decoder-125m.
        model_options: fields of it to change, such as num_layers=4.
        shard_bytes: how large a safetensors file may become.
        linen: PATH=MODE:AXIS_SIZE, with :pieces for TPAsyncDense: block/up=gather:4.
    """
    from meshwright.checkpoint import convert as conversions

    place = Path(source)
    if (place / "config.json").exists() and not (place / MANIFEST).exists() and not _has_steps(place):
        found = conversions.import_llama(place, target, step=step or 0, dtype=dtype)
        print(f"{target}: step {step or 0} holds the parameters of {found}")
        return 0
    if linen or (place / "_CHECKPOINT_METADATA").exists() or (place / "_METADATA").exists():
        conversions.import_linen(place, target, forms=dict(_form(text) for text in linen), step=step or 0)
        print(f"{target}: step {step or 0} holds the parameters as whole arrays")
        return 0
    options: dict[str, Any] = {"dtype": dtype, "max_shard_bytes": shard_bytes}
    if model is not None:
        from meshwright.loop.models import make_model

        options["model"] = make_model(model, model_options)
    chosen = _step_folder(source, step)
    for path in conversions.export_llama(chosen.parent, target, step=int(chosen.name), **options):
        print(path)
    return 0


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """Returns a command that only takes its arguments: tyro would take an error of ours for one in the arguments."""

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return bound


Command = Union[  # noqa: UP007 - tyro reads each member's own annotation
    Annotated[Any, tyro.conf.subcommand(name="ls", constructor=_later(ls))],
    Annotated[Any, tyro.conf.subcommand(name="show", constructor=_later(show))],
    Annotated[Any, tyro.conf.subcommand(name="verify", constructor=_later(verify))],
    Annotated[Any, tyro.conf.subcommand(name="convert", constructor=_later(convert))],
]


def checkpoint(command: tyro.conf.OmitSubcommandPrefixes[Command]) -> int:
    """List, show, verify and convert checkpoints."""
    code: int = command()
    return code


def _steps_folder(folder: str) -> Path:
    place = Path(folder)
    if not place.is_dir():
        raise CheckpointError(f"{folder} is not a folder.", hint="name a run's folder, or that of its checkpoints.")
    return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def _has_steps(place: Path) -> bool:
    return bool(keeping.all_steps(_steps_folder(str(place))))


def _step_folder(folder: str, step: int | None) -> Path:
    if step is None and (Path(folder) / MANIFEST).exists():
        return Path(folder).absolute()
    place = _steps_folder(folder)
    if step is None:
        step = max(keeping.finished_steps(place), default=None)
        if step is None:
            raise CheckpointError(f"there is no finished step in {place}.")
    return place.absolute() / str(step)


def _entry(place: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": int(place.name), "status": "finished", "bytes": None, "mesh": None}
    try:
        manifest = read_manifest(place)
    except CheckpointError:
        entry["status"] = "manifest damaged" if (place / MANIFEST).exists() else "unfinished"
    else:
        entry |= {"bytes": manifest.num_bytes, "mesh": manifest.mesh_text}
    return entry


def _size(entry: dict[str, Any]) -> str:
    return "-" if entry["bytes"] is None else format_bytes(entry["bytes"])


def _fine(manifest: Manifest) -> str:
    return f"fine, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}"


def _form(text: str) -> tuple[str, Any]:
    from meshwright.nn.convert import DenseForm

    found = _FORM.fullmatch(text)
    if found is None:
        raise CheckpointError(
            f"{text!r} does not say where a layer is.", hint="PATH=gather:4, or PATH=scatter:4:pieces."
        )
    mode: Any = found["mode"]
    size, more = int(found["size"]), found["more"]
    return found["path"], DenseForm(
        tp_mode=mode, axis_size=size, pieces=":pieces" in more, original_split_scatter=":split" in more
    )
