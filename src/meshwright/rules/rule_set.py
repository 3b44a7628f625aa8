"""Partition rules: `(regex, PartitionSpec)` pairs, written with mesh axes or logical names.

Rules come from users, so `compile_pattern` rejects a regex that `re` could search for hours.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, did_you_mean
from meshwright.mesh.current import AnyMesh
from meshwright.specs import check_spec_type, dim_axes, format_spec, keep_axes


@dataclass(frozen=True)
class Rule:
    """One pattern with its spec, the logical names it was written in, and its source if it is not the user's.

    `spread` is an axis that splits the first dim that it divides as well, after the axes of the spec.
    """

    pattern: Pattern
    spec: P
    logical: tuple[Any, ...] | None = None
    source: str = ""
    spread: str | None = None

    def __str__(self) -> str:
        also = f", spread over {self.spread!r}" if self.spread else ""
        return f"{self.pattern.text!r} -> {format_spec(self.spec)}{also}"


@dataclass(frozen=True, init=False)
class Rules(Sequence[tuple[str, P]]):
    """An ordered set of partition rules.

    `optional_axes` are dropped from the specs if the mesh lacks them; any other axis that the mesh lacks is an error.

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
        given = rules.entries if isinstance(rules, Rules) else rules
        entries = tuple(_read_rule(index, rule) for index, rule in enumerate(given))
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
        """Returns the rules without the optional axes that the mesh lacks."""
        missing = [axis for axis in self.optional_axes if axis not in mesh.axis_names]
        if not missing:
            return self
        entries = [replace(rule, spec=keep_axes(rule.spec, lambda axis: axis not in missing)) for rule in self.entries]
        return Rules(entries, optional_axes=self.optional_axes)


def as_rules(rules: Any) -> Rules:
    """Returns `rules` as `Rules`, and checks them if they are plain pairs.

    Example:
        >>> rules = as_rules([("kernel", P("fsdp", "tp")), (".*", P())])
        >>> len(rules), as_rules(rules) is rules
        (2, True)
    """
    return rules if isinstance(rules, Rules) else Rules(rules)


def logical_rules(
    rules: Iterable[tuple[str, Sequence[str | None]]],
    mapping: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    optional_axes: Sequence[str] = (),
) -> Rules:
    """Builds rules from logical names for the dims and a mapping from these names to mesh axes.

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
                    f"{where}: logical name {name!r} is not in the mapping ({', '.join(known)}).",
                    hint=did_you_mean(name, known) or f"add {name!r}: None to replicate these dims.",
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
                hint="put them in the pattern, for example `(?i)kernel`.",
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

MAX_STEPS = 10**9  # upper bound on the steps of one search, which is a second or two

# The check reduces a pattern to literal text and these marks: any character, a loop, a choice, a look-around group.
_ANY, _LOOP, _CHOICE, _LOOK = "\ue000", "\ue001", "\ue002", "\ue003"
_MARKS = _ANY + _LOOP + _CHOICE + _LOOK
_SYNTAX = (
    rf"\\(?![()|*+?{{{_MARKS}])(?P<literal>[\W_])"
    rf"|(?P<any>[.^${_MARKS}]|\(\?P=\w+\)|\[\^?\]?(?:\\.|[^]\\])*\]"
    r"|\\(?:\d{1,3}|x..|u.{4}|U.{8}|N\{[^}]*\}|.))"
    r"|(?P<look>\(\?<?[=!])"
    r"|(?P<group>\(\?(?:P<\w+>|[:>]|\(\w+\)|[a-wyzA-Z-]+:))"
    r"|(?P<nothing>\(\?(?:#[^)]*|[a-zA-Z-]+)\))"  # comments, and flags for the whole pattern
)
_REDUCED = {"any": _ANY, "look": f"({_LOOK}", "group": "(", "nothing": "", "space": ""}
_REPEAT = r"(?:[*+?]|\{\d+\}|\{\d*,\d*\})[+?]?"
_GROUP = re.compile(rf"\(([^()]*)\)({_REPEAT})?")
_REPEATED = re.compile(rf"(\){_REPEAT})|([^()|])({_REPEAT})")  # the end of a group, or an atom


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: `search` is `re.search`, but raises if searching a name would take too long.

    `literal` is text that every match contains (possibly empty), for a fast first test.
    """

    text: str
    literal: str
    search: Callable[[str], re.Match[str] | None] = field(compare=False, repr=False)

    def matches(self, name: str) -> bool:
        return self.literal in name and bool(self.search(name))


