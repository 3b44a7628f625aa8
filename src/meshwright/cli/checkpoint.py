"""`meshwright checkpoint`: list, show, verify, convert and check checkpoints."""

from __future__ import annotations

import functools
import json as json_lib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from meshwright.checkpoint import read_manifest, verify_step
from meshwright.checkpoint.file_hashes import is_unreadable
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.retention import all_steps, finished_steps, step_status
from meshwright.cli import simulate_devices
from meshwright.cli.remote_steps import copy_manifests, verify_url
from meshwright.errors import CheckpointError
from meshwright.layout.leaf import format_bytes, text_table
from meshwright.remote import is_url
from meshwright.specs import format_spec, spec_from_json

_FORM = re.compile(r"(?P<path>[^=]+)=(?P<mode>none|gather|scatter):(?P<size>\d+)(?P<more>(:pieces|:split)*)")


def ls(folder: Annotated[str, tyro.conf.Positional], /, json: bool = False) -> int:
    """List the checkpoints of a run with their status, size and mesh. Only manifests are read.

    Args:
        folder: run folder or its checkpoints folder; a URL if it is in an object store.
        json: print JSON.
    """
    place = _steps_folder(copy_manifests(folder) if is_url(folder) else folder)
    found = [_entry(place / str(step)) for step in all_steps(place)]
    if not found:
        raise _no_step(folder)
    if json:
        print(json_lib.dumps(found, indent=1))
    else:
        rows = []
        for entry in found:
            size = "-" if entry["bytes"] is None else format_bytes(entry["bytes"])
            rows.append((str(entry["step"]), entry["status"], size, entry["mesh"] or "-"))
        print(text_table(("step", "status", "bytes", "mesh"), rows))
    return 0


def show(folder: Annotated[str, tyro.conf.Positional], /, step: int | None = None, json: bool = False) -> int:
    """Show the contents of a checkpoint: tree, mesh, layout, versions and facts.

    Args:
        folder: run folder, checkpoints folder, or the folder of one step; a URL if it is in an object store.
        step: step to show; the last finished one if omitted.
        json: print the manifest as JSON.
    """
    place = _step_folder(copy_manifests(folder) if is_url(folder) else folder, step)
    manifest = read_manifest(place)
    if json:
        print(manifest.to_json(), end="")
        return 0
    rows = []
    for leaf in manifest.tree:
        spec = format_spec(spec_from_json(manifest.layout[leaf.name]))
        rows.append((leaf.name, "x".join(map(str, leaf.shape)) or "scalar", leaf.dtype, spec))
    print(f"step {manifest.step}: {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}")
    devices, kind = manifest.mesh.get("num_devices", 0), manifest.mesh.get("device_kind", "unknown")
    print(f"mesh: {manifest.mesh_text}, {devices} devices ({kind})")
    print(f"versions: {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}")
    print(f"facts: {json_lib.dumps(manifest.facts, indent=1)}")
    print(text_table(("leaf", "shape", "dtype", "spec"), rows))
    return 0


def verify(folder: Annotated[str, tyro.conf.Positional], /, step: int | None = None) -> int:
    """Compare every byte of every finished checkpoint with its manifest; exit with 1 if any differs.

    Args:
        folder: run folder, checkpoints folder, or the folder of one step; a URL if it is in an object store.
        step: step to verify; all if omitted.
    """
    if is_url(folder):
        return verify_url(folder, step)
    if step is not None or _is_step(folder):
        places = [_step_folder(folder, step)]
    else:
        top = _steps_folder(folder)
        statuses = {top / str(number): _status(top / str(number)) for number in all_steps(top)}
        for place, status in statuses.items():
            if status == "unfinished":
                print(f"step {place.name}: unfinished, not checked")
        places = [place for place, status in statuses.items() if status in ("finished", "unreadable")]
        if not places:
            raise _no_step(top)
    bad = 0
    for place in places:
        problems = verify_step(place)
        bad += bool(problems)
        verdict = "UNREADABLE" if all(map(is_unreadable, problems)) else "DAMAGED"
        if not problems:
            manifest = read_manifest(place)
            verdict = f"fine, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}"
        print("\n  ".join([f"step {place.name}: {verdict}", *problems]))
    return 1 if bad else 0


