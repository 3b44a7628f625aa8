"""Bytes of activations saved for the backward pass, by part of the model: attention, feed-forward, norms.

The part is read from `jax.named_scope` names, which built-in models and linen and Equinox modules set, or else from
the names of functions and classes. A residual of a loop belongs to the part that produced it inside the loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

REST = "other parts"
"""Kind of values without a known scope or name."""
_KINDS = (
    ("attention", re.compile(r"attn|attention|^splash_m")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_?forward|swiglu")),
    ("norms", re.compile(r"norm(?!al)|^ln(_|$)")),
    ("loss", re.compile(r"loss|cross_?entropy|xent|logits|(^|_)head$")),
    ("embedding", re.compile(r"embed")),
)
_MOST = 8
# Remat policies name and offload values outside the scope that produced them.
_HANDS_ON = ("convert_element_type", "name", "reshape", "device_put")
_NUMBER = re.compile(r"[_.]?\d+$")
_WRAPPED = re.compile(r"[\w<>.]+\(|[()]")
_A_LOSS = re.compile(r"(^|\b|_)loss(_fn)?$|loss\.__call__$")
_JAX, _HERE = os.path.dirname(jax.__file__), str(Path(__file__).parents[1])
# Operations that change no value, and operations that are cheaper to recompute than to store.
_RENAMES = ("reshape", "name", "squeeze", "expand_dims", "convert_element_type", "copy")
_CHEAP = ("mul", "add", "sub", "neg", "convert_element_type")
# Operations that fuse into those that read their result, which then read the operand; it is stored if it is narrower.
_FUSED = ("logistic", "mul", "add", "sub", "neg")


def bytes_kept(
    jaxpr: Any, waiting: Sequence[Any], num_params: int
) -> tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]:
    """Returns the bytes of residuals (`waiting`) by kind of layer: as a compiler stores them, in a loop, on the host.

    Residuals that depend only on parameters are excluded. A compiler also leaves out those that are cheap to recompute
    from others. It stores a widened value, or the sigmoid of a widened gate, as the narrow value. A loop over layers
    does neither.
    """
    hosted = [var for var in waiting if _is_on_host(var)]
    waiting = [var for var in waiting if not _is_on_host(var)]
    made = makers(jaxpr)
    of_batch = {id(var) for var in jaxpr.invars[num_params:]}
    for equation in jaxpr.eqns:
        if any(id(value) in of_batch for value in equation.invars):
            of_batch.update(id(var) for var in equation.outvars)

    def origin(var: Any) -> Any:
        equation = made.get(id(var))
        if equation is None or equation.primitive.name not in _RENAMES:
            return var
        source = equation.invars[0]
        narrows = var.aval.dtype.itemsize < source.aval.dtype.itemsize
        return var if narrows else origin(source)

    known: dict[int, Any] = {}

    def narrowest(var: Any) -> Any:
        root = origin(var)
        if id(root) not in known:
            known[id(root)] = root
            equation = made.get(id(root))
            if equation is not None and equation.primitive.name in _FUSED:
                sources = {id(one): one for one in map(narrowest, _large_inputs(equation, root))}
                source = next(iter(sources.values()), root)
                is_narrower = len(sources) == 1 and _num_bytes(source) < _num_bytes(root)
                known[id(root)] = source if is_narrower else root
        return known[id(root)]

    roots = {id(root): root for root in map(narrowest, waiting) if id(root) in of_batch}
    inputs = {id(var) for var in jaxpr.invars}

    def is_free(var: Any) -> bool:
        equation = made.get(id(var))
        if equation is None or equation.primitive.name not in _CHEAP:
            return id(var) in inputs
        large = _large_inputs(equation, var)
        return all(id(origin(value)) in roots and origin(value) is not var for value in large)

    stored = [root for root in roots.values() if not is_free(root)]
    handed = {id(var): var for var in waiting if id(var) in of_batch and id(var) not in inputs}
    return _by_kind(made, stored), _by_kind(made, handed.values()), _by_kind(made, hosted)


def _large_inputs(equation: Any, var: Any) -> list[Any]:
    """Returns the operands of an equation that are not much smaller than its result."""
    return [value for value in equation.invars if not hasattr(value, "val") and 8 * value.aval.size > var.aval.size]


def _num_bytes(var: Any) -> float:
    return float(var.aval.size * var.aval.dtype.itemsize)


def _by_kind(made: Mapping[int, Any], variables: Iterable[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for var in variables:
        kind = kind_of(made, var)
        found[kind] = found.get(kind, 0.0) + _num_bytes(var)
    return found


def _is_on_host(var: Any) -> bool:
    return bool(getattr(var.aval, "memory_space", None) == jax.memory.Space.Host)


def kind_of(made: Mapping[int, Any], var: Any) -> str:
    """Returns the kind of layer that produced a jaxpr variable; `made` comes from `makers`."""
    equation = made.get(id(var))
    if equation is None:
        return REST
    place = next(place for place, out in enumerate(equation.outvars) if out is var)
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner = getattr(inner, "jaxpr", inner)
    if hasattr(inner, "eqns") and len(inner.outvars) == len(equation.outvars):
        found = kind_of(makers(inner), inner.outvars[place])
        if found != REST:
            return found
    named = kind_of_scopes(str(equation.source_info.name_stack).split("/"))
    if named == REST and equation.primitive.name in _HANDS_ON:
        named = kind_of(made, equation.invars[place])
    return _kind_of_function(equation) if named == REST else named


def kind_of_scopes(scopes: Sequence[str]) -> str:
    """Returns the kind of the innermost scope with a known kind, or else the innermost name without its number.

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
    """Returns the equation that produced each variable, by the variable's `id`."""
    return {id(var): equation for equation in jaxpr.eqns for var in equation.outvars}


def added(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Adds sizes by kind of layer."""
    return {kind: some.get(kind, 0.0) + more.get(kind, 0.0) for kind in dict.fromkeys([*some, *more])}


def fewer(sizes: Mapping[str, float]) -> dict[str, float]:
    """Sorts sizes, the largest first, and adds up the smallest; returns {} if no kind is known."""
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    kept = [kind for kind in ordered if kind != REST][: _MOST - 1]
    found = {kind: sizes[kind] for kind in kept}
    rest = sum(size for kind, size in sizes.items() if kind not in found)
    return found | ({REST: rest} if rest and found else {})


def _kind_of_function(equation: Any) -> str:
    """Returns the kind by function names, from the innermost outward, ignoring the job's loss function."""
    for frame in getattr(equation.source_info.traceback, "frames", ()):
        if frame.file_name.startswith(_HERE):
            break
        name = frame.function_name.lower()
        if not frame.file_name.startswith(_JAX) and not _A_LOSS.search(name):
            for kind, pattern in _KINDS:
                if pattern.search(name):
                    return kind
    return REST
