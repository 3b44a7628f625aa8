"""Rules from the annotations of Flax models.

`nn.with_partitioning` and `nnx.with_partitioning` name a mesh axis for each dim of a parameter, and
`nn.with_logical_partitioning` a logical name, which a table maps to a mesh axis. `rules_from_annotations` turns either
into ordinary rules, so that a layout can check and explain them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from jax.sharding import PartitionSpec as P

from meshwright.errors import RuleError, did_you_mean
from meshwright.rules.rule_set import Rule, Rules, as_rules, compile_pattern
from meshwright.specs import USUAL_AXES, check_spec_type, dim_axes
from meshwright.tree import named_boxes
from meshwright.types import PyTree

AxisTable = Mapping[str, Any] | Sequence[tuple[str, Any]]
"""Mesh axes by logical name: a dict, or pairs as in `nn.logical_axis_rules`."""

_NUMBER = re.compile(r"\d+")


class Annotation(NamedTuple):
    """The names of one leaf's dims; `is_logical` if they cannot be mesh axes, `table` if the model has one for them."""

    names: tuple[Any, ...]
    is_logical: bool = False
    table: tuple[tuple[str, Any], ...] = ()


def rules_from_annotations(
    tree: PyTree, table: AxisTable | None = None, *, others: Any = (), optional_axes: Sequence[str] = ()
) -> Rules:
    """Returns exact rules for the annotated leaves of a tree, in tree order, followed by the rules of `others`.

    Leaves with the same annotation in all layers share a rule. Axes of the table and the usual ones (dp, fsdp, tp, sp,
    pp, ep) are optional: a mesh may lack them.

    Args:
        tree: parameters (or their shapes) in boxes of `flax.linen` or variables of `flax.nnx`.
        table: mesh axes by logical name. As in Flax, an earlier pair has priority, and an axis that already splits
            another dim of the same leaf is skipped. Map a name to None to replicate its dims.
        others: rules for leaves without an annotation.
        optional_axes: other axes that a mesh may lack.

    Example:
        >>> import jax
        >>> from flax import linen as nn
        >>> init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        >>> module = nn.Dense(8, use_bias=False, kernel_init=init)
        >>> params = jax.eval_shape(module.init, jax.random.key(0), jax.numpy.ones((2, 4)))["params"]
        >>> rules_from_annotations(params, {"embed": "fsdp", "mlp": "tp"})[0]
        ('^kernel$', P('fsdp', 'tp'))
    """
    found = [(leaf.name, annotation_of(leaf.value)) for leaf in named_boxes(tree)]
    return annotated_rules(found, table, others=others, optional_axes=optional_axes)


def annotated_rules(
    leaves: Iterable[tuple[str, Annotation | None]],
    table: AxisTable | None = None,
    *,
    others: Any = (),
    optional_axes: Sequence[str] = (),
) -> Rules:
    """Returns the rules of `rules_from_annotations` for named annotations (None: not annotated)."""
    pairs, found = _table_pairs(table), list(leaves)
    entries = [
        _rule(pattern, name, annotation, pairs)
        for pattern, name, annotation in _by_layer(
            found, max((len(_NUMBER.findall(name)) for name, _ in found), default=0)
        )
        if annotation is not None
    ]
    if table is not None and not entries:
        raise RuleError(
            f"rules is a table of axes ({', '.join(name for name, _ in pairs)}), but no leaf is annotated.",
            hint='annotate the model, or write rules such as ("kernel", P("fsdp", "tp")).',
        )
    rest = as_rules(others)
    tables = [*pairs, *(pair for _, annotation in found if annotation for pair in annotation.table)]
    mapped = [axis for _, entry in tables for axis in dim_axes(entry)]
    # A mesh may lack a usual axis. A logical name without a table is none of them, so it stays an error.
    optional = dict.fromkeys([*mapped, *optional_axes, *rest.optional_axes, *USUAL_AXES])
    return Rules([*entries, *rest.entries], optional_axes=tuple(optional))


def is_axis_table(rules: Any) -> TypeGuard[AxisTable]:
    """Returns whether an argument is a table of axes, not rules: a dict, or pairs of a name and axes."""
    if isinstance(rules, Mapping):
        return True
    if isinstance(rules, Rules) or not isinstance(rules, Sequence) or not rules:
        return False
    return all(
        isinstance(pair, Sequence) and len(pair) == 2 and (pair[1] is None or isinstance(pair[1], (str, tuple, list)))
        for pair in rules
    )


