"""Generation of tokens: one program reads the prompts, another generates a chunk of tokens per call.

Both programs are compiled once per shape: the number of rows, the padded length of prompts and the size of the cache.
The cache is donated from call to call. An accelerator never waits for the host: a chunk has a fixed number of tokens,
and the next chunk is dispatched before the host reads the tokens of the last one.

Shapes: B rows, S tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import MeshwrightError
from meshwright.generate.draw import Mode, Sampling, draw
from meshwright.generate.growth import grown, room_for, rooms_of
from meshwright.generate.limits import cache_shapes, check_prompts, check_room
from meshwright.generate.loaded_weights import Weights, load_weights
from meshwright.generate.passes import Cache, logits_of, read_prompts, read_tokens
from meshwright.generate.spread import Spread
from meshwright.models.language import LanguageModel
from meshwright.specs import round_up
from meshwright.train.precision import Precision
from meshwright.types import PyTree

_NONE = -1  # in the place of a token after the end of a row
_SCORED = 128  # positions whose logits are in memory at once
_LEAST_PROMPT = 16
_DISABLED = re.findall(r"--xla_disable_hlo_passes=(\S+)", os.environ.get("XLA_FLAGS", ""))
# XLA:GPU would merge the matmuls that share a token, and copy their weights next to each other for every token.
_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 0}
# For one row, it would store all products of a weight with the token, rounded to the dtype of both, and then add them.
_ONE_ROW = {"xla_disable_hlo_passes": ",".join([*_DISABLED, "dot-strength-reduction"])}


def make_generator(
    model: LanguageModel,
    *,
    length: int,
    precision: Precision | str = "float32",
    vocab_size: int | None = None,
    chunk: int = 16,
    run_ahead: bool | None = None,
) -> Generator:
    """Returns a generator of tokens for a model.

    Args:
        length: maximum number of tokens of a row, including its prompt; the length of the cache.
        precision: compute precision, as for a train step.
        vocab_size: generate only token ids below this (default: the model's vocabulary).
        chunk: number of tokens per call of the program, after which `stream` yields them.
        run_ahead: whether the device generates whole chunks, and one chunk ahead of the host (default: except on CPUs).
            It never waits, but after the end of a batch it may generate up to two chunks that nobody reads.

    Example:
        >>> from meshwright.models import Decoder
        >>> model = Decoder.named("tiny")
        >>> generate = make_generator(model, length=16)
        >>> weights = generate.load(model.init(jax.random.key(0)))
        >>> [len(tokens) for tokens in generate(weights, [[1, 2, 3], [4]], 5)]
        [5, 5]
    """
    if length < 2:
        raise MeshwrightError(f"length={length} cannot hold a prompt and a new token.", hint="use at least 2.")
    if chunk < 1:
        raise MeshwrightError(f"chunk must be at least 1; got {chunk}.", hint="use e.g. 16.")
    named = Precision.named(precision)
    if named.fp8 is not None:
        named = Precision.named("mixed")  # the projections of a few tokens are limited by memory, not by matmuls
    if run_ahead is None:
        run_ahead = jax.default_backend() != "cpu"
    return Generator(_Sizes(model, length, vocab_size or model.vocab_size, chunk, run_ahead), named)


@dataclass(frozen=True)
class _Sizes:
    """The static part of the programs, besides the shapes of their inputs."""

    model: LanguageModel
    length: int
    vocab_size: int
    chunk: int
    run_ahead: bool


class _Rows(NamedTuple):
    """The state of a batch between two calls."""

    cache: Cache
    token: Any  # [B], the last token, which the model has not read yet
    place: Any  # [B], its place
    done: Any  # [B]


class Generator:
    """Generates tokens after prompts; `make_generator` makes it."""

    def __init__(self, sizes: _Sizes, precision: Precision) -> None:
        self.sizes, self.precision = sizes, precision

    def load(self, params: PyTree, *, num_rows: int = 1) -> Weights:
        """Returns weights for `__call__`, in the compute dtype and sharded as the parameters are.

        Args:
            params: parameters on one device, or sharded over any mesh.
            num_rows: number of rows per batch, which decides the axes that split rows.
        """
        return load_weights(params, precision=self.precision, num_rows=num_rows)

    def __call__(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int] | np.ndarray],
        num_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> list[np.ndarray]:
        """Returns the tokens after each prompt, the same on every mesh up to rounding; all processes must call alike.

        Args:
            prompts: token ids of each row; lengths may differ.
            num_tokens: maximum number of new tokens of a row.
            sampling: how tokens are drawn (default: the most likely one).
            stop_tokens: tokens that end a row; they are returned.
        """
        parts = list(self.stream(weights, prompts, num_tokens, sampling=sampling, stop_tokens=stop_tokens))
        return [np.concatenate([part[row] for part in parts]) for row in range(len(prompts))]

    def stream(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int] | np.ndarray],
        num_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
    ) -> Stream:
        """Returns an iterator over lists of new tokens, one array per row, `chunk` tokens at a time."""
        rows = [np.asarray(prompt) for prompt in prompts]
        check_prompts(rows, num_tokens, self.sizes.length, self.sizes.model.vocab_size)
        check_room(self.sizes.model, len(rows), self.sizes.length, self.precision, weights.spread)
        stops = np.asarray(stop_tokens, np.int32)
        return Stream(self.sizes, self.precision, weights, rows, num_tokens, sampling or Sampling(), stops)

    def score(self, weights: Weights, rows: Sequence[Sequence[int] | np.ndarray]) -> list[Scores]:
        """Returns the log probability of each token of each row after the first.

        Example:
            >>> from meshwright.models import Decoder
            >>> model = Decoder.named("tiny")
            >>> generate = make_generator(model, length=16)
            >>> weights = generate.load(model.init(jax.random.key(0)))
            >>> generate.score(weights, [[1, 2, 3]])[0].log_probs.shape
            (2,)
        """
        arrays = [np.asarray(row) for row in rows]
        check_prompts(arrays, 0, self.sizes.length, self.sizes.model.vocab_size)
        tokens, lengths = _padded(arrays, self.sizes.length, weights.spread.row_ways)
        found = _score(weights.tree, tokens, lengths, sizes=self.sizes, spread=weights.spread)
        log_probs, likeliest = (np.asarray(x.addressable_data(0)) for x in found)
        counts = [len(row) - 1 for row in arrays]
        return [Scores(log_probs[n, :count], likeliest[n, :count]) for n, count in enumerate(counts)]


class Scores(NamedTuple):
    """The probabilities of a row's tokens after the first."""

    log_probs: np.ndarray
    is_likeliest: np.ndarray
    """Whether greedy generation would give the token."""


class Stream:
    """The tokens of a batch as they are generated: each item has the new tokens of each row, none after its end."""

    def __init__(
        self,
        sizes: _Sizes,
        precision: Precision,
        weights: Weights,
        prompts: list[np.ndarray],
        num_tokens: int,
        sampling: Sampling,
        stop_tokens: np.ndarray,
    ) -> None:
        self.num_rows = len(prompts)
        self._sizes, self._precision, self._weights = sizes, precision, weights
        self._num_tokens, self._stop_tokens = num_tokens, stop_tokens
        tokens, self._lengths = _padded(prompts, sizes.length, weights.spread.row_ways)
        self._tokens = tokens
        self._rooms = rooms_of(sizes.model, len(tokens), sizes.length, precision, weights)
        self._values = sampling.values(sizes.vocab_size)
        self._static: Any = {"sizes": sizes, "mode": sampling.mode, "spread": weights.spread}
        # Rows that only fill up the batch end at once.
        self._ended = np.arange(len(tokens)) >= self.num_rows

    def finish(self, row: int) -> None:
        """Ends a row, e.g. because of a stop string; the stream ends with its last row."""
        self._ended[row] = True

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        waiting = deque[tuple[Any, int]]()
        for chunk in self._chunks():
            waiting.append(chunk)
            if len(waiting) > self._sizes.run_ahead:
                yield self._host(*waiting.popleft())
                if self._ended.all():
                    return
        for chunk in waiting:
            yield self._host(*chunk)

    def _chunks(self) -> Iterator[tuple[Any, int]]:
        """Dispatches a chunk per item: an array of tokens `[B, chunk]`, and how many of its columns are wanted."""
        sizes, tree, shared = self._sizes, self._weights.tree, (self._values, self._stop_tokens)
        longest, padded = int(self._lengths.max()), self._tokens.shape[1]
        # The first chunk follows at once, so that a cache with room for the prompt alone would grow at once as well.
        room = room_for(self._rooms, max(padded, longest + min(sizes.chunk, self._num_tokens)))
        rows, drawn = _start(tree, self._tokens, self._lengths, self._ended, *shared, room=room, **self._static)
        yield drawn, 1
        program = program_of(len(self._tokens), self._weights.spread)
        for done in range(1, self._num_tokens, sizes.chunk):
            steps = min(sizes.chunk, self._num_tokens - done)
            wanted = room_for(self._rooms, longest + done + steps - 1)
            if wanted > room:
                room, layers, rows = wanted, list(rows.cache), rows._replace(cache=())
                targets = cache_shapes(sizes.model, len(self._tokens), room, self._precision)
                rows = rows._replace(cache=grown(layers, targets, spread=self._weights.spread))
            rows, drawn = program(tree, rows, np.int32(steps), self._ended.copy(), *shared, **self._static)
            yield drawn, steps

    def _host(self, drawn: Any, count: int) -> list[np.ndarray]:
        found = np.asarray(drawn.addressable_data(0))[: self.num_rows, :count]
        kept = [row[(row != _NONE) & ~ended] for row, ended in zip(found, self._ended[: self.num_rows], strict=True)]
        for number, row in enumerate(kept):
            self._ended[number] |= bool(np.isin(row[-1:], self._stop_tokens).any())
        return kept


def _padded(rows: list[np.ndarray], length: int, row_ways: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows `[B, S]` with padding at the end, and their lengths."""
    longest = max(map(len, rows))
    # Few different sizes, and so few programs.
    size = min(length, max(_LEAST_PROMPT, 1 << (longest - 1).bit_length()))
    tokens = np.zeros((round_up(len(rows), row_ways), size), np.int32)
    lengths = np.ones(len(tokens), np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], lengths[number] = row, len(row)
    return tokens, lengths


# --- Programs ---


def _under_mesh(function: Any) -> Any:
    """Traces a function under the mesh of its `spread`."""

    @functools.wraps(function)
    def run(*args: Any, spread: Spread, **options: Any) -> Any:
        if spread.mesh is None:
            return function(*args, spread=spread, **options)
        with jax.sharding.use_abstract_mesh(spread.mesh.abstract_mesh):
            return function(*args, spread=spread, **options)

    return run


@functools.partial(jax.jit, static_argnames=("room", "sizes", "mode", "spread"))
@_under_mesh
def _start(
    weights: PyTree,
    tokens: Any,
    lengths: Any,
    ended: Any,
    values: Any,
    stop_tokens: Any,
    *,
    room: int | None = None,
    sizes: _Sizes,
    mode: Mode,
    spread: Spread,
) -> tuple[_Rows, Any]:
    """Reads the prompts and draws the first token of each row."""
    model = sizes.model
    h, cache = read_prompts(model, weights, tokens, lengths, length=sizes.length, spread=spread, room=room)
    last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)
    logits = spread.everywhere(logits_of(model, weights, last, spread=spread)[:, 0, : sizes.vocab_size])
    token = draw(logits, lengths, mode, values)
    done = ended | jnp.isin(token, stop_tokens)
    drawn = jnp.where(ended, _NONE, token)[:, None]
    return _Rows(cache, *map(spread.everywhere, (token, lengths, done))), spread.everywhere(drawn)


@_under_mesh
def _generate_chunk(
    weights: PyTree,
    rows: _Rows,
    steps: Any,
    ended: Any,
    values: Any,
    stop_tokens: Any,
    *,
    sizes: _Sizes,
    mode: Mode,
    spread: Spread,
) -> tuple[_Rows, Any]:
    """Generates a chunk of tokens per row; unless it runs ahead, only `steps`, and fewer if all rows end."""
    model = sizes.model
    shared = model.prepare(jnp.arange(sizes.length)[None])

    def is_running(carry: Any) -> Any:
        step, rows, _ = carry
        return (step < steps) & ~rows.done.all()

    def one_token(carry: Any) -> Any:
        step, rows, drawn = carry
        h, cache = read_tokens(model, weights, rows.token, rows.place, rows.cache, shared, spread=spread)
        logits = spread.everywhere(logits_of(model, weights, h, spread=spread)[:, 0, : sizes.vocab_size])
        # A row that ended continues to write tokens, up to the last place; nothing reads them.
        place = jnp.minimum(rows.place + 1, sizes.length - 1)
        token = draw(logits, place, mode, values)
        drawn = jax.lax.dynamic_update_index_in_dim(drawn, jnp.where(rows.done, _NONE, token), step, axis=1)
        done = rows.done | jnp.isin(token, stop_tokens)
        return step + 1, _Rows(cache, *map(spread.everywhere, (token, place, done))), spread.everywhere(drawn)

    drawn = jnp.full((rows.token.shape[0], sizes.chunk), _NONE, jnp.int32)
    carry = jnp.int32(0), rows._replace(done=rows.done | ended), spread.everywhere(drawn)
    if sizes.run_ahead:
        # XLA knows the number of steps; otherwise a GPU stops after each of them, for the host to read the condition.
        _, rows, drawn = jax.lax.fori_loop(0, sizes.chunk, lambda _, carry: one_token(carry), carry)
    else:
        _, rows, drawn = jax.lax.while_loop(is_running, one_token, carry)
    return rows, drawn


_jit = functools.partial(
    jax.jit, _generate_chunk, static_argnames=("sizes", "mode", "spread"), donate_argnames=("rows",)
)
_continue, _continue_one = _jit(compiler_options=_OPTIONS), _jit(compiler_options=_OPTIONS | _ONE_ROW)


def program_of(num_rows: int, spread: Spread) -> Any:
    """Returns the program that generates a chunk of tokens for each row of a batch."""
    return _continue_one if num_rows == spread.row_ways else _continue


@functools.partial(jax.jit, static_argnames=("sizes", "spread"))
@_under_mesh
def _score(weights: PyTree, tokens: Any, lengths: Any, *, sizes: _Sizes, spread: Spread) -> tuple[Any, Any]:
    """Returns log probabilities `[B, S - 1]` of the tokens after the first, and whether they are the most likely."""
    h, _ = read_prompts(sizes.model, weights, tokens, lengths, length=sizes.length, spread=spread)

    def scores(h: Any, targets: Any) -> tuple[Any, Any]:
        logits = logits_of(sizes.model, weights, h, spread=spread)[..., : sizes.vocab_size]
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        found = chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == targets
        return tuple(map(spread.everywhere, found))

    h, targets = h[:, :-1], tokens[:, 1:]
    parts = [slice(start, start + _SCORED) for start in range(0, targets.shape[1], _SCORED)]
    found = [scores(h[:, part], targets[:, part]) for part in parts]
    log_probs, likeliest = (jnp.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    return log_probs, likeliest