def convert(
    source: Annotated[str, tyro.conf.Positional],
    target: Annotated[str, tyro.conf.Positional],
    /,
    step: int | None = None,
    dtype: str | None = None,
    model: str | None = None,
    model_options: tuple[str, ...] = (),
    shard_bytes: int = 5 * 10**9,
    family: str | None = None,
    like: str | None = None,
    fingerprint: bool = True,
    ignore_fields: tuple[str, ...] = (),
    linen: tuple[str, ...] = (),
    adapters: bool = False,
    base_model: str | None = None,
) -> int:
    """Convert a checkpoint to a Hugging Face folder (safetensors), or such a folder to a checkpoint.

    Adapters (`train --lora`) are merged into the model, or written alone with --adapters.

    An Orbax folder of a model with tensor-parallel linen layers becomes a checkpoint of whole arrays; list those
    layers with --linen.

    Args:
        source: run folder, checkpoints folder, Hugging Face folder, or Orbax folder; or the URL of a run.
        target: new folder.
        step: checkpoint to read (the last finished one if omitted), or step number to write (0 if omitted).
        dtype: cast all weights to this dtype, e.g. bfloat16; no cast if omitted.
        model: model in the checkpoint, e.g. decoder-125m, if the checkpoint does not record it.
        model_options: model fields to override, e.g. num_layers=4.
        shard_bytes: maximum size of a safetensors file in bytes.
        family: model_type to write, e.g. qwen3; that of the original folder, or one that fits, if omitted.
        like: model folder whose configuration and tokenizer to copy, e.g. if the original one has moved; the original
            folder, or the run's copy of its small files, if omitted.
        fingerprint: also write some logits, which `meshwright checkpoint check` compares.
        ignore_fields: fields of config.json that are not supported but do not change the logits.
        linen: tensor-parallel layers as PATH=MODE:AXIS_SIZE, e.g. block/up=gather:4; add :pieces for TPAsyncDense.
        adapters: write only the adapters of the checkpoint, in the PEFT format.
        base_model: name or folder of the base model, which PEFT loads with --adapters.
    """
    from meshwright.checkpoint.convert import import_export as conversions

    if is_url(source):
        from meshwright.loop.folder.remote_run import fetch_step

        source, step = fetch_step(source, step)
    place, options = Path(source), dict[str, Any]()
    tell = functools.partial(print, file=sys.stderr, flush=True)
    if os.path.exists(place / "config.json") and not _is_step(source) and not all_steps(_steps_folder(source)):
        options = {"step": step or 0, "dtype": dtype, "ignore": ignore_fields, "tell": tell}
        found = conversions.import_pretrained(place, target, **options)
        print(f"{target}: step {step or 0} holds the parameters of {found}")
        return 0
    if linen or any(os.path.exists(place / name) for name in ("_CHECKPOINT_METADATA", "_METADATA")):
        conversions.import_linen(place, target, forms=dict(_form(text) for text in linen), step=step or 0)
        print(f"{target}: step {step or 0} holds the parameters as whole arrays")
        return 0
    options = {"dtype": dtype, "max_shard_bytes": shard_bytes, "family": family, "like": like, "tell": tell}
    options["fingerprint"] = fingerprint
    if model is not None:
        from meshwright.loop.settings.choices import make_model

        options["model"] = make_model(model, model_options)
    if step is None and not _is_step(source):
        steps = _steps_folder(source)
        if not finished_steps(steps):
            raise _no_step(steps)
    else:
        chosen = _step_folder(source, step)
        if not chosen.name.isdecimal():
            raise CheckpointError(f"the name of {chosen} is not a step number.", hint="move it to checkpoints/STEP.")
        steps, step = chosen.parent, int(chosen.name)
    if adapters:
        paths = conversions.export_adapters(steps, target, step=step, base_model=base_model, tell=tell)
    else:
        paths = conversions.export_pretrained(steps, target, step=step, **options)
    for path in paths:
        print(path)
    return 0