def annotation_of(leaf: Any) -> Annotation | None:
    """Returns the annotation of a box or a variable, or None."""
    from flax import linen, nnx

    if isinstance(leaf, linen.Partitioned):
        logical = isinstance(leaf, linen.LogicallyPartitioned)
        return Annotation(_names(leaf.names), logical, _local_table(getattr(leaf, "rules", None)))
    if isinstance(leaf, nnx.Variable):
        metadata = leaf.get_metadata()
        names = metadata.get(
            "out_sharding", metadata.get("sharding_names")
        )  # the second name is that of older versions
        return Annotation(_names(names), False, _local_table(metadata.get("sharding_rules"))) if names else None
    return None


def _names(sharding: Any) -> tuple[Any, ...]:
    # NNX accepts names, a PartitionSpec, a NamedSharding, and a Format around one.
    for attribute in ("sharding", "spec"):
        sharding = getattr(sharding, attribute, sharding)
    return tuple(tuple(name) if isinstance(name, list) else name for name in sharding)


def _local_table(rules: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules or ())


def _table_pairs(table: AxisTable | None) -> list[tuple[str, Any]]:
    pairs = [] if table is None else list(table.items() if isinstance(table, Mapping) else table)
    for name, axes in pairs:
        if not isinstance(name, str):
            raise RuleError(f"the table of axes has the name {name!r}, which is not a string.")
        if axes is not None and not isinstance(axes, (str, tuple, list)):
            raise RuleError(f"the table of axes maps {name!r} to {axes!r}.", hint="map it to an axis, axes, or None.")
    return pairs


def _rule(pattern: str, name: str, annotation: Annotation, pairs: Sequence[tuple[str, Any]]) -> Rule:
    where, names = f"annotation of `{name}`", annotation.names
    table = [*annotation.table, *pairs]
    known = [key for key, _ in table]
    axes = [axis for _, entry in table for axis in dim_axes(entry)]
    entries: list[Any] = [None] * len(names)
    for dim, entry in enumerate(names):
        if isinstance(entry, str) and entry in known:
            continue
        unknown = [part for part in dim_axes(entry) if annotation.is_logical or (table and part not in axes)]
        if unknown:
            raise _unknown_name(where, unknown[0], known)
        entries[dim] = entry  # already mesh axes
    taken = {axis for entry in entries for axis in dim_axes(entry)}
    waiting = [dim for dim, entry in enumerate(names) if isinstance(entry, str) and entry in known]
    for key, mapped in table:
        for dim in [dim for dim in waiting if names[dim] == key]:
            if taken.isdisjoint(dim_axes(mapped)):
                entries[dim] = tuple(mapped) if isinstance(mapped, list) else mapped
                taken.update(dim_axes(mapped))
                waiting.remove(dim)
    whole = "".join(f"; dim {dim} stays whole, because its axis splits another dim" for dim in waiting)
    source = f"annotation of {name}: {names!r}{whole}"
    return Rule(compile_pattern(f"^{pattern}$"), check_spec_type(P(*entries), where=where), names, source)


def _unknown_name(where: str, name: str, known: Sequence[str]) -> RuleError:
    if not known:
        return RuleError(
            f"{where}: {name!r} is a logical name, and there is no table that maps it to a mesh axis.",
            hint=f'pass a table as rules, for example rules={{{name!r}: "fsdp"}}.',
        )
    return RuleError(
        f"{where}: logical name {name!r} is not in the table ({', '.join(dict.fromkeys(known))}).",
        hint=did_you_mean(name, known) or f"add {name!r}: None to replicate these dims.",
    )


def _by_layer(
    leaves: Sequence[tuple[str, Annotation | None]], num_free: int
) -> Iterator[tuple[str, str, Annotation | None]]:
    """Yields a pattern, a name and an annotation for all leaves that differ only in the first `num_free` numbers.

    If their annotations differ (`Dense_0` and `Dense_1` of a block), fewer numbers are free.
    """
    groups: dict[str, list[tuple[str, Annotation | None]]] = {}
    for leaf in leaves:
        groups.setdefault(_pattern(leaf[0], num_free), []).append(leaf)
    for pattern, members in groups.items():
        if len({annotation for _, annotation in members}) == 1:
            yield pattern, *members[0]
        else:
            yield from _by_layer(members, num_free - 1)


def _pattern(name: str, num_free: int) -> str:
    text = re.escape(name).replace(r"\-", "-")
    return _NUMBER.sub(r"\\d+", text, count=num_free) if num_free else text
