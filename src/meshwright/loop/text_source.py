"""Text as the source of a run's batches: one corpus, or a weighted mixture of several."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data import (
    Batches,
    BatchStream,
    ChatRows,
    Documents,
    IteratedRows,
    Ledger,
    MixedBatches,
    Rows,
    Tokenizer,
    Tokens,
    iterated_batches,
    load_chat_template,
    load_tokenizer,
    mixture_weights,
    open_bin_tokens,
    prepare_conversations,
    prepare_tokens,
    stream_rows,
)
from meshwright.data.batches import RowSource
from meshwright.data.cache_folder import cache_errors, default_cache
from meshwright.data.documents import find_files
from meshwright.data.fetched_data import LocalData, fetch_data
from meshwright.data.formats.bin_tokens import BIN_SUFFIX
from meshwright.data.mixture.weights import shares
from meshwright.errors import DataError
from meshwright.loop.settings.mixture_options import parse_sources, parse_weights, single_path
from meshwright.loop.settings.options import DataOptions
from meshwright.remote import is_url
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


@dataclass(frozen=True)
class _Corpus:
    """The rows of one source of text, for training and evaluation."""

    rows: Rows | ChatRows
    eval_rows: Rows | ChatRows | None
    fingerprint: str
    about: str


def _most_segments(*rows: Any) -> int:
    return max(int(part.most_segments) for part in rows if part is not None)


class TextSource:
    """Text as packed rows of tokens, split into training and evaluation rows.

    Args:
        vocab_size: vocabulary size of the job's model; larger token ids are rejected.
        eval_data: evaluation text; without it, a share of the documents is held out.
    """

    counts_tokens = True
    why_no_evaluation = "no rows are held out"
    eval_rows: RowSource | None
    eval_sources: Mapping[str, RowSource]
    """Evaluation rows by source, in a mixture."""

    def __init__(
        self,
        options: DataOptions,
        *,
        tell: Tell,
        batch_size: int,
        vocab_size: int | None = None,
        eval_data: Any = None,
    ) -> None:
        self.options, self.batch_size, self.job_vocab_size = options, batch_size, vocab_size
        self.tokenizer: Tokenizer = load_tokenizer(options.tokenizer)
        corpus = self._open(single_path(options.data), tell, eval_data=eval_data)
        self.fingerprint, self.rows, self.eval_rows = corpus.fingerprint, corpus.rows, corpus.eval_rows
        self.eval_sources = {}
        if len(self.rows) < batch_size:
            raise DataError(
                f"the data has {len(self.rows)} training rows of {options.num_tokens} tokens; a batch needs "
                f"{batch_size}.",
                hint="use more text, a smaller --batch-size, or fewer --num-tokens.",
            )
        tell(f"data: {corpus.about}")

    def _open(self, path: str | None, tell: Tell, *, eval_data: Any = None) -> _Corpus:
        options = self.options
        tokens = self._tokens(path, tell)
        train, validation = tokens.split(options.validation)
        fingerprint = tokens.fingerprint
        rows, eval_rows = self._pack(train), None
        if eval_data is not None:
            held_out = self._tokens(eval_data, tell)
            fingerprint += held_out.fingerprint
            eval_rows = self._pack(held_out)
        elif options.validation:
            eval_rows = self._pack(validation)
        kind = "conversations" if isinstance(rows, ChatRows) else "documents"
        about = (
            f"{tokens.num_documents:,} {kind}, {tokens.num_tokens:,} tokens; rows of {options.num_tokens}: "
            f"{len(rows):,} for training, {0 if eval_rows is None else len(eval_rows):,} for evaluation"
        )
        if isinstance(rows, ChatRows):
            about += f"; loss on {rows.total_targets:,} tokens of the assistant"
            about += f"; {rows.num_cut:,} conversations are longer than a row and cut" if rows.num_cut else ""
            about += f"; {rows.num_dropped:,} left out, without text of the assistant" if rows.num_dropped else ""
        return _Corpus(rows, eval_rows, fingerprint, about)

    @property
    def most_segments(self) -> int | None:
        """Largest number of documents in a row of any kind, where padding counts as one; None if it is not known."""
        return _most_segments(self.rows, self.eval_rows)

    def _pack(self, tokens: Tokens) -> Rows | ChatRows:
        made = Rows if tokens.mask is None else ChatRows
        return made(tokens, self.options.num_tokens, vocab_size=self.job_vocab_size)

    def _tokens(self, path: Any, tell: Tell) -> Tokens:
        path = path if path is None else fetched(str(path), self.options, tell).path
        folder = Path(self.options.data_cache) if self.options.data_cache else default_cache() / "tokens"
        files = find_files(path)
        packed = [file for file in files if file.suffix == BIN_SUFFIX]
        if packed and len(packed) < len(files):
            other = next(file for file in files if file.suffix != BIN_SUFFIX)
            raise DataError(
                f"{path} holds packed tokens and other files: {packed[0].name} and {other.name}.",
                hint="name them as two sources of a mixture: --data tokens=GLOB text=GLOB.",
            )
        if packed:
            dtype = self.options.token_dtype
            return open_bin_tokens(packed, self.tokenizer, folder=folder, dtype=dtype, tell=tell)
        documents = Documents(files, text_field=self.options.text_field)
        fields, messages = documents.fields(), self.options.messages_field
        if messages in fields and self.options.text_field not in fields:
            documents = Documents(files, text_field=messages, messages=True)
            template = load_chat_template(self.options.chat_template, tokenizer=self.options.tokenizer)
            return prepare_conversations(documents, self.tokenizer, template, folder=folder, tell=tell)
        return prepare_tokens(documents, self.tokenizer, folder=folder, tell=tell)

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.vocab_size)

    def facts(self) -> dict[str, Any]:
        """Facts that all processes must agree on."""
        return {"data": self.fingerprint, "rows": len(self.rows)}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        """Returns the batches from a position on, on the step's devices."""
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        return Batches(self.rows, batch_size=self.batch_size, epochs=self.options.epochs, **shared)


