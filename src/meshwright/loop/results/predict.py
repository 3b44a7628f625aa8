"""Predictions of a job on one batch, before and after training, for the report page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.bounded_reader import read_json
from meshwright.errors import JobError
from meshwright.files import write_atomically
from meshwright.loop.results.before_after import BeforeAfter
from meshwright.loop.text_source import StreamStart
from meshwright.pages import encode_png
from meshwright.specs import ceil_div
from meshwright.train.jobs.job_loading import job_errors
from meshwright.train.padding import cut, part_leaves
from meshwright.tree import flatten_tree

if TYPE_CHECKING:
    from meshwright.loop.decisions import RunSetup

FOLDER = "predictions"
MAX_PIXELS = 96
_MAX_SHOWN = 6
_LABELS = ("label", "labels", "y", "target", "targets", "class")


@dataclass(frozen=True)
class Column:
    """One array of a batch or of the outputs, by row: texts, or PNG images in base64."""

    name: str
    kind: str  # "image" or "text"
    values: list[str]


@dataclass(frozen=True)
class PredictionTable:
    """Predicted rows, as the report shows them.

    Args:
        inputs: arrays of the batch.
        outputs: arrays that `predict` returned.
        predicted, true: labels of each row, or None if the outputs are not labels.
    """

    inputs: list[Column]
    outputs: list[Column]
    predicted: list[str] | None = None
    true: list[str] | None = None

    @property
    def num_right(self) -> int | None:
        if self.predicted is None or self.true is None:
            return None
        return sum(a == b for a, b in zip(self.predicted, self.true, strict=True))


class Predictions(BeforeAfter):
    """Runs a job's `predict` on a batch, sharded like a step, before and after training."""

    def __init__(self, setup: RunSetup) -> None:
        self.setup, self.num_rows = setup, setup.config.run.predict_rows
        job, mesh = setup.job, setup.layout.mesh
        precision = setup.dtypes
        has_state = getattr(job, "model_state", None) is not None
        leaves, state_leaves = (part_leaves(setup.layout, part) for part in ("params", "model_state"))

        def predict(params: Any, model_state: Any, batch: Any) -> Any:
            params, model_state = cut(params, leaves), cut(model_state, state_leaves)
            params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, precision.compute_dtypes(params))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                found = job.predict(params, model_state, batch) if has_state else job.predict(params, batch)
                self._check(found, batch)
                return jax.tree.map(lambda leaf: leaf[: self.num_rows] if leaf.ndim else leaf, (batch, found))

        self._predict = jax.jit(predict, out_shardings=NamedSharding(mesh, P()))

    def show(self, state: Any, when: str) -> None:
        setup, step = self.setup, int(state.step)
        arrays, which = self._batch()
        with job_errors(setup.job, str(setup.config.model.job)):
            result = self._predict(state.params, getattr(state, "model_state", None), arrays)
        inputs, outputs = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), result)
        found = make_table(inputs, outputs)
        rows = len(found.outputs[0].values)
        text = f"predicted {rows} rows of {which}"
        if found.num_right is not None:
            text += f": {found.num_right} of {rows} labels are right"
        name = f"{FOLDER}/{step}.json"
        if jax.process_index() == 0:
            place = setup.folder.path / name
            with setup.folder.writing():
                place.parent.mkdir(exist_ok=True)
                write_atomically(place, json.dumps({"step": step, "which": which, **asdict(found)}))
        setup.tell.log.event("prediction", step, text, when=when, file=name)
        setup.tell(f"{text} {when} training")

    def _batch(self) -> tuple[Any, str]:
        setup = self.setup
        if setup.held_out is not None:
            batches = setup.held_out.batches(setup.step, 1)
            return next(batches).arrays, "an evaluation batch"
        with setup.source.open(setup.step, StreamStart(), seed=setup.config.run.seed) as stream:
            return next(stream).arrays, "a training batch"

    def _check(self, outputs: Any, batch: Any) -> None:
        rows = next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
        leaves = flatten_tree(outputs, sep="/")
        wrong = next((name for name, leaf in leaves.items() if not np.ndim(leaf) or leaf.shape[0] != rows), None)
        if wrong is not None or not leaves:
            what = "nothing" if not leaves else f"`{wrong}` of shape {list(np.shape(leaves[wrong]))}"
            raise JobError(
                f"`predict` returned {what} for a batch of {rows} rows.",
                hint="return arrays with one entry per row.",
            )


# --- From arrays to texts and images ---


