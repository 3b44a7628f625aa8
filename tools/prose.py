"""Counts turns of phrase that CONTRIBUTING.md asks writers to avoid.

usage: python3 tools/prose.py [--list] [PATH ...]

Reads Markdown (outside code fences) and the comments and strings of Python files, by default everything a user or
contributor reads. Prints a table of counts per habit; --list prints each match as FILE:LINE. This is a report for
writers, not a gate: some matches are good English, so the exit status is always 0.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs", "src", "examples", "benchmarks")
DEFAULT += ("dev.py", "tests")

# "What" after these words opens an indirect question ("shows what changed"), which is good English.
ASKING = r"(?:say|show|see|know|decide|explain|describe|check|tell|ask|report|print|choose|determine|list|learn|find)"
COMPARED = r"(?:one|longer|more|less|need|way|such|different|better|worse|faster|slower|larger|smaller|match)"
HABITS = {
    'headless "what"': r"\bwhat\b(?! if\b| to\b)(?![^.]*\?)",
    '"where" for "if"': r"(?:^|[,;:(] ?|\band )where (?:it|there|they|that|this|one|no|none|nothing|an?|the|you|its|two"
    r"|both)\b",
    '"is no X"': rf"(?<!\bthere )\b(?:is|are|was|were|be) no (?!{COMPARED}\b)\w+",
    '"of ours", "of its own"': r"\bof (?:ours|yours|theirs|(?:our|its|their|one's|your) own)\b",
    '"goes on"': r"\b(?:go|goes|going|went|gone) on\b(?! (?:the|a|an|each|every|one) )",
    '"is told"': r"\b(?:is|are|was|were|be|been) told\b",
    '"not here"': r"\b(?:is|are|be) not here\b|\bnot to be seen\b",
    '"cannot be."': r"\bcannot be[.;,]|\bmay be none\b|\bthat (?:is|are) none\b",
    '"so often"': r"\bso (?:often|many times)\b|\bhow (?:many|much) (?:they|it) (?:are|is)\b",
    '"those that"': r"\bthose (?:that|which|who|before|after)\b",
    '"as it is", "by hand"': r"\bas (?:it is|they are)\b[.,;:]|\bby hand\b",
    '"nobody", "nothing but"': r"\bnobody\b|\bnothing but\b|\banybody\b",
    '"by itself", "all the same"': r"\b(?:by|of) itself\b|\ball the same\b|\bfor nothing\b",
}
PATTERNS = {name: re.compile(pattern, re.IGNORECASE | re.MULTILINE) for name, pattern in HABITS.items()}
AFTER_ASKING = re.compile(rf"\b(?:{ASKING}(?:s|es|ed|ing|n)?|said|told)\b[^.;:]{{0,24}}$", re.IGNORECASE)


def main(arguments: list[str]) -> int:
    """Prints the report."""
    listing = "--list" in arguments
    paths = [Path(name) for name in arguments if name != "--list"] or [ROOT / name for name in DEFAULT]
    counts: Counter[str] = Counter()
    words = 0
    for file in files(paths):
        for line, text in prose(file):
            words += len(text.split())
            for habit, match in matches(text):
                counts[habit] += 1
                if listing:
                    at = line + text.count("\n", 0, match.start())
                    shown = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
                    print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{at}: {habit}: {shown}")
    for habit in PATTERNS:
        print(f"{counts[habit]:6}  {habit}")
    print(f"{counts.total():6}  in all, in {words:,} words")
    return 0


def matches(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yields each habit that a passage shows."""
    for habit, pattern in PATTERNS.items():
        for match in pattern.finditer(text):
            if habit == 'headless "what"' and AFTER_ASKING.search(text[: match.start()]):
                continue
            yield habit, match


def files(paths: list[Path]) -> Iterator[Path]:
    """Yields the Markdown and Python files below the paths."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (
            file
            for file in found
            if file.suffix in (".md", ".py") and "_build" not in file.parts and file != Path(__file__)
        )


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the passages of a file that people read, each with its first line."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield 1, re.sub(r"^(`{3,}).*?^\1", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.M | re.S)
        return
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("# "))
            continue
        if token.type not in (tokenize.NL, tokenize.COMMENT) and comment:
            yield token.start[0] - len(comment), "\n".join(comment)
            comment = []
        if token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], re.sub(r"\{[^{}\n]*\}", "{}", token.string)  # the values in f-strings are code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