class MixedSource(TextSource):
    """A weighted mixture of several sources of text, each with its own epochs and evaluation rows.

    Attributes:
        labels_rows: whether batches say which source each row comes from, for the training loss of each source.
    """

    labels_rows = True

    def __init__(
        self, options: DataOptions, *, tell: Tell, batch_size: int, vocab_size: int | None = None, eval_data: Any = None
    ) -> None:
        self.options, self.batch_size, self.job_vocab_size = options, batch_size, vocab_size
        self.tokenizer = load_tokenizer(options.tokenizer)
        paths = parse_sources(options.data)
        assert paths is not None
        corpora: dict[str, _Corpus] = {}
        for name, path in sorted(paths.items()):
            try:
                corpora[name] = self._open(path, tell)
            except DataError as error:
                text = str(error).partition("\nhint:")[0]
                raise DataError(f"the source `{name}`: {text}", hint=error.hint) from None
        self.sources = {name: corpus.rows for name, corpus in corpora.items()}
        self.eval_sources = {name: found.eval_rows for name, found in corpora.items() if found.eval_rows is not None}
        self.eval_rows = None
        if eval_data is not None:
            self.eval_rows = self._pack(self._tokens(eval_data, tell))
        sizes = {name: len(rows) for name, rows in self.sources.items()}
        weights = parse_weights(options.mixture_weights) or None
        self.weights = mixture_weights(sizes, weights, temperature=options.mixture_temperature)
        self.fingerprint = hashlib.sha256("".join(found.fingerprint for found in corpora.values()).encode()).hexdigest()
        for name, share in shares(self.weights).items():
            tell(f"data: {name}, weight {share:.4g}: {corpora[name].about}")

    @property
    def most_segments(self) -> int | None:
        return _most_segments(*self.sources.values(), *self.eval_sources.values(), self.eval_rows)

    def described(self) -> dict[str, Any]:
        """Returns the weight and the size of each source, for the report."""
        return {
            name: {"weight": share, "rows": len(self.sources[name]), "tokens": self.sources[name].total_targets}
            for name, share in shares(self.weights).items()
        }

    def facts(self) -> dict[str, Any]:
        return {"data": self.fingerprint, "mixture": self.weights}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        shared |= {"batch_size": self.batch_size, "epochs": self.options.epochs}
        return MixedBatches(self.sources, self.weights, label="sources" if self.labels_rows else None, **shared)


