"""Evaluation of a finished run on any text: loss, perplexity and bits per byte of each file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.data import Documents, Rows, eval_batches, open_documents, prepare_tokens
from meshwright.data.cache_folder import default_cache
from meshwright.errors import ConfigError, DataError
from meshwright.loop.results.saved_run import SavedRun
from meshwright.loop.text_source import fetched
from meshwright.metrics import compute, merge
from meshwright.specs import round_up
from meshwright.train import language_job, make_eval_step
from meshwright.train.padding import part_leaves
from meshwright.types import PyTree


@dataclass(frozen=True)
class SourceScore:
    """The loss of one source.

    Args:
        source: file, or "all".
        num_targets: number of predicted tokens: all but the first of each document.
        num_bytes: number of bytes of its texts; with `max_batches`, their share.
        loss: mean cross-entropy per token, in nats.
        accuracy: fraction of tokens that have the largest logit.
    """

    source: str
    num_targets: int
    num_bytes: int
    loss: float
    accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs per byte of text, which does not depend on the tokenizer."""
        return self.loss * self.num_targets / math.log(2) / self.num_bytes

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("source", "num_targets", "num_bytes", "loss", "accuracy")}
        return values | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def evaluate_run(
    saved: SavedRun,
    params: PyTree,
    mesh: Mesh,
    data: Sequence[str],
    *,
    batch_size: int | None = None,
    num_tokens: int | None = None,
    precision: str = "float32",
    max_batches: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[SourceScore]:
    """Yields the score of each file of the data, and that of all together if there are several.

    Args:
        params: the run's parameters on the mesh, from `SavedRun.restore`.
        data: files, folders or globs, as for training.
        batch_size: rows per batch (default: those of the run, or fewer if the data has fewer).
        num_tokens: tokens per row (default: those of the run).
        max_batches: maximum number of batches per file (default: all rows).
    """
    options = saved.config.data
    num_tokens = num_tokens or options.num_tokens
    sources = [source for path in data for source in _sources(saved, path, num_tokens, tell)]
    layout = saved.layout(mesh)
    job = language_job(saved.model, batch_size=mesh.size, num_tokens=num_tokens, packed=True)
    step = make_eval_step(job, layout, precision=precision, raw=True)
    ways = math.prod(mesh.shape[axis] for axis in step.row_axes)
    most = max(len(source.rows) for source in sources)
    rows = round_up(min(batch_size or options.batch_size or 16, most), ways)
    if any(leaf.is_padded for leaf in part_leaves(layout, "params")):
        raise ConfigError("the parameters do not divide evenly over this mesh.", hint="use another --mesh.")
    state, scores = saved.state(params), list[SourceScore]()
    for source in sources:
        found = None
        for batch in eval_batches(source.rows, rows, step.batch_shardings, max_batches):
            metrics = jax.device_get(step(state, batch.arrays))
            found = metrics if found is None else merge(found, metrics)
        values = {name: float(value) for name, value in jax.device_get(compute(found)).items()}
        count = int(values["tokens"])
        scores.append(
            SourceScore(
                source.name,
                count,
                round(source.num_bytes * count / source.num_targets),
                values["cross_entropy"],
                values["accuracy"],
            )
        )
        yield scores[-1]
    if len(scores) > 1:
        yield _together(scores)


def _together(scores: Sequence[SourceScore]) -> SourceScore:
    targets, size = (sum(getattr(score, name) for score in scores) for name in ("num_targets", "num_bytes"))
    loss, accuracy = (
        sum(getattr(score, name) * score.num_targets for score in scores) / targets for name in ("loss", "accuracy")
    )
    return SourceScore("all", targets, size, loss, accuracy)


@dataclass(frozen=True)
class _Source:
    name: str
    rows: Rows
    num_targets: int
    num_bytes: int


def _sources(saved: SavedRun, path: str, num_tokens: int, tell: Callable[[str], None]) -> Iterator[_Source]:
    options = saved.config.data
    folder = Path(options.data_cache) if options.data_cache else default_cache() / "tokens"
    local = fetched(path, options, tell)
    for file in open_documents(local.path, text_field=options.text_field).files:
        documents = Documents([file], text_field=options.text_field)
        tokens = prepare_tokens(documents, saved.tokenizer, folder=folder, tell=tell)
        if tokens.num_tokens < 2:
            raise DataError(f"{file} has {tokens.num_tokens} tokens, too few to evaluate.", hint="leave it out.")
        rows = Rows(tokens, num_tokens, vocab_size=saved.model.vocab_size)
        targets = tokens.num_tokens - tokens.num_documents
        yield _Source(local.shown(file), rows, targets, sum(map(_num_bytes, documents.stream())))


def _num_bytes(document: Any) -> int:
    return sum(len(piece.encode() if isinstance(piece, str) else piece) for piece in document.pieces())
