"""Partition rules as data: `(regex, PartitionSpec)` pairs, checked once, written with mesh axes or logical names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, did_you_mean
from meshwright.mesh.build import AnyMesh
from meshwright.rules.patterns import Pattern, compile_pattern
from meshwright.specs import check_spec_type, dim_axes, format_spec, keep_axes


@dataclass(frozen=True)
class Rule:
    """One pattern with its spec; `logical` keeps the names it was written in, where it was."""

    pattern: Pattern
    spec: P
    logical: tuple[Any, ...] | None = None

    def __str__(self) -> str:
        return f"{self.pattern.text!r} -> {format_spec(self.spec)}"


@dataclass(frozen=True, init=False)
class Rules(Sequence[tuple[str, P]]):
    """An ordered, checked set of partition rules.

    `optional_axes` names the axes that a mesh may lack: they are then dropped from the specs. Any other axis that a
    mesh does not have is an error.

    Example:
        >>> rules = Rules([("attn/(q|k|v)/kernel", P("fsdp", "tp")), ("norm", P())], optional_axes=("tp",))
        >>> len(rules), rules[1]
        (2, ('norm', P()))
    """

    entries: tuple[Rule, ...]
    optional_axes: tuple[str, ...]

    def __init__(self, rules: Iterable[Any] = (), *, optional_axes: Sequence[str] = ()) -> None:
        if isinstance(optional_axes, str):
            optional_axes = (optional_axes,)
        entries = tuple(_read_rule(index, rule) for index, rule in enumerate(rules))
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "optional_axes", tuple(optional_axes))

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Rules(self.entries[index], optional_axes=self.optional_axes)
        return self.entries[index].pattern.text, self.entries[index].spec

    def __iter__(self) -> Iterator[tuple[str, P]]:
        return ((rule.pattern.text, rule.spec) for rule in self.entries)

    def on(self, mesh: AnyMesh) -> Rules:
        """Returns the rules as they read on this mesh: without the optional axes it lacks."""
        missing = [axis for axis in self.optional_axes if axis not in mesh.axis_names]
        if not missing:
            return self
        entries = [
            Rule(rule.pattern, keep_axes(rule.spec, lambda axis: axis not in missing), rule.logical)
            for rule in self.entries
        ]
        return Rules(entries, optional_axes=self.optional_axes)


def as_rules(rules: Any) -> Rules:
    """Returns `rules` as `Rules`, checking them if they are still plain pairs."""
    return rules if isinstance(rules, Rules) else Rules(rules)


def logical_rules(
    rules: Iterable[tuple[str, Sequence[str | None]]],
    mapping: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    optional_axes: Sequence[str] = (),
) -> Rules:
    """Builds rules from names of what dims mean, and one mapping of these names to mesh axes.

    Example:
        >>> logical_rules([("mlp/up", ("embed", "mlp"))], {"embed": "fsdp", "mlp": ("tp", "sp")})[0]
        ('mlp/up', P('fsdp', ('tp', 'sp')))
    """
    known = dict(mapping)
    entries = []
    for index, (text, names) in enumerate(rules):
        where = f"rule {index} `{text}`"
        if isinstance(names, (str, P)) or not isinstance(names, Sequence):
            raise RuleError(f"{where}: {names!r} must be a tuple of logical names.", hint='write ("embed", "mlp").')
        owner: dict[str, str] = {}
        for name in names:
            if name is None:
                continue
            if name not in known:
                raise RuleError(
                    f"{where}: logical axis {name!r} is not in the mapping ({', '.join(known)}).",
                    hint=did_you_mean(name, known) or f"add {name!r}: None to leave such dims whole.",
                )
            for axis in dim_axes(known[name]):
                if axis in owner:
                    raise RuleError(
                        f"{where}: logical axes {owner[axis]!r} and {name!r} both map to mesh axis {axis!r}.",
                        hint="map one of them to another axis, or to None.",
                    )
                owner[axis] = name
        spec = P(*(None if name is None else known[name] for name in names))
        entries.append(Rule(compile_pattern(text), check_spec_type(spec, where=where), tuple(names)))
    return Rules(entries, optional_axes=optional_axes)


def _read_rule(index: int, rule: Any) -> Rule:
    if isinstance(rule, Rule):
        return rule
    try:
        text, spec = rule
    except (TypeError, ValueError):
        raise RuleError(f"rule {index}: {rule!r} is not a (regex, PartitionSpec) pair.") from None
    if isinstance(text, re.Pattern):
        if isinstance(text.pattern, str) and text.flags != re.compile(text.pattern).flags:
            raise RuleError(
                f"rule {index}: the flags of {text!r} would be lost.",
                hint="write them into the pattern, for example `(?i)kernel`.",
            )
        text = text.pattern
    if not isinstance(text, str):
        raise RuleError(f"rule {index}: the pattern {text!r} is not a string.")
    try:
        pattern = compile_pattern(text)
    except RuleError as error:
        raise RuleError(f"rule {index}: {error}") from None
    return Rule(pattern, check_spec_type(spec, where=f"rule {index} `{text}`"))
