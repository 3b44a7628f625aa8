"""Weights to start a run from: compared with the run's parameters by name, then read onto its mesh."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.checkpoint import Checkpoints, Manifest, Restored, read_manifest, verify_step
from meshwright.checkpoint.arrays import nest, read
from meshwright.checkpoint.convert.config_json import CONFIG
from meshwright.checkpoint.convert.import_export import pretrained_fact
from meshwright.checkpoint.convert.peft_adapters import CONFIG as ADAPTER_CONFIG
from meshwright.checkpoint.convert.pretrained import PretrainedFolder
from meshwright.checkpoint.manifest import MANIFEST, STATE
from meshwright.checkpoint.restoring import part_of
from meshwright.checkpoint.retention import all_steps
from meshwright.distributed.agreement import together
from meshwright.dtypes import is_float
from meshwright.errors import CheckpointError, ConfigError
from meshwright.layout import Layout
from meshwright.layout.leaf import LeafLayout, count_leaves, text_table
from meshwright.loop.settings.init_options import InitOptions
from meshwright.loop.weights.adapted_weights import plain_leaves
from meshwright.remote import ObjectStore, is_url
from meshwright.tree import flatten_tree

VOCABULARY = {"embed/table": 0, "head/kernel": 1}
"""Leaves with a dim of the vocabulary, which may be padded with zeros."""
_MOST_ROWS = 30
Shape = tuple[int, ...]


class FolderWeights:
    """The weights of a Hugging Face model folder."""

    lora: Mapping[str, Any] | None = None

    def __init__(self, folder: Path, *, ignore: Collection[str] = (), store: ObjectStore | None = None) -> None:
        self.folder, self.source = folder, PretrainedFolder(folder, ignore=ignore, store=store)
        self.shapes, self.dtypes = self.source.shapes, self.source.dtypes

    @property
    def pretrained(self) -> dict[str, Any]:
        """The fact about the model folder, for exports."""
        return pretrained_fact(self.source.folder, self.source.config)

    @property
    def model(self) -> Any:
        return self.source.model

    def read(self, leaves: Mapping[str, LeafLayout], mesh: Any) -> dict[str, jax.Array]:
        """Returns the leaves on the mesh, padded with zeros to their stored shapes."""
        return {name: self.source.place(name, leaf, mesh, leaf.dtype) for name, leaf in leaves.items()}


class StepWeights:
    """The parameters of a checkpoint, which is verified before they are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        stored = {
            leaf.name.removeprefix("params/"): leaf for leaf in self.manifest.tree if leaf.name.startswith("params/")
        }
        self.shapes = {name: leaf.shape for name, leaf in stored.items()}
        self.dtypes = {name: jax.numpy.dtype(leaf.dtype) for name, leaf in stored.items()}

    @property
    def pretrained(self) -> dict[str, Any] | None:
        fact: dict[str, Any] | None = self.manifest.facts.get("pretrained")
        return fact

    @property
    def model(self) -> Any:
        return self.manifest.facts.get("model")

    @property
    def lora(self) -> Mapping[str, Any] | None:
        """The settings of the adapters in the checkpoint, if it has any."""
        return self.manifest.facts.get("lora")

    def restore(self, layout: Layout, *, cast: bool) -> Restored:
        """Returns the whole state of the step."""
        if not self.folder.name.isdecimal():
            raise CheckpointError(
                f"the name of {self.folder} is not a step number.", hint="move it to checkpoints/STEP."
            )
        return Checkpoints(self.folder.parent).restore(layout, step=int(self.folder.name), cast=cast)

    def read(self, leaves: Mapping[str, LeafLayout], mesh: Any) -> dict[str, jax.Array]:
        problems = verify_step(self.folder)
        if problems:
            raise CheckpointError(f"--init-from: {self.folder} is damaged: {problems[0]}.", hint="use another step.")
        structs = [
            jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.spec))
            for leaf in leaves.values()
        ]
        tree = nest([f"params/{name}" for name in leaves], structs)
        found = read(self.folder / STATE, tree, repad=True, part=True)
        return flatten_tree(found.get("params", {}), sep="/")


Weights = FolderWeights | StepWeights
"""Named arrays that can be read onto a mesh."""


def open_weights(options: InitOptions) -> Weights:
    """Opens the weights that `--init-from` names, on all processes; reads no weights yet.

    Example:
        >>> import tempfile
        >>> from meshwright.checkpoint.convert.pretrained import write_pretrained
        >>> from meshwright.models import Decoder
        >>> model, folder = Decoder.named("tiny"), tempfile.mkdtemp()
        >>> _ = write_pretrained(folder, model, model.init(jax.random.key(0)))
        >>> open_weights(InitOptions(init_from=folder)).shapes["head/kernel"]
        (64, 256)
    """
    found = together("reading --init-from", lambda: _find(options))
    if not callable(found):
        return found
    step = found()  # processes choose and verify a step together, so an error of one must not end this early
    return together("reading --init-from", lambda: StepWeights(step))


