"""Regular expressions that cannot hang.

`re` backtracks: `(a+)+/bias$` on 26 characters takes seconds, on 40 it outlives the run. Rules come from users,
so each pattern is read once with `re`'s own parser. What can only backtrack a little runs on `re`. What might
backtrack a lot runs on a small automaton, whose time is bounded by pattern length x text length. What needs
backtracking to mean anything there (look-around, back-references) is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from meshwright.errors import RuleError

# Backtracking is at worst (text length) ** (loops + 1) x 2 ** choices, so each loop takes from the choices allowed:
# within these limits a 200-character path takes a tenth of a second at the very worst.
MAX_LOOPS = 2
MAX_CHOICES = 8
CHOICES_PER_LOOP = 2
MAX_STATES = 4_000

_ONLY_BACKTRACKING = (
    c.ASSERT,
    c.ASSERT_NOT,
    c.GROUPREF,
    c.GROUPREF_EXISTS,
    c.ATOMIC_GROUP,
    c.POSSESSIVE_REPEAT,
)
_REPEATS = (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT)


@dataclass(frozen=True)
class Pattern:
    """A compiled rule pattern: `search(name)` is truthy where `re.search` would find a match.

    `literal` is text that every match contains (possibly empty): a cheap test that can only say "no".
    """

    text: str
    literal: str
    search: Callable[[str], Any] = field(compare=False, repr=False)
    linear: bool = False

    def matches(self, name: str) -> bool:
        return self.literal in name and bool(self.search(name))

    def matched_part(self, name: str) -> tuple[int, int] | None:
        """Returns where the match lies in `name`; None when unknown (the automaton only answers yes or no)."""
        found = None if self.linear else self.search(name)
        return found.span() if found else None


@functools.lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Compiles a pattern so that matching takes bounded time.

    Example:
        >>> compile_pattern("(a+)+/bias$").matches("a" * 60)
        False
        >>> compile_pattern("attn/(q|k|v)/kernel").literal
        '/kernel'
    """
    try:
        regex = re.compile(text)
        tree = parser.parse(text)
    except re.error as error:
        position = min(error.pos or 0, len(text))
        raise RuleError(
            f"`{text}` is not a regular expression: {error.msg}\n    {text}\n    {' ' * position}^",
            hint="to match these characters literally, wrap the text in re.escape(...).",
        ) from None
    except (RecursionError, OverflowError, MemoryError):
        raise RuleError(f"`{text[:80]}` is too large or too deeply nested for a regular expression.") from None
    literal = "" if regex.flags & re.IGNORECASE else _required_literal(tree)
    if _backtracks_little(tree):
        return Pattern(text, literal, regex.search)
    return Pattern(text, literal, _Automaton(text, tree, regex.flags).search, linear=True)


def _required_literal(tree: Any) -> str:
    """Returns the longest run of characters that lies, uninterrupted, in every match."""
    best = run = ""
    for op, argument in _unwrapped(tree):
        run = run + chr(argument) if op is c.LITERAL else ""
        best = max(best, run, key=len)
    return best


def _unwrapped(tree: Any) -> Iterator[tuple[Any, Any]]:
    for op, argument in tree:
        if op is c.SUBPATTERN and not argument[1] and not argument[2]:
            yield from _unwrapped(argument[3])
        else:
            yield op, argument


def _backtracks_little(tree: Any) -> bool:
    loops, choices, nested = _freedom(tree)
    return not nested and loops <= MAX_LOOPS and choices + CHOICES_PER_LOOP * loops <= MAX_CHOICES


def _freedom(tree: Any) -> tuple[int, int, bool]:
    """Counts the loops and the either-or choices of a pattern, and whether a loop holds either."""
    loops = choices = 0
    nested = False
    for op, argument in tree:
        if op in _REPEATS:
            least, most, body = argument
            inner_loops, inner_choices, inner_nested = _freedom(body)
            nested |= inner_nested
            if most == least == 1 or most <= 1:
                loops, choices = loops + inner_loops, choices + inner_choices + int(most != least)
            elif most == least:
                copies = int(most)
                loops, choices = loops + copies * inner_loops, choices + copies * inner_choices
            else:
                loops += 1
                nested |= bool(inner_loops or inner_choices)
            continue
        for body in _bodies(op, argument):
            inner_loops, inner_choices, inner_nested = _freedom(body)
            loops, choices, nested = loops + inner_loops, choices + inner_choices, nested or inner_nested
        if op is c.BRANCH:
            choices += len(argument[1]) - 1
        elif op in (c.GROUPREF, c.GROUPREF_EXISTS):
            choices += 1
    return loops, choices, nested


def _bodies(op: Any, argument: Any) -> list[Any]:
    if op is c.SUBPATTERN:
        return [argument[3]]
    if op is c.BRANCH:
        return list(argument[1])
    if op in (c.ASSERT, c.ASSERT_NOT):
        return [argument[1]]
    if op is c.ATOMIC_GROUP:
        return [argument]
    if op is c.GROUPREF_EXISTS:
        return [body for body in argument[1:] if body is not None]
    return []


# A state is one of: ("char", test, next), ("split", [next, ...]), ("at", test, next), or None, which accepts.
_State = tuple[Any, ...] | None


