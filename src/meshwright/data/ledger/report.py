"""What a ledger says about a run, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.errors import DataError


@dataclass(frozen=True)
class LedgerReport:
    """What a ledger says. `problems` is empty where every row was seen once in each epoch.

    Attributes:
        num_steps: how many steps count: those of the latest start that did them.
        num_starts: how often the run was started.
        num_rows: how many rows these steps had.
        num_redone: how many steps were done more than once, after a kill.
        rows_per_epoch: how many rows the data has; None for a job that draws its batches.
        epochs: for each epoch that was begun, how many of its rows were seen.
        notes: what is worth knowing and no problem: steps that a kill left unfinished, rows passed over on purpose.
    """

    num_steps: int
    num_starts: int
    num_rows: int
    num_redone: int
    rows_per_epoch: int | None
    epochs: list[int]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def require(self) -> LedgerReport:
        """Returns the report; raises `DataError` with it where something is wrong."""
        if self.problems:
            raise DataError(str(self))
        return self

    def __str__(self) -> str:
        size = "" if self.rows_per_epoch is None else f", of {self.rows_per_epoch:,} in an epoch"
        redone = f" ({self.num_redone} done again)" if self.num_redone else ""
        head = (
            f"{'fine' if self.ok else 'WRONG'}: {_count(self.num_steps, 'step')}{redone}, "
            f"{_count(self.num_starts, 'start')}; {_count(self.num_rows, 'row')}{size}"
        )
        once = ", each once" if self.ok else ""
        epochs = [f"epoch {n}: {seen:,} of {self.rows_per_epoch:,} rows{once}" for n, seen in enumerate(self.epochs)]
        return "\n".join(
            [head, *epochs, *(f"note: {note}" for note in self.notes), *(f"problem: {told}" for told in self.problems)]
        )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
