"""YAML options with few surprises: scalars that YAML 1.1 would turn into other values stay text.

`10:15` is not 615, `2026-01-01` is not a date, and `010` is not 8: the option's own type decides. Tags are refused, and
so are deep nesting, duplicate keys and more than a few aliases, which can stand for gigabytes.
"""

from __future__ import annotations

import functools
from typing import Any

from meshwright.errors import FileFormatError

MOST_BYTES = 2**20
MOST_ALIASES = 16
MOST_DEPTH = 16

_INT = r"[-+]?(?:0|[1-9][0-9_]{0,3999})"
_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]{1,4})?"
_SPECIAL = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"


def parse_yaml(text: str, *, where: str) -> Any:
    """Parses YAML text; raises `FileFormatError` if it is not plain YAML, and `where` names it in errors.

    Example:
        >>> parse_yaml("profile: 10:15\\nsteps: 1_000\\nday: 2026-01-01", where="x")
        {'profile': '10:15', 'steps': 1000, 'day': '2026-01-01'}
        >>> parse_yaml("a: !!python/name:os.system", where="x")
        Traceback (most recent call last):
        meshwright.errors.FileFormatError: x is not YAML as Meshwright reads it: line 1 has the tag
        `tag:yaml.org,2002:python/name:os.system`, which is not allowed.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except FileFormatError as error:
        raise FileFormatError(f"{where} {str(error).partition(chr(10))[0]}", hint=error.hint) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{where} is not YAML: {error}") from None


@functools.cache
def _loader() -> Any:
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader with limits."""

        yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - the name and form that PyYAML reads

        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.aliases = 0
            self.open: list[str | None] = []  # anchors of the nodes around the current one

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            line = f"is not YAML as Meshwright reads it: line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                self.aliases += 1
                if self.aliases > MOST_ALIASES:
                    raise FileFormatError(f"{line} has more than {MOST_ALIASES} aliases.", hint="write the values out.")
                if event.anchor in self.open:
                    raise FileFormatError(f"{line}: `*{str(event.anchor)[:80]}` contains itself.")
            elif event.tag is not None:
                raise FileFormatError(f"{line} has the tag `{event.tag[:80]}`, which is not allowed.")
            self.open.append(event.anchor)
            if len(self.open) > MOST_DEPTH:
                raise FileFormatError(f"{line} is nested more than {MOST_DEPTH} deep.")
            node = super().compose_node(parent, index)
            self.open.pop()
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: dict[Any, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key.value, str) and seen.setdefault(key.value, line) != line:
                    raise FileFormatError(
                        f"gives `{key.value[:80]}` twice, in lines {seen[key.value]} and {line}.",
                        hint="leave one of them out.",
                    )
            return super().construct_mapping(node, deep=deep)

    kept = {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"}
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items():
        Loader.yaml_implicit_resolvers[first] = [(tag, regexp) for tag, regexp in found if tag in kept]
    digits = list("-+0123456789")
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"^(?:{_INT})$"), digits)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT}|{_SPECIAL})$"), [*digits, "."])
    return Loader