def make_table(inputs: Any, outputs: Any) -> PredictionTable:
    """Returns rows of a batch and the outputs for them, in the form of the report.

    Integer outputs with one value per row are labels. Outputs with one float per class count as labels too, by their
    largest entry, if the batch has an integer per row to compare with.

    Example:
        >>> batch = {"x": np.zeros((2, 3), np.float32), "y": np.int32([0, 1])}
        >>> found = make_table(batch, np.float32([[0.9, 0.1], [0.8, 0.2]]))
        >>> found.predicted, found.true, found.num_right
        (['0', '0'], ['0', '1'], 1)
    """
    given, made = flatten_tree(inputs, sep="/"), flatten_tree(outputs, sep="/")
    given = {name: leaf for name, leaf in given.items() if np.ndim(leaf)}
    true = _true_labels(given, made)
    predicted = None
    for leaf in made.values():
        if _is_label(leaf):
            predicted = leaf
            break
        if true is not None and leaf.ndim == 2 and leaf.shape[1] > max(1, int(given[true].max())):
            predicted = leaf.argmax(-1)
            break
    return PredictionTable(
        [_column(name, leaf) for name, leaf in given.items()],
        [_column(name or "output", leaf) for name, leaf in made.items()],
        None if predicted is None else [str(item) for item in predicted.tolist()],
        None if predicted is None or true is None else [str(item) for item in given[true].tolist()],
    )


def _is_label(leaf: Any) -> bool:
    return leaf.ndim == 1 and leaf.dtype.kind in "biu"


def _true_labels(given: Mapping[str, Any], made: Mapping[str, Any]) -> str | None:
    """Returns the name of the batch's labels: its only integers, or those with a usual name."""
    labels = [name for name, leaf in given.items() if _is_label(leaf)]
    named = [name for name in labels if name in made or name.rpartition("/")[2] in _LABELS]
    return labels[0] if len(labels) == 1 else named[0] if len(named) == 1 else None


def _column(name: str, leaf: Any) -> Column:
    if is_image(leaf.shape):
        return Column(name, "image", [base64.b64encode(png).decode() for png in to_pngs(leaf)])
    return Column(name, "text", [_text(row) for row in leaf])


def _text(row: Any) -> str:
    row = np.asarray(row)
    values = [_number(item) for item in row.reshape(-1)[:_MAX_SHOWN].tolist()]
    if not row.ndim:
        return values[0]
    more = f", … {row.size} values" if row.size > _MAX_SHOWN else ""
    return f"[{', '.join(values)}{more}]"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def is_image(shape: Sequence[int]) -> bool:
    """Returns whether an array holds images: rank 4 with 1 or 3 channels in the last or second dim."""
    return len(shape) == 4 and min(shape[1:]) > 0 and (shape[3] in (1, 3) or shape[1] in (1, 3))


def to_pngs(images: Any) -> list[bytes]:
    """Returns PNG files of images `[rows, height, width, channels]` or `[rows, channels, height, width]`.

    Integers are taken as 0 to 255 and floats from 0 to 1 as they are; other floats are scaled to their range over all
    images. Large images shrink to at most 96 pixels by averaging.
    """
    images = np.asarray(images)
    if images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    is_byte = images.dtype.kind in "iu"
    pixels = images.astype(np.float64) / (255.0 if is_byte else 1.0)
    low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
    if low < 0 or high > 1:
        pixels = (pixels - low) / (high - low)
    factor = ceil_div(max(images.shape[1:3]), MAX_PIXELS)
    if factor > 1:
        height, width = (max(1, size // factor) for size in images.shape[1:3])
        cut = pixels[:, : height * factor, : width * factor]
        pixels = cut.reshape(len(images), height, -1, width, cut.shape[2] // width, images.shape[3]).mean((2, 4))
    bytes_ = np.clip(np.nan_to_num(pixels) * 255 + 0.5, 0, 255).astype(np.uint8)
    _, height, width, channels = bytes_.shape
    return [encode_png(one.tobytes(), width=width, height=height, channels=channels) for one in bytes_]


def read_table(path: Path) -> tuple[PredictionTable, str] | None:
    """Returns the predictions in a file and the batch that they are of, or None if it is damaged."""
    try:
        found = read_json(path)
        columns = {part: [Column(**column) for column in found[part]] for part in ("inputs", "outputs")}
        return PredictionTable(**columns, predicted=found["predicted"], true=found["true"]), str(found["which"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