def _find(options: InitOptions) -> Weights | Callable[[], Path]:
    """Returns the weights, or a function that returns the folder of their step, which all processes must call."""
    if is_url(options.init_from):
        from meshwright.loop.weights.remote_weights import find_remote_weights

        return find_remote_weights(options)
    folder = Path(options.init_from or "")
    if not os.path.isdir(folder):
        raise ConfigError(
            f"--init-from {options.init_from} is not a folder.",
            hint="pass a Hugging Face model folder, a run folder, or the folder of a step.",
        )
    steps = folder / "checkpoints" if os.path.isdir(folder / "checkpoints") else folder
    if os.path.exists(folder / MANIFEST):
        if options.init_step is not None:
            raise ConfigError("--init-step has no effect: --init-from is the folder of a step.", hint="leave it out.")
        return StepWeights(folder)
    if all_steps(steps):
        return functools.partial(_choose_step, steps, options.init_step)
    if os.path.exists(folder / ADAPTER_CONFIG) and not os.path.exists(folder / CONFIG):
        raise ConfigError(
            f"--init-from {folder} holds only adapters.",
            hint=f"pass their base model with --init-from, and --init-adapters {folder}.",
        )
    if not os.path.exists(folder / CONFIG):
        raise ConfigError(
            f"--init-from {folder} holds neither {CONFIG} nor checkpoints.",
            hint="pass a Hugging Face model folder, a run folder, or the folder of a step.",
        )
    if options.init_step is not None or options.init_part == "all":
        raise ConfigError(
            "--init-step and --init-part all need a run; --init-from is a Hugging Face folder.",
            hint="leave them out.",
        )
    return FolderWeights(folder, ignore=options.init_ignore)


def _choose_step(steps: Path, step: int | None) -> Path:
    checkpoints = Checkpoints(steps)
    if step is None:
        step, _ = checkpoints.last_good_or_raise(who="--init-from: ")
    elif step not in checkpoints.steps():
        there = ", ".join(map(str, checkpoints.steps())) or "none"
        raise CheckpointError(f"--init-step: there is no step {step} in {steps}.", hint=f"finished steps: {there}.")
    return steps.absolute() / str(step)


def choose_leaves(weights: Weights, layout: Layout, options: InitOptions) -> tuple[dict[str, LeafLayout], list[str]]:
    """Returns the leaves to read, by name, and notes; raises with a table if names or shapes differ unexpectedly.

    Args:
        layout: layout of the run's state.
    """
    wanted = plain_leaves(params_leaves(layout), weights.shapes)
    chosen, notes, rows = dict[str, LeafLayout](), list[str](), list[tuple[str, ...]]()
    for name, leaf in wanted.items():
        if name not in weights.shapes:
            if options.init_missing == "refuse":
                rows.append(("missing", name, "-", str(list(leaf.shape)), "--init-missing random"))
            else:
                notes.append(f"{name} is not in --init-from and keeps random values")
            continue
        found = tuple(weights.shapes[name])
        if found == tuple(leaf.shape) or _is_smaller_vocabulary(name, found, tuple(leaf.shape)):
            if found != tuple(leaf.shape):
                notes.append(f"{name} padded from {list(found)} to {list(leaf.shape)} with zeros")
            chosen[name] = leaf
        elif options.init_shape == "refuse":
            rows.append(("shape", name, str(list(found)), str(list(leaf.shape)), "--init-shape random"))
        else:
            notes.append(f"{name} has another shape in --init-from ({list(found)}) and keeps random values")
    extra = [name for name in weights.shapes if name not in wanted]
    if options.init_extra == "refuse":
        rows += [("extra", name, str(list(weights.shapes[name])), "-", "--init-extra drop") for name in extra]
    elif extra:
        notes.append(f"{count_leaves(len(extra))} of --init-from dropped, starting with {extra[0]}")
    if rows:
        table = text_table(("problem", "parameter", "--init-from", "model", "to accept it"), rows[:_MOST_ROWS])
        more = f"\n... and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
        raise CheckpointError(
            f"--init-from holds other parameters than the model: {len(rows)} differences.\n{table}{more}",
            hint="leave out --model to use its model, or accept the differences with the options above.",
        )
    if not chosen:
        raise CheckpointError("--init-from has no parameter of the model.", hint="leave it out, or choose its model.")
    return chosen, [*notes, *_casts(weights, chosen)]


def params_leaves(layout: Layout) -> dict[str, LeafLayout]:
    """Returns the leaves of the parameters in a state layout, by name."""
    return {leaf.name.removeprefix("params/"): leaf for leaf in part_of(layout, "params").leaves}


def _is_smaller_vocabulary(name: str, found: Shape, wanted: Shape) -> bool:
    dim = VOCABULARY.get(name)
    if dim is None or len(found) != 2 or len(wanted) != 2:
        return False
    return found[dim] < wanted[dim] and found[1 - dim] == wanted[1 - dim]


def _casts(weights: Weights, chosen: Mapping[str, LeafLayout]) -> list[str]:
    counts: dict[tuple[str, str], int] = {}
    for name, leaf in chosen.items():
        old, new = weights.dtypes[name], leaf.dtype
        if old != new:
            if not (is_float(old) and is_float(new)):
                raise CheckpointError(f"`{name}` is {old} in --init-from but {new} here.", hint="use another model.")
            counts[str(old), str(new)] = counts.get((str(old), str(new)), 0) + 1
    return [f"{count_leaves(count)} cast from {old} to {new}" for (old, new), count in counts.items()]
