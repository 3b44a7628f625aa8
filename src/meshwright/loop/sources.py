"""Sources of a run's batches: text, rows that a job holds, or batches that it makes; and its evaluation data."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.data import (
    Batches,
    BatchStream,
    IteratedRows,
    eval_batches,
    iterated_batches,
    job_batches,
    open_rows,
)
from meshwright.data.array_rows import ARRAY_FILES
from meshwright.data.batches import RowSource, can_pad
from meshwright.distributed.same_batch import content_digest
from meshwright.errors import ConfigError, DataError, JobError
from meshwright.loop.settings.config import TrainConfig
from meshwright.loop.settings.mixture_options import parse_sources, single_path
from meshwright.loop.settings.options import NUM_ROWS, DataOptions
from meshwright.loop.text_source import MixedSource, StreamStart, Tell, TextSource, fetched, make_text_source
from meshwright.parallel.rows import count_rows
from meshwright.specs import ceil_div
from meshwright.train.fine_tuning.adapting import with_fields
from meshwright.train.step import Step


class HeldOut:
    """Evaluation data, which gives the same batches each time.

    Attributes:
        parts: the evaluation data of each source, in a mixture.
    """

    parts: Mapping[str, HeldOut] = types.MappingProxyType({})

    def __init__(
        self, rows: RowSource | IteratedRows, batch_size: int, *, seed: int, num_batches: int, tell: Tell
    ) -> None:
        self.rows, self.batch_size, self.seed, self.num_batches = rows, batch_size, seed, num_batches
        if isinstance(rows, IteratedRows):
            return
        full, rest = divmod(len(rows), batch_size)
        if not rest or can_pad(rows):
            self.num_batches = min(num_batches, ceil_div(len(rows), batch_size))
            return
        if not full:
            raise DataError(
                f"the evaluation data has {len(rows)} rows, fewer than one batch of {batch_size}.",
                hint="use more rows or a smaller batch, or add `weights` to the batch, which are 0 for padding.",
            )
        if num_batches > full:
            tell(f"evaluation leaves out {rest} of {len(rows):,} rows, which do not fill a batch of {batch_size}")
        self.num_batches = min(num_batches, full)

    @property
    def fingerprint(self) -> str:
        """Hash of the data, on which all processes must agree."""
        return str(self.rows.fingerprint)

    def batches(self, step: Step, num_batches: int | None = None) -> Iterator[Any]:
        """Yields the evaluation batches on the step's devices."""
        count = self.num_batches if num_batches is None else min(num_batches, self.num_batches)
        if not isinstance(self.rows, IteratedRows):
            yield from eval_batches(self.rows, self.batch_size, step.batch_shardings, count)
            return
        options: dict[str, Any] = {"batch_size": self.batch_size, "shardings": step.batch_shardings}
        with iterated_batches(self.rows, seed=self.seed, epochs=1, **options) as stream:
            yield from itertools.islice(stream, count)


class MixedHeldOut(HeldOut):
    """The evaluation data of all sources of a mixture, one after the other."""

    def __init__(self, parts: Mapping[str, HeldOut]) -> None:
        self.parts = parts
        self.num_batches = sum(part.num_batches for part in parts.values())

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(part.fingerprint for part in self.parts.values()).encode()).hexdigest()

    def batches(self, step: Step, num_batches: int | None = None) -> Iterator[Any]:
        all_batches = itertools.chain.from_iterable(part.batches(step) for part in self.parts.values())
        return itertools.islice(all_batches, num_batches)


class RowsSource:
    """Rows that the job or --data gives, in any form that `meshwright.data.open_rows` reads."""

    why_no_evaluation = "the job has no eval_data"
    eval_rows: RowSource | None = None

    def __init__(self, job: Any, data: Any, options: DataOptions, *, seed: int, tell: Tell) -> None:
        name = "--data" if options.data is not None else "the job's data"
        rows = rows_of(job)
        self.rows = open_rows(data, job.batch, seed=seed, name=name)
        self.options, self.batch_size = options, options.batch_size or rows
        self.counts_tokens = is_text(job)
        _require_default(options, ("text_field", "tokenizer", "num_tokens", "validation"), f"{name} is not text")
        if isinstance(self.rows, IteratedRows):
            if not self.rows.by_row:
                _require_default(options, ("batch_size",), f"{name} gives whole batches", but=rows)
            size = "an iterator over rows" if self.rows.by_row else "an iterator over batches"
        else:
            size = f"{len(self.rows):,} rows"
            if len(self.rows) < self.batch_size:
                raise DataError(
                    f"{name} has {len(self.rows)} rows, fewer than one batch of {self.batch_size}.",
                    hint="use more rows, or a smaller --batch-size.",
                )
        tell(f"data: {size}, in batches of {self.batch_size}")

    def facts(self) -> dict[str, Any]:
        return {"data": self.rows.fingerprint, "batch": self.batch_size}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        shared |= {"batch_size": self.batch_size, "epochs": self.options.epochs}
        if isinstance(self.rows, IteratedRows):
            return iterated_batches(self.rows, **shared)
        return Batches(self.rows, **shared)


