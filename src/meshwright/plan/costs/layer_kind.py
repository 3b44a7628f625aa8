"""What part of a model made a value: attention, feed-forward, a norm, the loss.

Scopes say it (`jax.named_scope`): our models have them, linen's and Equinox's modules too. Where there is none, the
function's name does, or the class it belongs to. A value that a loop hands over was made inside of the loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

REST = "other parts"
"""The kind of what no scope and no name tells."""
_KINDS = (
    ("attention", re.compile(r"attn|attention")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_?forward|swiglu")),
    ("norms", re.compile(r"norm(?!al)|^ln(_|$)")),
    ("loss", re.compile(r"loss|cross_?entropy|xent|logits|(^|_)head$")),
    ("embedding", re.compile(r"embed")),
)
_MOST = 8
# Policies of remat name values, and send them to the host, outside of the scope that made them.
_HANDS_ON = ("convert_element_type", "name", "reshape", "device_put")
_NUMBER = re.compile(r"[_.]?\d+$")
_WRAPPED = re.compile(r"[\w<>.]+\(|[()]")
_A_LOSS = re.compile(r"(^|\b|_)loss(_fn)?$")
_JAX, _HERE = os.path.dirname(jax.__file__), str(Path(__file__).parents[1])


def kind_of(made: Mapping[int, Any], var: Any) -> str:
    """Returns the kind of a variable of a jaxpr; `made` has the equation that made each, by the variable's `id`."""
    equation = made.get(id(var))
    if equation is None:
        return REST
    place = next(place for place, out in enumerate(equation.outvars) if out is var)
    inner = _body(equation)
    if inner is not None and place < len(inner.outvars):
        found = kind_of(makers(inner), inner.outvars[place])
        if found != REST:
            return found
    named = kind_of_scopes(str(equation.source_info.name_stack).split("/"))
    if named == REST and equation.primitive.name in _HANDS_ON:
        named = kind_of(made, equation.invars[place])
    return _kind_of_function(equation) if named == REST else named


def kind_of_scopes(scopes: Sequence[str]) -> str:
    """Returns the kind that scopes tell, the innermost that does; or else the innermost itself, without its number.

    Example:
        >>> kind_of_scopes(["jvp(Block_0)", "SelfAttention_0", "query"]), kind_of_scopes(["jvp(net)", "Conv_3"])
        ('attention', 'Conv')
        >>> kind_of_scopes(["jvp()"])
        'other parts'
    """
    given = [name for name in (_WRAPPED.sub("", scope) for scope in scopes) if name]
    for name in reversed(given):
        for kind, pattern in _KINDS:
            if pattern.search(name.lower()):
                return kind
    return _NUMBER.sub("", given[-1]) if given else REST


def makers(jaxpr: Any) -> dict[int, Any]:
    """Returns the equation that made each variable, by the variable's `id`."""
    return {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}


def fewer(sizes: Mapping[str, float]) -> dict[str, float]:
    """Returns sizes by kind, the largest first, the smallest of many as the rest; none where no kind is known."""
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    kept = [kind for kind in ordered if kind != REST][: _MOST - 1]
    found = {kind: sizes[kind] for kind in kept}
    rest = sum(size for kind, size in sizes.items() if kind not in found)
    return found | ({REST: rest} if rest and found else {})


def _body(equation: Any) -> Any:
    """Returns what a call or a loop computes, where its results are those of the equation, one by one."""
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    return inner if hasattr(inner, "eqns") and len(inner.outvars) == len(equation.outvars) else None


def _kind_of_function(equation: Any) -> str:
    """Returns the kind that the names of functions tell, from the innermost to the job's own loss.

    That one is mostly called so, whatever it computes.
    """
    for frame in getattr(equation.source_info.traceback, "frames", ()):
        if frame.file_name.startswith(_HERE):
            break
        name = frame.function_name.lower()
        if not frame.file_name.startswith(_JAX) and not _A_LOSS.search(name):
            for kind, pattern in _KINDS:
                if pattern.search(name):
                    return kind
    return REST
