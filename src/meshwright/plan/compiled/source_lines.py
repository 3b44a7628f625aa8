"""The lines of the user's program that an instruction comes from, from the tables at the top of a compiled program."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from meshwright.plan.compiled.hlo import Instruction

_FIELDS = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE, _LINE = re.compile(r'\bsource_file="([^"]*)"'), re.compile(r"\bsource_line=(\d+)")
_HOME = re.compile(r"^(?:/home/[^/]+|/Users/[^/]+|/root)/")
# Who called our collectives says more than where in them the transfer is.
_OURS = re.compile(r"/meshwright/(?:parallel/|axes\.py)")
_MAX_DEPTH = 64


@dataclass(frozen=True)
class SourceLine:
    """A line of a program, and the function it is in; `str(place)` has no folders of the machine."""

    file: str
    function: str
    line: str

    def __str__(self) -> str:
        return f"{short_path(self.file)}:{self.line}"


@dataclass
class SourceLines:
    """Answers for one program, whose text begins with `header`: numbered files, functions, lines and calls."""

    header: str

    def find(self, instruction: Instruction) -> SourceLine | None:
        """Returns where an instruction comes from: the innermost call that is not one of our collectives."""
        frame = _FRAME.search(instruction.attributes)
        if frame:
            calls = self._calls(int(frame[1]))
            outside = [place for place in calls if not _OURS.search(place.file)]
            return next(iter(outside or calls), None)
        file, line = _FILE.search(instruction.attributes), _LINE.search(instruction.attributes)
        return SourceLine(file[1], "", line[1]) if file and line else None

    def _calls(self, number: int) -> list[SourceLine]:
        """Returns the calls that lead to a frame, the innermost first."""
        frames, places = self._tables.get("StackFrames", {}), self._tables.get("FileLocations", {})
        files, functions = self._tables.get("FileNames", {}), self._tables.get("FunctionNames", {})
        # The first frame has no parent. Where it seems to be its own, parents are numbered one higher.
        shift = 1 if _numbers(frames.get(1, "")).get("parent_frame_id") == 1 else 0
        found: list[SourceLine] = []
        while number in frames and len(found) < _MAX_DEPTH:
            frame = _numbers(frames[number])
            place = _numbers(places.get(frame.get("file_location_id", 0), ""))
            file = files.get(place.get("file_name_id", 0), "").strip('"')
            function = functions.get(place.get("function_name_id", 0), "").strip('"')
            if not file:
                break
            short = ".".join(function.replace("<locals>.", "").split(".")[-2:])
            found.append(SourceLine(file, short, str(place.get("line", 0))))
            number = frame.get("parent_frame_id", 0) - shift
        return found

    @functools.cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in self.header.splitlines():
            if re.fullmatch(r"[A-Z]\w+", line):
                table = tables.setdefault(line, {})
            elif line[0].isdigit():
                number, _, rest = line.partition(" ")
                table[int(number)] = rest
        return tables


def short_path(path: str) -> str:
    """Returns a path without the folders that only this machine has: from the package on, or its last two parts.

    Example:
        >>> short_path("/home/me/lib/python3.11/site-packages/flax/linen/linear.py"), short_path("/home/me/train.py")
        ('flax/linen/linear.py', 'train.py')
    """
    for mark in ("/site-packages/", "/dist-packages/", "/src/"):
        if mark in path:
            return path.rpartition(mark)[2]
    return "/".join(_HOME.sub("", path).strip("/").split("/")[-2:])


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELDS.findall(text)}