class _Automaton:
    """Thompson's construction, simulated on sets of states with the transitions remembered as they are met."""

    def __init__(self, text: str, tree: Any, flags: int) -> None:
        self._text = text
        self._states: list[_State] = [None]
        self._looks_around = False
        self._start = self._sequence(tree, flags, 0)
        self._moves: dict[Any, tuple[bool, frozenset[int]]] = {}

    def search(self, name: str) -> bool:
        seeds: frozenset[int] = frozenset()
        before = ""
        for index, character in enumerate((*name, "")):
            # To `$`, a final line break also is the end.
            ends = not character or (character == "\n" and index == len(name) - 1)
            key = (seeds, before if self._looks_around else None, character, ends)
            move = self._moves.get(key)
            if move is None:
                if len(self._moves) > 20_000:
                    self._moves.clear()
                move = self._moves[key] = self._move(seeds, before, character, ends)
            accepted, seeds = move
            if accepted:
                return True
            before = character
        return False

    def _move(self, seeds: frozenset[int], before: str, after: str, ends: bool) -> tuple[bool, frozenset[int]]:
        todo, reached, consumed = [*seeds, self._start], set(), set()
        while todo:
            index = todo.pop()
            if index in reached:
                continue
            reached.add(index)
            state = self._states[index]
            if state is None:
                return True, frozenset()
            if state[0] == "split":
                todo.extend(state[1])
            elif state[0] == "at":
                if state[1](before, after, ends):
                    todo.append(state[2])
            elif after and state[1](after):
                consumed.add(state[2])
        return False, frozenset(consumed)

    def _add(self, *state: Any) -> int:
        if len(self._states) >= MAX_STATES:
            raise self._refusal("it expands to too many states")
        self._states.append(state)
        return len(self._states) - 1

    def _refusal(self, why: str) -> RuleError:
        return RuleError(
            f"`{self._text}` could take exponential time to match and cannot be bounded: {why}.",
            hint="remove the nested repetition, for example `(a+)+` -> `a+`, or write two simpler rules.",
        )

    def _sequence(self, tree: Any, flags: int, then: int) -> int:
        for op, argument in reversed(list(tree)):
            then = self._node(op, argument, flags, then)
        return then

    def _node(self, op: Any, argument: Any, flags: int, then: int) -> int:
        if op is c.SUBPATTERN:
            _, added, removed, body = argument
            return self._sequence(body, (flags | added) & ~removed, then)
        if op is c.BRANCH:
            return self._add("split", [self._sequence(body, flags, then) for body in argument[1]])
        if op in (c.MAX_REPEAT, c.MIN_REPEAT):
            least, most, body = argument
            return self._repeat(least, most, body, flags, then)
        if op is c.AT:
            self._looks_around = True
            return self._add("at", _position_test(argument, flags), then)
        if op in _ONLY_BACKTRACKING:
            raise self._refusal("it uses look-around, a back-reference or a possessive group")
        return self._add("char", _character_test(op, argument, flags), then)

    def _repeat(self, least: int, most: Any, body: Any, flags: int, then: int) -> int:
        if most is c.MAXREPEAT:
            loop = self._add("split", [then])
            state = self._states[loop]
            assert state is not None
            state[1].append(self._sequence(body, flags, loop))
            then = loop
        else:
            for _ in range(int(most) - least):
                then = self._add("split", [then, self._sequence(body, flags, then)])
        for _ in range(least):
            then = self._sequence(body, flags, then)
        return then


def _position_test(code: Any, flags: int) -> Callable[[str, str, bool], bool]:
    lines, ascii_only = bool(flags & re.MULTILINE), bool(flags & re.ASCII)
    if code in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
        by_line = lines and code is c.AT_BEGINNING
        return lambda before, after, ends: not before or (by_line and before == "\n")
    if code is c.AT_END:
        return lambda before, after, ends: ends or (lines and after == "\n")
    if code is c.AT_END_STRING:
        return lambda before, after, ends: not after
    wanted = code is c.AT_BOUNDARY

    def is_word(character: str) -> bool:
        return _is_word(character) and (not ascii_only or character.isascii())

    return lambda before, after, ends: (is_word(before) != is_word(after)) is wanted


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


_CATEGORIES: dict[Any, tuple[Callable[[str], bool], bool]] = {
    c.CATEGORY_DIGIT: (str.isdecimal, True),
    c.CATEGORY_NOT_DIGIT: (str.isdecimal, False),
    c.CATEGORY_SPACE: (str.isspace, True),
    c.CATEGORY_NOT_SPACE: (str.isspace, False),
    c.CATEGORY_WORD: (_is_word, True),
    c.CATEGORY_NOT_WORD: (_is_word, False),
}


def _character_test(op: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    if op is c.ANY:
        return (lambda ch: True) if flags & re.DOTALL else (lambda ch: ch != "\n")
    items = argument if op is c.IN else [(op, argument)]
    wanted = True
    tests: list[Callable[[str], bool]] = []
    for kind, value in items:
        if kind is c.NEGATE:
            wanted = False
        elif kind is c.NOT_LITERAL:
            wanted = False
            tests.append(functools.partial(str.__eq__, chr(value)))
        elif kind is c.LITERAL:
            tests.append(functools.partial(str.__eq__, chr(value)))
        elif kind is c.RANGE:
            low, high = chr(value[0]), chr(value[1])
            tests.append(lambda ch, low=low, high=high: low <= ch <= high)  # type: ignore[misc]
        else:
            test, present = _CATEGORIES[value]
            ascii_only = bool(flags & re.ASCII)
            tests.append(
                lambda ch, test=test, present=present, ascii_only=ascii_only: (
                    (  # type: ignore[misc]
                        test(ch) and (not ascii_only or ch.isascii())
                    )
                    is present
                )
            )

    def check(ch: str) -> bool:
        forms = {ch, ch.lower(), ch.upper()} if flags & re.IGNORECASE else (ch,)
        return any(test(form) for form in forms if len(form) == 1 for test in tests) is wanted

    return check
