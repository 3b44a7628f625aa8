"""How options spell a mixture: `--data web=PATH code=PATH --mixture-weights web=0.7 code=0.3`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError

_PAIR = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*)=(.+)", re.DOTALL)


def parse_sources(data: str | Sequence[str] | None) -> dict[str, str] | None:
    """Returns the path of each source of a mixture by name, or None if `data` is not a mixture.

    A source without a name is called like its file or folder.

    Example:
        >>> parse_sources(("web=/d/web", "/d/code.jsonl"))
        {'web': '/d/web', 'code': '/d/code.jsonl'}
        >>> parse_sources("/d/web")
    """
    if data is None:
        return None
    if isinstance(data, str):
        if _PAIR.fullmatch(data) is None or os.path.exists(data):  # a file may have `=` in its name
            return None
        data = (data,)
    if len(data) == 1 and _PAIR.fullmatch(data[0]) is None:
        return None
    found: dict[str, str] = {}
    for item in data:
        pair = _PAIR.fullmatch(item)
        name, path = (pair[1], pair[2]) if pair is not None else (_name_of(item), item)
        if name in found:
            raise ConfigError(
                f"two sources of the mixture are called `{name}`: {found[name]} and {path}.",
                hint="give each a name of its own: --data NAME=PATH NAME=PATH.",
            )
        found[name] = path
    if not found:
        raise ConfigError("data is an empty list.", hint="name at least one file, or leave data out.")
    return found


def single_path(data: str | Sequence[str] | None) -> str | None:
    """Returns the path of data that is not a mixture."""
    return data if data is None or isinstance(data, str) else data[0]


def _name_of(path: str) -> str:
    name = Path(path.rstrip("/")).name.partition(".")[0]
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"the source {path!r} of the mixture needs a name.", hint=f"write NAME={path}.")
    return name


def parse_weights(weights: Sequence[str]) -> dict[str, str]:
    """Returns the weight of each source by name, as text so that decimals stay exact.

    Example:
        >>> parse_weights(["web=0.7", "code=0.3"])
        {'web': '0.7', 'code': '0.3'}
    """
    found: dict[str, str] = {}
    for item in weights:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"the mixture weight {item!r} names no source.", hint="write NAME=WEIGHT.")
        if name in found:
            raise ConfigError(f"the source `{name}` has two weights.", hint="leave one of them out.")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ConfigError(
                f"the weight of the source `{name}` is {value}.",
                hint="use a finite number above 0; to drop a source, leave it out of --data.",
            )
        found[name] = value.strip()
    return found
