"""Optional axes of rules that look misspelled: a missing optional axis is dropped without an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from meshwright.mesh.current import AnyMesh
from meshwright.rules.rule_set import Rules
from meshwright.specs import USUAL_AXES, spec_axes

# Similarity, from 0 to 1, of a misspelled name: 0.75 for `fdsp` and `fsdp`, 0.8 for `tpp` and `tp`.
_CLOSE = 0.65


def misspelled_axes(rules: Rules, mesh: AnyMesh) -> list[str]:
    """Returns one line per optional axis whose name is close to another one that it was probably meant to be.

    The usual names, such as `tp` and `dp`, are close to each other and never count as misspelled.

    Example:
        >>> import meshwright as mw
        >>> rules = Rules([("w", mw.P("fdsp"))], optional_axes=("fdsp",))
        >>> misspelled_axes(rules, mw.create_abstract_mesh("fsdp:8"))
        ["optional axis 'fdsp' is not in the mesh, so nothing is split over it; did you mean 'fsdp'?"]
    """
    named = _named(rules)
    lines = []
    for axis in rules.optional_axes:
        if axis not in named and (close := _close(axis, named)):
            lines.append(f"optional axis {axis!r} is in no rule; did you mean {close!r}?")
        elif axis in named and axis not in mesh.axis_names:
            free = [other for other, size in mesh.shape.items() if size > 1 and other not in named]
            if close := _close(axis, free):
                lines.append(
                    f"optional axis {axis!r} is not in the mesh, so nothing is split over it; did you mean {close!r}?"
                )
    return lines


def unnamed_axes(rules: Rules) -> list[str]:
    """Returns the optional axes that no rule names, without the usual names.

    Example:
        >>> from meshwright import P
        >>> unnamed_axes(Rules([("w", P("tensor"))], optional_axes=("tensor", "stage", "dp")))
        ['stage']
    """
    named = _named(rules)
    return [axis for axis in rules.optional_axes if axis not in named and axis not in USUAL_AXES]


def _named(rules: Rules) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for rule in rules.entries for axis in spec_axes(rule.spec)))


def _close(axis: str, names: Iterable[str]) -> str | None:
    others = [name for name in names if not (axis in USUAL_AXES and name in USUAL_AXES)]
    close = difflib.get_close_matches(axis, others, n=1, cutoff=_CLOSE)
    return close[0] if close else None