class StreamSource(TextSource):
    """Text that is tokenized while it is read, without a cache."""

    def __init__(
        self, options: DataOptions, *, tell: Tell, batch_size: int, vocab_size: int | None = None, eval_data: Any = None
    ) -> None:
        self.options, self.batch_size = options, batch_size
        self.tokenizer = load_tokenizer(options.tokenizer)
        if vocab_size is not None and self.tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens; the model's vocabulary has {vocab_size}.",
                hint="use the tokenizer that the model was made for.",
            )
        documents = self._documents(single_path(options.data), tell)
        self.stream = self._rows(documents, "the data", validation=options.validation)
        self.eval_sources, self.eval_stream = {}, None
        if eval_data is not None:
            self.eval_stream = self._rows(self._documents(eval_data, tell), "the evaluation data")
        elif options.validation:
            held_out: dict[str, Any] = {"validation": options.validation, "held_out": True}
            self.eval_stream = self._rows(documents, "the evaluation data", **held_out)
        self.eval_rows = self.eval_stream  # type: ignore[assignment]
        tell(f"data: {len(documents):,} documents, tokenized while reading; rows of {options.num_tokens}")

    def _documents(self, path: str | None, tell: Tell) -> Documents:
        path = path if path is None else fetched(str(path), self.options, tell).path
        documents = Documents(find_files(path), text_field=self.options.text_field)
        fields = documents.fields()
        packed = any(file.suffix == BIN_SUFFIX for file in documents.files)
        if packed or (self.options.messages_field in fields and self.options.text_field not in fields):
            kind = "packed tokens" if packed else "conversations"
            raise DataError(f"--tokenize stream reads text, not {kind}.", hint="leave --tokenize out.")
        return documents

    def _rows(self, documents: Documents, name: str, **split: Any) -> IteratedRows:
        size = self.batch_size
        rows = stream_rows(documents, self.tokenizer, self.options.num_tokens, batch_size=size, name=name, **split)
        found = sum(1 for _ in itertools.islice(rows.open(0, 0), size))
        if found < size:
            raise DataError(
                f"{name} has {found} rows of {self.options.num_tokens} tokens; a batch needs {size}.",
                hint="use more text, a smaller --batch-size, or fewer --num-tokens.",
            )
        return rows

    @property
    def most_segments(self) -> None:
        return None

    def facts(self) -> dict[str, Any]:
        return {"data": self.stream.fingerprint}

    def open(self, step: Step, place: StreamStart, *, seed: int) -> BatchStream:
        shared: dict[str, Any] = {"shardings": step.batch_shardings, "seed": seed, **vars(place)}
        return iterated_batches(self.stream, batch_size=self.batch_size, epochs=self.options.epochs, **shared)


def make_text_source(options: DataOptions, **arguments: Any) -> TextSource:
    """Returns the source of text that `--data` names: one corpus, a stream, or a mixture."""
    if parse_sources(options.data) is not None:
        if options.tokenize == "stream":
            raise DataError("a mixture needs the token cache.", hint="leave --tokenize stream out, or name one source.")
        return MixedSource(options, **arguments)
    return (StreamSource if options.tokenize == "stream" else TextSource)(options, **arguments)


def fetched(data: str, options: DataOptions, tell: Tell) -> LocalData:
    """Returns a local copy of the data at a URL; a path stays as it is."""
    if not is_url(data):
        return LocalData(data)
    folder = Path(options.data_cache) if options.data_cache else default_cache()
    with cache_errors(folder):
        return fetch_data(data, folder / "fetched", tell=tell)
