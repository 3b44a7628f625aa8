"""The settings of LoRA adapters, as `--lora` writes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from meshwright.errors import ConfigError, did_you_mean
from meshwright.parallel.lora.low_rank import Adapters
from meshwright.rules.rule_set import compile_pattern
from meshwright.train.fp8_scaling import PROJECTIONS

Base = Literal["bfloat16", "int8", "nf4"]


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters of some matrices; see `meshwright.train.fine_tuning.lora`.

    Args:
        rank: rank of the change of each matrix.
        alpha: the change is `alpha / rank * A @ B`.
        targets: regex of the matrices (default: the projections of `Decoder` and `XLSTM`).
        dropout: probability of dropping an input of an adapter in training.
        base: storage of frozen matrices: "bfloat16", or "int8" or "nf4" for the targets, with other frozen matrices in
            bfloat16 (default: the precision of the step).
        block: number of inputs that share a scale in int8 and nf4.

    Example:
        >>> LoraSettings.parse("rank=8,targets=attn/(q|v)$").scale
        4.0
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str = PROJECTIONS
    dropout: float = 0.0
    base: Base | None = None
    block: int = 64

    def __post_init__(self) -> None:
        for name in ("rank", "block"):
            count: Any = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(
                    f"lora: {name} must be a positive whole number; got {count!r}.",
                    hint=f"try {name}={type(self).__dataclass_fields__[name].default}.",
                )
        alpha: Any = self.alpha
        if not (isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0):
            raise ConfigError(f"lora: alpha must be above 0; got {alpha!r}.", hint="try alpha=32.")
        dropout: Any = self.dropout
        if not (isinstance(dropout, int | float) and 0 <= dropout < 1):
            raise ConfigError(f"lora: dropout must be at least 0 and below 1; got {dropout!r}.", hint="try 0.05.")
        if self.base is not None and self.base not in get_args(Base):
            known = get_args(Base)
            hint = did_you_mean(str(self.base), known) or f"use one of: {', '.join(known)}."
            raise ConfigError(f"lora: unknown base {self.base!r}.", hint=hint)
        compile_pattern(self.targets)

    @classmethod
    def parse(cls, text: str) -> LoraSettings:
        """Returns the settings in a text such as "rank=16,alpha=32,targets=attn/(q|v)$,base=int8".

        Example:
            >>> LoraSettings.parse("rank=4,alpha=8,base=nf4").base
            'nf4'
            >>> LoraSettings.parse("rnk=4")
            Traceback (most recent call last):
            meshwright.errors.ConfigError: --lora has no setting 'rnk'.
            hint: did you mean 'rank'?
        """
        names = [item.name for item in fields(cls)]
        found: dict[str, Any] = {}
        # A regex may hold commas, so a setting ends only before the name of another.
        for part in re.split(rf",(?=\s*(?:{'|'.join(names)})\s*=)", text):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in names:
                hint = did_you_mean(name, names) or "write rank=16,alpha=32,targets=REGEX,dropout=0,base=int8."
                raise ConfigError(f"--lora has no setting {name!r}.", hint=hint)
            if name in found:
                raise ConfigError(f"--lora sets {name} twice.", hint="leave one of them out.")
            found[name] = _number(name, value) if name in ("rank", "alpha", "dropout", "block") else value
        return cls(**found)

    @property
    def scale(self) -> float:
        """Factor of `A @ B`."""
        return self.alpha / self.rank

    @property
    def adapters(self) -> Adapters:
        """The settings that a loss needs."""
        return Adapters(self.scale, self.dropout)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if name in ("rank", "block") else float(text)
    except ValueError:
        raise ConfigError(f"--lora: {name}={text!r} is not a number.", hint="write e.g. rank=16,alpha=32.") from None
