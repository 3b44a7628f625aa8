"""The options, the batch and the model of a plan in words, for titles, tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.pages.numbers import plural
from meshwright.plan.step_setup import plain

_NOT_OPTIONS = ("mesh", "rows")


def assignments(setup: Mapping[str, Any]) -> list[str]:
    """Returns the options of a setup, given as `Setup.to_json` data, as `plan diff` reads them, without mesh and rows.

    >>> assignments({"mesh": "fsdp:8", "rows": 64, "num_minibatches": 2, "pad": ["layers/"]})
    ['num_minibatches=2', 'pad=layers/']
    """
    return [f"{name}={plain(value)}" for name, value in setup.items() if name not in _NOT_OPTIONS]


def option_words(setup: Mapping[str, Any]) -> list[str]:
    """Returns the same options for a sentence or a title.

    >>> option_words({"mesh": "fsdp:8", "remat": "full", "num_minibatches": 2, "pad": ["layers/"], "overlap": False})
    ['remat=full', '2 minibatches', 'pad layers/', 'no overlap']
    """
    return [_words(name, value) for name, value in setup.items() if name not in _NOT_OPTIONS]


def _words(name: str, value: Any) -> str:
    match name:
        case "num_minibatches" | "num_microbatches":
            return plural(value, name.removeprefix("num_").removesuffix("es"))
        case "pad":
            return f"pad {plain(value)}"
        case "zero_axis":
            return f"ZeRO-1 over {value}"
        case "overlap":
            return "overlap" if value else "no overlap"
        case "compiler_options":
            return plain(value)
    return f"{name}={plain(value)}"


def pipeline_words(stages: Mapping[str, Any]) -> list[str]:
    """Returns the microbatches and the schedule of a plan's pipeline; none without one.

    >>> pipeline_words({"count": 4, "microbatches": 8, "schedule": "1f1b"}), pipeline_words({"count": 1})
    (['8 microbatches in 1f1b'], [])
    """
    if stages.get("count", 1) == 1:
        return []
    return [f"{plural(stages['microbatches'], 'microbatch')} in {stages['schedule']}"]


def batch_words(rows: int, tokens: int) -> str:
    """Returns the size of a batch; a job without tokens counts each row as one.

    >>> batch_words(1, 4096), batch_words(64, 64)
    ('1 row, 4,096 tokens per step', '64 rows per step')
    """
    if tokens == rows:
        return f"{plural(rows, 'row')} per step"
    return f"{plural(rows, 'row')}, {plural(tokens, 'token')} per step"


def counted(rows: int, tokens: int) -> str:
    """Returns the noun of what a step trains on: "tokens", or "rows" for a job without tokens."""
    return "rows" if tokens == rows else "tokens"
