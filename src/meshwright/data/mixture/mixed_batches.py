"""Batches of a weighted mixture: each source keeps its own order and epochs, and its position is part of the state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshwright.data.batches import RowPlacer, RowSource, read_row
from meshwright.data.mixture.quota_schedule import QuotaSchedule
from meshwright.data.mixture.weights import mixture_weights, shares
from meshwright.data.stream import BatchStream, EndOfData, PlacedBatch, Shardings, Writer, checked_seed, start_of
from meshwright.errors import DataError

FINGERPRINT = "mixture"
"""Fingerprint of every mixture: the state has those of the sources, which may be added and dropped."""
SOURCE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class MixtureState:
    """The position of a mixture, as its saved state holds it under `mixture`.

    Attributes:
        weights: the weights as whole numbers.
        since: the row at which these weights began.
        taken_since: rows of each source taken before that row.
        taken: rows of each source taken in total, also of sources that were dropped.
        tokens: targets of each source in these rows.
        sources: number of rows and fingerprint of each source.
    """

    weights: Mapping[str, int]
    since: int
    taken_since: Mapping[str, int]
    taken: Mapping[str, int]
    tokens: Mapping[str, int]
    sources: Mapping[str, Any]

    @classmethod
    def begin(
        cls, weights: Mapping[str, int], rows: Mapping[str, RowSource], saved: Mapping[str, Any] | None, row: int
    ) -> MixtureState:
        """Returns the position to start from: the saved one, or a new beginning of other weights at the same row."""
        facts: dict[str, Any] = {
            name: {"rows": len(source), "fingerprint": source.fingerprint} for name, source in rows.items()
        }
        zeros = dict.fromkeys(weights, 0)
        if saved is None:
            return cls(weights, row, zeros, zeros, zeros, facts)
        old = cls(**saved)
        for name, fact in facts.items():
            if old.sources.get(name, fact) != fact:
                raise DataError(
                    f"the data of the source `{name}` changed since the state was saved: {fact['rows']} rows with "
                    f"fingerprint {fact['fingerprint'][:12]} instead of {old.sources[name]['rows']} with "
                    f"{old.sources[name]['fingerprint'][:12]}.",
                    hint="resume with the same texts, tokenizer, row length and validation share, or give the new data "
                    "a new name.",
                )
        taken, tokens = ({**zeros, **counts} for counts in (old.taken, old.tokens))
        facts = {**old.sources, **facts}
        if dict(old.weights) == dict(weights):
            return cls(weights, old.since, old.taken_since, taken, tokens, facts)
        return cls(weights, row, {name: taken[name] for name in weights}, taken, tokens, facts)


class MixedBatches(BatchStream):
    """Batches of several sources in given proportions.

    After any number of rows, the rows of each source are its share of them, rounded up or down. Each source is shuffled
    by the seed, its name and its own epoch, and starts its next epoch when it ends. A run that resumes from `state` may
    change the weights, add sources and drop some: every source continues at its own position.

    Args:
        sources: rows by name, with equal shapes in all sources.
        weights: weight of each source (default: by `temperature`); see `mixture_weights`.
        temperature: weights by size; see `mixture_weights`.
        epochs: end before a source starts more than this number of epochs (default: repeat forever).
        label: name of an array to add to the rows, which must be dicts: booleans with one entry per source, in the
            order of their names, True for the source of the row (default: none).

    See `Batches` for the other arguments.

    Example:
        >>> import meshwright as mw
        >>> from meshwright.data import Rows, Tokens
        >>> web, code = (Rows(Tokens.of([[*range(1, size), 0]]), 9) for size in (400, 100))
        >>> whole = jax.NamedSharding(mw.create_mesh("dp:8"), mw.P("dp"))
        >>> batches = MixedBatches(
        ...     {"web": web, "code": code},
        ...     {"web": 3, "code": 1},
        ...     batch_size=8,
        ...     shardings=lambda batch: jax.tree.map(lambda _: whole, batch),
        ...     seed=1,
        ... )
        >>> next(batches).tokens, batches.state["mixture"]["taken"]
        ({'code': 18, 'web': 54}, {'code': 2, 'web': 6})
        >>> batches.close()
    """

    def __init__(
        self,
        sources: Mapping[str, RowSource],
        weights: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        batch_size: int,
        shardings: Shardings,
        seed: int,
        epochs: int | None = None,
        prefetch: int = 2,
        ledger: Writer | None = None,
        first_step: int = 1,
        state: Mapping[str, Any] | None = None,
        label: str | None = None,
    ) -> None:
        whole = mixture_weights({name: len(rows) for name, rows in sources.items()}, weights, temperature=temperature)
        for name in sources:
            if not SOURCE_NAME.fullmatch(name):
                raise DataError(f"a source is called {name!r}.", hint="use letters, digits, `_`, `-` and `.`.")
        seed = checked_seed(seed, batch_size=batch_size, epochs=epochs)
        if state is not None and "mixture" not in state:
            raise DataError(
                "the state was saved by a run with one source, not by a mixture.",
                hint="start a new run; name a single source, as in --data web=PATH, to add others later.",
            )
        start = 0 if state is None else start_of(state, seed=seed, fingerprint=FINGERPRINT)
        rows = {name: sources[name] for name in whole}
        shared: Any = {"batch_size": batch_size, "shardings": shardings, "seed": seed, "epochs": epochs, "label": label}
        self.weights = shares(whole)
        self._mixture = MixtureState.begin(whole, rows, None if state is None else state["mixture"], start)
        super().__init__(
            _Loader(rows, self._mixture, start, **shared),
            batch_size=batch_size,
            start_row=start,
            seed=seed,
            fingerprint=FINGERPRINT,
            prefetch=prefetch,
            ledger=ledger,
            first_step=first_step,
        )

    @property
    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out, as JSON values."""
        return {**super().state, "mixture": dataclasses.asdict(self._mixture)}

    def __next__(self) -> PlacedBatch:
        batch = super().__next__()
        assert batch.place is not None
        tokens = dict(self._mixture.tokens)
        for name, count in (batch.tokens or {}).items():
            tokens[name] += count
        taken = {**self._mixture.taken, **batch.place["mixture"]}
        self._mixture = dataclasses.replace(self._mixture, taken=taken, tokens=tokens)
        return batch