@functools.lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Compiles a pattern; raises if it repeats a group that can match the same text in several ways, like `(a+)+`.

    `re` backtracks: such a pattern takes seconds on 26 characters, and twice as long for each further one.

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
    syntax = rf"{_SYNTAX}|(?P<space>\s|#[^\n]*)" if regex.flags & re.VERBOSE else _SYNTAX
    plain = re.sub(syntax, lambda found: found["literal"] or _REDUCED[str(found.lastgroup)], text, flags=re.DOTALL)
    if "(?" in plain:
        raise _refusal(text, "cannot check `(?x:`; put `(?x)` at the start")
    top = grouped = _REPEATED.sub(lambda found: found[1] or f"({found[2]}){found[3]}", plain)
    while "(" in top:
        top = _GROUP.sub(_ANY, top)
    literal = "" if "|" in top or regex.flags & re.IGNORECASE else max(re.split(f"[{_MARKS}]", top), key=len)
    branches = [
        # A loop at the very end never has to backtrack.
        (2 ** branch.count(_CHOICE), re.findall(f"{_LOOP}([^{_MARKS}]*)", branch.rstrip(_LOOP)))
        for branch in _without_groups(text, grouped).split("|")
    ]
    if sum(choices for choices, _ in branches) > MAX_STEPS:
        raise _refusal(text, "it has too many optional parts")
    if sum(choices * 200 ** len(loops) for choices, loops in branches) * 200**2 <= MAX_STEPS:
        return Pattern(text, literal, regex.search)

    def search(name: str) -> re.Match[str] | None:
        # From each start, `re` returns to a loop once for each place in the name where the text after the loop occurs.
        num_ways = sum(
            choices * math.prod(len(re.findall(f"(?i)(?={re.escape(after)})", name)) or 1 for after in loops)
            for choices, loops in branches
        )
        if num_ways * len(name) ** 2 > MAX_STEPS:
            raise _refusal(text, f"on `{name[:200]}` its loops can end in too many places")
        return regex.search(name)

    return Pattern(text, literal, search)


def _without_groups(text: str, grouped: str) -> str:
    """Replaces each group by its contents; raises if a repeated group can match the same text in several ways."""
    while found := _GROUP.search(grouped):
        body, repeat = found[1], found[2] or ""
        if body.startswith(_LOOK):
            body = re.sub(f"[^{_MARKS}|]", _ANY, body)
        words = body.split("|")
        choices = _CHOICE * (len(words) - 1).bit_length()
        body = choices + body.replace("|", _ANY)
        if repeat.startswith("?"):
            body = _CHOICE + body
        elif re.match(r"\{[1-4]\}", repeat) and len(body) <= 100:  # the limit keeps nested repeats small
            body *= int(repeat[1])
        elif repeat:
            if (_LOOP in body or _CHOICE in body) and not _prefix_free(words):
                raise _refusal(text, f"a group with repetition or alternatives inside is repeated (`{repeat}`)")
            at_least_one = not repeat.startswith(("*", "{0", "{,"))
            is_loop = repeat[0] != "{" or "," in repeat
            body = choices + _ANY * at_least_one + _LOOP * is_loop
        grouped = grouped[: found.start()] + body + grouped[found.end() :]
    return grouped


def _prefix_free(words: Sequence[str]) -> bool:
    """Returns whether no literal starts another (ignoring case), so that a loop over them never has a choice."""
    words = sorted(word.lower() for word in words)
    return all(map(str.isascii, words)) and not any(b.startswith(a) for a, b in itertools.pairwise(words))


def _refusal(text: str, why: str) -> RuleError:
    return RuleError(
        f"`{text}` could take exponential time to match: {why}.",
        hint="remove the nested repetition, for example `(a+)+` -> `a+`, or write two simpler rules.",
    )
