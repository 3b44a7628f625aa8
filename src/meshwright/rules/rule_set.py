"""Partition rules as data: `(regex, PartitionSpec)` pairs, checked once, written with mesh axes or logical names.

Rules come from users, so a regex that `re` could search for hours is refused: see `compile_pattern`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, did_you_mean
from meshwright.mesh.build import AnyMesh
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


# --- Regexes that cannot hang ---

# An upper bound on the steps of one search; patterns made to reach it take a second or two.
MAX_STEPS = 10**9

# A pattern is reduced to literal text and these marks: any character, a loop, a choice between two ways to continue,
# and the start of a look-around group.
_ANY, _LOOP, _CHOICE, _LOOK = "\ue000", "\ue001", "\ue002", "\ue003"
_MARKS = _ANY + _LOOP + _CHOICE + _LOOK
_SYNTAX = (
    r"\\(?:\d{1,3}|x..|u.{4}|U.{8}|N\{[^}]*\}|.)"  # escapes
    r"|\[\^?\]?(?:\\.|[^]\\])*\]"  # sets
    r"|\(\?(?:#[^)]*\)|P=\w+\)|P<\w+>|[:>]|<?[=!]|\(\w+\)|[a-zA-Z-]+[:)])"  # beginnings of groups, comments, flags
    rf"|[.^${_MARKS}]"
)
_REPEAT = r"(?:[*+?]|\{\d+\}|\{\d*,\d*\})[+?]?"
_ATOM = re.compile(rf"\){_REPEAT}|[^()|]({_REPEAT})")  # one that is repeated; groups keep theirs
_GROUP = re.compile(rf"\(([^()]*)\)({_REPEAT})?")


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: `search` is `re.search`, or raises if a name would take too long.

    `literal` is text that every match contains (possibly empty): a cheap test that can only say "no".
    """

    text: str
    literal: str
    search: Callable[[str], re.Match[str] | None] = field(compare=False, repr=False)

    def matches(self, name: str) -> bool:
        return self.literal in name and bool(self.search(name))


@functools.lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Compiles a pattern, or raises if it repeats a group that can itself match in several ways, such as `(a+)+`.

    `re` backtracks: such a pattern takes seconds on 26 characters and twice as long for each further one.

    Example:
        >>> compile_pattern("attn/(q|k|v)/kernel").matches("layers/0/attn/q/kernel")
        True
        >>> compile_pattern("attn/(q|k|v)/kernel").literal
        '/kernel'
    """
    try:
        regex = re.compile(text)
    except re.error as error:
        position = min(error.pos or 0, len(text))
        raise RuleError(
            f"`{text}` is not a regular expression: {error.msg}\n    {text}\n    {' ' * position}^",
            hint="to match these characters literally, wrap the text in re.escape(...).",
        ) from None
    except (RecursionError, OverflowError, MemoryError):
        raise RuleError(f"`{text[:80]}` is too large or too deeply nested for a regular expression.") from None
    marked = _ATOM.sub(lambda atom: _freedom(atom[1]) if atom[1] else atom[0], _without_syntax(text, regex.flags))
    top = marked
    while "(" in top:
        top = _GROUP.sub(_ANY, top)
    literal = "" if "|" in top or regex.flags & re.IGNORECASE else max(re.split(f"[{_MARKS}]", top), key=len)
    branches = [
        # A loop at the very end that may match nothing never has to give anything back.
        (2 ** branch.count(_CHOICE), re.findall(f"{_LOOP}([^{_MARKS}]*)", branch.rstrip(_LOOP)))
        for branch in _without_groups(text, marked).split("|")
    ]
    if sum(choices for choices, _ in branches) > MAX_STEPS:
        raise _refusal(text, "it has too many optional parts")
    if sum(choices * 200 ** len(loops) for choices, loops in branches) * 200**2 <= MAX_STEPS:
        return Pattern(text, literal, regex.search)

    def search(name: str) -> re.Match[str] | None:
        # From each start, `re` comes back to a loop once for each place where the text after it lies in the name.
        num_ways = sum(choices * math.prod(_num_places(after, name) for after in loops) for choices, loops in branches)
        if num_ways * len(name) ** 2 > MAX_STEPS:
            raise _refusal(text, f"on `{name[:200]}` its loops can end in too many places")
        return regex.search(name)

    return Pattern(text, literal, search)


def _without_syntax(text: str, flags: int) -> str:
    """Returns the pattern with plain groups only, and a mark for each escape, set and anchor."""

    def replace(found: re.Match[str]) -> str:
        token = found[0]
        if token.startswith("(?"):
            if token.startswith("(?P="):
                return _ANY
            if token[-1] == ")" and token[2] != "(":  # a comment, or flags for the whole pattern
                return ""
            if token[2] not in "P:><=!(" and "x" in token:
                raise _refusal(text, "`(?x:` cannot be checked; put `(?x)` at the start")
            return f"({_LOOK}" if token[-1] in "=!" else "("
        if token[0] == "\\":
            return _ANY if token[1].isalnum() or token[1] in f"()|*+?{{{_MARKS}" else token[1]
        return "" if token[0] == "#" or token.isspace() else _ANY

    syntax = rf"{_SYNTAX}|\s|#[^\n]*" if flags & re.VERBOSE else _SYNTAX
    return re.sub(syntax, replace, text, flags=re.DOTALL)


def _without_groups(text: str, marked: str) -> str:
    """Returns the pattern with each group replaced by its contents, and raises for repeated groups with freedom."""
    while found := _GROUP.search(marked):
        body, repeat = found[1], found[2] or ""
        if body.startswith(_LOOK):
            body = re.sub(f"[^{_MARKS}|]", _ANY, body)
        num_more = body.count("|")
        repeated = repeat and repeat[0] != "?"
        if repeated and (num_more or _LOOP in body or _CHOICE in body):
            raise _refusal(text, f"a group with repetition or alternatives inside is repeated (`{repeat}`)")
        body = _CHOICE * num_more.bit_length() + body.replace("|", _ANY)
        if repeat:
            body = _freedom(repeat) + (_ANY if repeated else body)
        marked = marked[: found.start()] + body + marked[found.end() :]
    return marked


def _freedom(repeat: str) -> str:
    if repeat[0] == "?":
        return _CHOICE
    if repeat[0] == "{" and "," not in repeat:
        return _ANY
    return _LOOP if repeat.startswith(("*", "{0", "{,")) else _ANY + _LOOP


def _num_places(after: str, name: str) -> int:
    # Without regard to case, which can only find more of them.
    return len(re.findall(f"(?i)(?={re.escape(after)})", name)) or 1


def _refusal(text: str, why: str) -> RuleError:
    return RuleError(
        f"`{text}` could take exponential time to match: {why}.",
        hint="remove the nested repetition, for example `(a+)+` -> `a+`, or write two simpler rules.",
    )