class _Loader:
    """Loads the batch at any row of the mixture."""

    def __init__(
        self,
        sources: Mapping[str, RowSource],
        mixture: MixtureState,
        start: int,
        *,
        batch_size: int,
        shardings: Shardings,
        seed: int,
        epochs: int | None,
        label: str | None,
    ) -> None:
        import grain

        self.names, self.rows, self.epochs = list(sources), list(sources.values()), epochs
        _require_equal_rows(sources)
        self.label = label
        self.placer = RowPlacer(self.rows[0], batch_size, shardings, example=self._labeled(self.rows[0][0], 0))
        self.orders = [
            grain.MapDataset.range(len(rows)).seed(_source_seed(seed, name)).shuffle().repeat(None)
            for name, rows in sources.items()
        ]
        self.schedule = QuotaSchedule(
            [mixture.weights[name] for name in self.names],
            start=start,
            taken=[mixture.taken[name] for name in self.names],
            since=mixture.since,
            taken_since=[mixture.taken_since[name] for name in self.names],
        )

    def __call__(self, first: int) -> PlacedBatch:
        size = self.placer.batch_size
        sources, places, taken = self.schedule.slots(first, size)
        if self.epochs is not None and any(
            count > self.epochs * len(rows) for count, rows in zip(taken, self.rows, strict=True)
        ):
            raise EndOfData
        numbers = [int(self.orders[source][int(place)]) for source, place in zip(sources, places, strict=True)]
        mine = self.placer.numbers
        values = [self._row(int(sources[slot]), numbers[slot], int(places[slot])) for slot in mine]
        batch = self.placer.batch(first, first + mine, [numbers[slot] for slot in mine], values)
        return dataclasses.replace(
            batch,
            place={"mixture": {name: int(count) for name, count in zip(self.names, taken, strict=True)}},
            sources=sources[mine],
            source_positions=places[mine],
            tokens=self._tokens(sources, numbers),
        )

    def _row(self, source: int, number: int, place: int) -> Any:
        rows = self.rows[source]
        return self._labeled(read_row(rows, number, place // len(rows)), source)

    def _labeled(self, row: Any, source: int) -> Any:
        return row if self.label is None else {**row, self.label: np.arange(len(self.names)) == source}

    def _tokens(self, sources: np.ndarray, numbers: list[int]) -> dict[str, int] | None:
        counters = [getattr(rows, "num_targets", None) for rows in self.rows]
        if None in counters:
            return None
        counts = np.zeros(len(self.names), np.int64)
        for source, number in zip(sources, numbers, strict=True):
            counts[source] += counters[source](number)
        return {name: int(count) for name, count in zip(self.names, counts, strict=True)}


def _source_seed(seed: int, name: str) -> int:
    """Returns a seed for one source, so that sources of equal length are not shuffled alike."""
    return int(np.random.SeedSequence([seed, *name.encode()]).generate_state(1)[0])


def _require_equal_rows(sources: Mapping[str, RowSource]) -> None:
    described = {
        name: jax.tree.map(lambda leaf: (np.shape(leaf), str(np.asarray(leaf).dtype)), rows[0])
        for name, rows in sources.items()
    }
    first, *others = described
    for name in others:
        if described[name] != described[first]:
            raise DataError(
                f"rows of the sources `{first}` and `{name}` differ: {described[first]} and {described[name]}.",
                hint="give all sources the same arrays and row length.",
            )
