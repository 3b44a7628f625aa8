"""The options of `meshwright train` that choose which parameters are trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdaptOptions:
    """Fine-tuning: parameters to train, and their average."""

    freeze: tuple[str, ...] = ()
    """Regexes of parameters to freeze: no gradient, no optimizer state, no communication."""
    train: tuple[str, ...] = ()
    """Regexes; if given, freeze all parameters without a match."""
    lora: str | None = None
    """Train low-rank adapters, e.g. rank=16,alpha=32,targets=REGEX,dropout=0,base=int8 (default: no adapters)."""
    ema: float | None = None
    """Decay of a moving average of the parameters, e.g. 0.999 (default: no average)."""
    eval_ema: bool = False
    """Evaluate the moving average instead of the parameters."""