def check(folder: Annotated[str, tyro.conf.Positional], /, mesh: str | None = None, tolerance: float = 1e-4) -> int:
    """Compare the logits of a Hugging Face folder with transformers, or with those stored in it; exit with 1 if they
    differ.

    Without torch and transformers, the folder needs a fingerprint (meshwright_logits.json): `checkpoint convert` writes
    it, and so does a check with transformers that agrees.

    Args:
        folder: Hugging Face model folder.
        mesh: mesh to compute on, e.g. fsdp:8; one device if omitted.
        tolerance: largest difference to accept, relative to the largest logit.
    """
    from meshwright.checkpoint.convert.fingerprint import check_pretrained

    if not 0 < tolerance < 1:
        raise CheckpointError(f"--tolerance must be above 0 and below 1; got {tolerance}.", hint="try 1e-4.")
    if mesh is not None:
        simulate_devices(8)  # without an accelerator
    result = check_pretrained(folder, mesh=mesh, tolerance=tolerance)
    for note in result.notes:
        print(note, file=sys.stderr)
    verdict = "same" if result.is_same else "DIFFERENT"
    print(
        f"{verdict}: logits differ by {result.difference:.1e} of the largest from {result.against} "
        f"(accepted: {tolerance:.0e})"
    )
    return 0 if result.is_same else 1


def _later(command: Callable[..., int]) -> Callable[..., Callable[[], int]]:
    """Returns a function that only binds the arguments: tyro would report the command's errors as usage errors."""

    @functools.wraps(command)
    def bound(*args: Any, **options: Any) -> Callable[[], int]:
        return functools.partial(command, *args, **options)

    return bound


Command = Union[  # noqa: UP007 - tyro reads each member's own annotation
    Annotated[Any, tyro.conf.subcommand(name="ls", constructor=_later(ls))],
    Annotated[Any, tyro.conf.subcommand(name="show", constructor=_later(show))],
    Annotated[Any, tyro.conf.subcommand(name="verify", constructor=_later(verify))],
    Annotated[Any, tyro.conf.subcommand(name="convert", constructor=_later(convert))],
    Annotated[Any, tyro.conf.subcommand(name="check", constructor=_later(check))],
]


def checkpoint(command: tyro.conf.OmitSubcommandPrefixes[Command]) -> int:
    """List, show, verify, convert and check checkpoints."""
    code: int = command()
    return code


def _steps_folder(folder: str) -> Path:
    place = Path(folder)
    if not os.path.isdir(place):
        raise CheckpointError(f"{folder} is not a folder.", hint="pass a run folder or its checkpoints folder.")
    return place / "checkpoints" if os.path.isdir(place / "checkpoints") else place


def _step_folder(folder: str, step: int | None) -> Path:
    if step is None and _is_step(folder):
        return Path(folder).absolute()
    place = _steps_folder(folder)
    if step is None:
        step = max(finished_steps(place), default=None)
        if step is None:
            raise _no_step(place)
    elif step not in all_steps(place):
        there = [number for number in all_steps(place) if _status(place / str(number)) == "finished"]
        if not there:
            raise _no_step(place)
        raise CheckpointError(f"there is no step {step} in {place}.", hint=f"use one of: {', '.join(map(str, there))}.")
    return place.absolute() / str(step)


def _is_step(folder: str) -> bool:
    return os.path.exists(Path(folder, MANIFEST))


def _no_step(place: Path | str) -> CheckpointError:
    return CheckpointError(
        f"there is no finished step in {place}.", hint="pass a run folder or its checkpoints folder."
    )


def _status(place: Path) -> str:
    try:
        return step_status(place)
    except CheckpointError:
        return "unreadable"


def _entry(place: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": int(place.name), "status": "finished", "bytes": None, "mesh": None}
    try:
        manifest = read_manifest(place)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            entry["status"] = "unreadable"
        else:
            entry["status"] = "manifest damaged" if (place / MANIFEST).exists() else "unfinished"
    else:
        entry |= {"bytes": manifest.num_bytes, "mesh": manifest.mesh_text}
    return entry


def _form(text: str) -> tuple[str, Any]:
    from meshwright.linen.global_params import DenseForm

    found = _FORM.fullmatch(text)
    if found is None:
        raise CheckpointError(f"cannot parse --linen {text!r}.", hint="use PATH=gather:4 or PATH=scatter:4:pieces.")
    mode: Any = found["mode"]
    pieces, split = (word in found["more"] for word in (":pieces", ":split"))
    form = DenseForm(tp_mode=mode, axis_size=int(found["size"]), pieces=pieces, original_split_scatter=split)
    return found["path"], form
