"""Sources of a run's batches: text, or the job itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.data import (
    Batches,
    BatchStream,
    Ledger,
    Rows,
    eval_batches,
    job_batches,
    load_tokenizer,
    open_documents,
    prepare_tokens,
)
from meshwright.errors import ConfigError, DataError, JobError
from meshwright.loop.config import DataOptions, TrainConfig
from meshwright.parallel.rows import count_rows
from meshwright.train.step import Step

Tell = Callable[[str], None]


@dataclass(frozen=True)
class StreamStart:
    """The position in the data to start at.

    Args:
        state: position saved in a checkpoint, or None for the beginning.
        first_step: step of the first batch.
    """

    state: Mapping[str, Any] | None = None
    first_step: int = 1
    ledger: Ledger | None = None


class TextSource:
    """Text as packed rows of tokens, split into training and evaluation rows.

    Args:
        vocab_size: vocabulary size of the job's model; larger token ids are rejected.
    """

    def __init__(self, options: DataOptions, *, tell: Tell, vocab_size: int | None = None) -> None:
        self.options = options
        self.tokenizer = load_tokenizer(options.tokenizer)
        documents = open_documents(options.data, text_field=options.text_field)
        folder = Path(options.data_cache) if options.data_cache else default_cache() / "tokens"
        tokens = prepare_tokens(documents, self.tokenizer, folder=folder, tell=tell)
        train, validation = tokens.split(options.validation)
        self.fingerprint = tokens.fingerprint
        self.rows = Rows(train, options.num_tokens, vocab_size=vocab_size)
        self.eval_rows = None
        if options.validation:
            self.eval_rows = Rows(validation, options.num_tokens, vocab_size=vocab_size)
        if len(self.rows) < options.batch_size:
            raise DataError(
                f"the data has {len(self.rows)} training rows of {options.num_tokens} tokens; a batch needs "
                f"{options.batch_size}.",
                hint="use more text, a smaller --batch-size, or fewer --num-tokens.",
            )
        tell(
            f"data: {tokens.num_documents:,} documents, {tokens.num_tokens:,} tokens; rows of {options.num_tokens}: "
            f"{len(self.rows):,} for training, {len(self.eval_rows or ()):,} for evaluation"
        )

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.vocab_size)

    def facts(self) -> dict[str, Any]:
        """Facts that all processes must agree on."""
        return {"data": self.fingerprint, "rows": len(self.rows)}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        """Returns the batches from a position on, on the step's devices."""
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        return Batches(self.rows, batch_size=self.options.batch_size, epochs=self.options.epochs, **shared)

    def evaluation(self, step: Step, num_batches: int) -> Iterator[Any] | None:
        """Returns the evaluation batches, the same each time, or None if there are none."""
        if not self.eval_rows:
            return None
        return iter(eval_batches(self.eval_rows, self.options.batch_size, step.batch_shardings, num_batches))

    why_no_evaluation = "no rows are held out"
    counts_tokens = True


class JobSource:
    """Batches that a job makes from seeds."""

    def __init__(self, job: Any, options: DataOptions) -> None:
        if getattr(job, "make_batch", None) is None:
            raise JobError(
                "the job has no make_batch, and its example batch is not text.",
                hint="add make_batch(seed) -> batch, or use a batch of `inputs` and `targets` with --data.",
            )
        self.job = job
        self.options = options
        self.batch_size = rows_of(job)
        _require_default(options, ("text_field", "tokenizer", "epochs", "num_tokens"), "the job makes its own batches")
        _require_default(options, ("batch_size",), "the job's batch decides", but=self.batch_size)

    def facts(self) -> dict[str, Any]:
        return {"batch": jax.tree.leaves(self.job.batch)}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        return job_batches(self.job, batch_size=self.batch_size, **shared)

    def evaluation(self, step: Step, num_batches: int) -> Iterator[Any] | None:
        return None

    why_no_evaluation = "the job makes its own batches and holds none out"
    counts_tokens = False


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
        if value not in (getattr(plain, name), but):
            raise ConfigError(f"{name} is {value}, which would have no effect: {why}.", hint=f"leave {name} out.")


def default_cache() -> Path:
    """Returns the cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright"


def make_source(config: TrainConfig, job: Any, *, tell: Tell) -> TextSource | JobSource:
    """Returns the source of a run's batches: text, unless the job makes its own and --data is not set."""
    if job is None:
        return TextSource(config.data, tell=tell)
    if is_text(job) and (config.data.data is not None or getattr(job, "make_batch", None) is None):
        rows, tokens = job.batch["inputs"].shape
        _require_default(config.data, ("batch_size",), "the job's batch decides", but=rows)
        _require_default(config.data, ("num_tokens",), "the job's batch decides", but=tokens)
        vocab_size = getattr(job, "vocab_size", None)
        if vocab_size is None:
            tell("the job has no vocab_size, so token ids beyond its vocabulary are not detected")
        options = dataclasses.replace(config.data, batch_size=rows, num_tokens=tokens)
        return TextSource(options, tell=tell, vocab_size=vocab_size)
    if config.data.data is not None:
        raise JobError("the job's batches are not tokens, so --data cannot fill them.", hint="leave --data out.")
    return JobSource(job, config.data)
