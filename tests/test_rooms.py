"""Names in the listing have one meaning, and rooms stay small enough to read."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import meshwright as mw

ROOT = Path(mw.__file__).parent
MODULES = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "__init__.py"]


def test_no_two_modules_share_a_name():
    """Except `report`, the last step of three rooms, and compat, whose names are those of older packages."""
    names = Counter(path.name for path in MODULES if "compat" not in path.parts and path.name != "report.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_public_classes_share_a_name():
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("room", sorted({path.parent for path in MODULES}), ids=lambda path: path.name)
def test_rooms_are_small(room):
    assert sum(path.parent == room for path in MODULES) <= (18 if room == ROOT else 15)
