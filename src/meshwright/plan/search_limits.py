"""Limits on the candidates of a search, and their text form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from meshwright.errors import ConfigError, MeshwrightError, did_you_mean
from meshwright.parallel.pipeline.named_schedules import SCHEDULE_NAMES
from meshwright.plan.costs.job_costs import REMATS

AXES = ("dp", "fsdp", "pp", "tp")
SYNCS = ("hybrid", "once")
MINIBATCHES = (1, 2, 4, 8, 16, 32)
PIPELINES = ("gpipe", "circular", "1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that a search tries, beside the job's own with its number of microbatches."""
MICROBATCHES = (2, 4, 8, 16, 32)
"""Numbers of microbatches that a search tries for them, per stage."""
MOST_STAGES = 16
"""The longest pipelines for which a search tries them."""
_TERM = re.compile(r"(?P<name>[a-z_]+)\s*(?P<sign><=|>=|=|<|>)\s*(?P<value>[^,<>=]+)")
# Limits on several names need commas between them: "tp<=8 pp=1" is two.
_NEXT_TERM = re.compile(r"\s+(?=[a-z_]+\s*(?:<=|>=|=|<|>))")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}


@dataclass(frozen=True)
class Constraints:
    """Limits on the candidates of a search; made by `parse_constraints`.

    Args:
        limits: (comparison, number) pairs for mesh axes, `minibatches` and `microbatches`.
        choices: allowed values of `remat`, `sync` and `pipeline`.
        batch_tokens, rows: the batch size; if both are None, the job's.
    """

    limits: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    batch_tokens: int | None = None
    rows: int | None = None

    @property
    def wants_pipelines(self) -> bool:
        """Whether a schedule or a number of microbatches is asked for, which only pipelines have."""
        return "pipeline" in self.choices or "microbatches" in self.limits

    def allows(self, name: str, value: int) -> bool:
        compare = {"<=": int.__le__, ">=": int.__ge__, "=": int.__eq__, "<": int.__lt__, ">": int.__gt__}
        return all(compare[sign](value, number) for sign, number in self.limits.get(name, ()))

    def words(self, name: str) -> str:
        """Returns the limits of an axis or of `minibatches` as they were written."""
        return ", ".join(f"{name}{sign}{number}" for sign, number in self.limits[name])


def parse_constraints(text: str) -> Constraints:
    """Parses constraints, separated by commas or spaces: `tp<=8`, `pp=1`, `batch=4M tokens`, `remat=full|dots`.

    Example:
        >>> parse_constraints("tp<=8, batch=4M tokens, remat=full|dots").batch_tokens
        4000000
        >>> parse_constraints("tpp<=8")
        Traceback (most recent call last):
        meshwright.errors.MeshwrightError: cannot parse the constraint 'tpp<=8'.
        hint: did you mean 'tp'? Otherwise constrain one of dp, fsdp, pp, tp, ...
    """
    limits: dict[str, list[tuple[str, int]]] = {}
    choices: dict[str, tuple[str, ...]] = {}
    batch = tokens = rows = None
    known = (*AXES, "minibatches", "microbatches", "remat", "sync", "pipeline", "batch")
    for part in filter(None, (part.strip() for whole in text.split(",") for part in _NEXT_TERM.split(whole))):
        match = _TERM.fullmatch(part.replace("==", "=", 1))
        if match is None and re.match(r"[a-z_]+\s*(=[<>]|!=)", part):
            raise MeshwrightError(
                f"cannot parse the constraint {part!r}.", hint="compare with one of <=, >=, =, < and >, e.g. tp<=8."
            )
        if match is None or match["name"] not in known:
            names = f"constrain one of {', '.join(known)}, e.g. tp<=8."
            close = did_you_mean(match["name"] if match else part, known)
            hint = f"{close} Otherwise {names}" if close else names
            raise MeshwrightError(f"cannot parse the constraint {part!r}.", hint=hint)
        name, sign, value = match["name"], match["sign"], match["value"].strip()
        if name in ("remat", "sync", "pipeline"):
            allowed = {"remat": REMATS, "sync": (*SYNCS, "every"), "pipeline": SCHEDULE_NAMES}[name]
            chosen = tuple(word.strip() for word in value.split("|"))
            bad = [word for word in chosen if word not in allowed]
            if sign != "=" or bad:
                raise MeshwrightError(
                    f"cannot parse the constraint {part!r}.", hint=f"write {name}={'|'.join(allowed)}."
                )
            before = choices.get(name, chosen)
            choices[name] = tuple(word for word in dict.fromkeys(before) if word in chosen)
            if not choices[name]:
                hint = f"write {name}={'|'.join((*before, *chosen))} to allow all of them."
                raise ConfigError(f"{name}={'|'.join(before)} and {part} exclude each other.", hint=hint)
        elif name == "batch":
            count, unit = _amount(part, value)
            hint = "write e.g. batch=4M tokens or batch=512 rows."
            if unit is None:
                raise ConfigError(f"{part!r} has no unit.", hint=hint)
            if batch not in (None, (count, unit)):
                raise ConfigError(f"{part!r} is a second batch size.", hint="keep one of them.")
            batch = count, unit
            tokens, rows = (count, None) if unit == "tokens" else (None, count)
            if sign != "=":
                raise MeshwrightError(f"{part!r}: the batch size takes only `=`.", hint=hint)
        else:
            count, unit = _amount(part, value)
            if unit is not None:
                raise ConfigError(f"{part!r} is not a number of {unit}.", hint=f"write e.g. {name}{sign}{count}.")
            limits.setdefault(name, []).append((sign, count))
    return Constraints({name: tuple(pairs) for name, pairs in limits.items()}, choices, tokens, rows)


def _amount(part: str, value: str) -> tuple[int, str | None]:
    """Returns a number and its unit, if it has one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]{0,2}?)\s*(tokens|rows)?", value.lower())
    if match is None or match[2] not in _UNITS:
        raise MeshwrightError(f"{part!r}: {value!r} is not a number.", hint="write e.g. 8, 512 rows or 4M tokens.")
    count = Fraction(match[1]) * _UNITS[match[2]]
    if match[3] and count < 1:
        raise ConfigError(f"{part!r} is an empty batch.", hint="write e.g. batch=4M tokens or batch=512 rows.")
    if count.denominator != 1:
        raise ConfigError(f"{part!r}: {value!r} is not a whole number.", hint=f"write e.g. {max(1, round(count))}.")
    return int(count), match[3]
