"""The table of published runs, as it is written in `published.toml`; `published.py` explains and plans them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from meshwright.plan.target import parse_target

_SAME_CHIP = {"a100-40": "a100"}


@functools.cache
def published_table() -> dict[str, Any]:
    """Returns the models, sources and runs of `published.toml`."""
    return tomllib.loads(resources.files("meshwright.plan").joinpath("published.toml").read_text(encoding="utf-8"))


def chip_with_runs(kind: str) -> str:
    """Returns the chip whose runs stand for a kind of machine; both sizes of an A100 count as one.

    Example:
        >>> chip_with_runs("a100-40"), chip_with_runs("h100")
        ('a100', 'h100')
    """
    return _SAME_CHIP.get(kind, kind)


def why_only_compared(row: Mapping[str, Any]) -> str:
    """Returns why a run neither fits rates nor checks them, or "" if it does; see `PublishedRun.compared`.

    Example:
        >>> why_only_compared({"mesh": "dp:2,tp:4", "target": "h100:1x8"})
        'tp on GPUs'
    """
    if "pipeline" in row:
        return "pipeline"
    if "tp:" in row["mesh"] and parse_target(row["target"]).platform == "gpu":
        return "tp on GPUs"
    return "superseded" if row.get("superseded") else ""