class JobSource:
    """Batches that a job makes from seeds."""

    counts_tokens = False
    why_no_evaluation = "the job makes its own batches and has no eval_data"
    eval_rows: RowSource | None = None

    def __init__(self, job: Any, options: DataOptions) -> None:
        if getattr(job, "make_batch", None) is None:
            raise JobError(
                "the job has no data and no make_batch, and its example batch is not text.",
                hint="add data=..., or make_batch(seed) -> batch, or a batch of `inputs` and `targets` and --data.",
            )
        self.job = job
        self.options = options
        self.batch_size = rows_of(job)
        names = ("text_field", "tokenizer", "epochs", "num_tokens", "validation")
        _require_default(options, names, "the job makes its own batches")
        _require_default(options, ("batch_size",), "the job makes its own batches", but=self.batch_size)

    def facts(self) -> dict[str, Any]:
        drawn = content_digest(self.job.make_batch(0)) if jax.process_count() > 1 else ""
        return {"batch": jax.tree.leaves(self.job.batch), "make_batch(0), drawn by each": drawn}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        return job_batches(self.job, batch_size=self.batch_size, **shared)


Source = TextSource | RowsSource | JobSource


def is_text(job: Any) -> bool:
    """Returns whether a job's batches are tokens (`inputs` and `targets`), so that text can fill them."""
    batch = getattr(job, "batch", None)
    return (
        isinstance(batch, Mapping)
        and {"inputs", "targets"} <= set(batch)
        and all(np.ndim(leaf) == 2 for leaf in batch.values())
    )


def rows_of(job: Any) -> int:
    """Returns the number of rows in a job's example batch."""
    if not jax.tree.leaves(getattr(job, "batch", None)):
        raise JobError("the job has no example batch.", hint="pass Job(..., batch=...), of arrays or ShapeDtypeStruct.")
    return count_rows(job.batch, who="train")


def _require_default(options: DataOptions, names: tuple[str, ...], why: str, *, but: Any = None) -> None:
    """Raises if an option was set that would have no effect."""
    plain = DataOptions()
    for name in names:
        value = getattr(options, name)
        # The default of --tokenizer was `bytes`, which the configurations of older runs hold.
        if value not in (getattr(plain, name), but) and (name, value) != ("tokenizer", "bytes"):
            raise ConfigError(f"{name} is {value}, which would have no effect: {why}.", hint=f"leave {name} out.")


def make_source(config: TrainConfig, job: Any, *, tell: Tell) -> Source:
    """Returns the source of a run's batches: --data, else the job's data, else its make_batch, else text."""
    options = config.data
    if job is None:
        return make_text_source(options, tell=tell, batch_size=options.batch_size or NUM_ROWS)
    mixture = parse_sources(options.data)
    data = single_path(options.data) if options.data is not None else getattr(job, "data", None)
    is_path = isinstance(data, (str, os.PathLike))
    if isinstance(data, str):
        data = fetched(data, options, tell).path
    wants_text = is_path or (data is None and getattr(job, "make_batch", None) is None)
    if mixture is not None and (not is_text(job) or any(holds_arrays(path) for path in mixture.values())):
        raise ConfigError("only text can be mixed, for a job of `inputs` and `targets`.", hint="name one source.")
    if is_text(job) and wants_text and not (is_path and holds_arrays(data)):
        rows, tokens = job.batch["inputs"].shape
        _require_default(options, ("num_tokens",), "the job's batch decides", but=tokens)
        vocab_size, eval_data = getattr(job, "vocab_size", None), getattr(job, "eval_data", None)
        if vocab_size is None:
            tell("the job has no vocab_size, so token ids beyond its vocabulary are not detected")
        if eval_data is not None:
            _require_default(options, ("validation",), "the job has eval_data")
            options = dataclasses.replace(options, validation=0.0)
        if not isinstance(eval_data, (str, os.PathLike)) or holds_arrays(eval_data):
            eval_data = None
        options = dataclasses.replace(options, num_tokens=tokens)
        if mixture is None:
            options = dataclasses.replace(options, data=None if data is None else str(data))
        size = options.batch_size or rows
        source = make_text_source(options, tell=tell, batch_size=size, vocab_size=vocab_size, eval_data=eval_data)
        if isinstance(source, MixedSource):
            source.labels_rows = "sources" in job.batch
        return source
    if data is not None:
        return RowsSource(job, data, options, seed=config.run.seed, tell=tell)
    return JobSource(job, options)


def make_held_out(config: TrainConfig, job: Any, source: Source, *, tell: Tell) -> HeldOut | None:
    """Returns the evaluation data of a run: the job's, else that of its text, else None."""
    if not config.run.eval_every:
        return None
    rows: Any = source.eval_rows
    count = config.run.eval_batches
    if rows is None and isinstance(source, TextSource) and source.eval_sources:
        options: dict[str, Any] = {"seed": config.run.seed, "num_batches": count, "tell": tell}
        parts = {name: HeldOut(rows, source.batch_size, **options) for name, rows in source.eval_sources.items()}
        return MixedHeldOut(parts)
    if rows is None and (data := getattr(job, "eval_data", None)) is not None:
        data = fetched(data, config.data, tell).path if isinstance(data, str) else data
        rows = open_rows(data, job.batch, seed=config.run.seed, name="the job's eval_data")
    if rows is None or (not isinstance(rows, IteratedRows) and not len(rows)):
        return None
    return HeldOut(rows, source.batch_size, seed=config.run.seed, num_batches=count, tell=tell)


def holds_arrays(path: Any) -> bool:
    """Returns whether a path is an .npy or .npz file, or a folder that holds some."""
    place = Path(path)
    if place.is_dir():
        return any(item.suffix in ARRAY_FILES for item in place.iterdir())
    return place.suffix in ARRAY_FILES


def with_rows(job: Any, num_rows: int) -> Any:
    """Returns a job whose example batch has this number of rows."""
    if rows_of(job) == num_rows:
        return job

    def resized(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((num_rows, *leaf.shape[1:]), leaf.dtype) if np.ndim(leaf) else leaf

    return with_fields(job, batch=jax.tree.map(resized, job.batch))
