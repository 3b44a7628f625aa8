"""Which devices take part in a collective, from the forms in which compiled programs write their groups."""

from __future__ import annotations

import math
import re

import numpy as np


def group_size(attributes: str) -> int:
    """Returns how many devices take part: those of a group, or the pairs of a permute."""
    found = partners(attributes)
    if "source_target_pairs=" in attributes:
        return max(2, len(found))
    return len(found[0]) if found else 1


def partners(attributes: str) -> tuple[tuple[int, ...], ...]:
    """Returns the first group, from list, iota and mesh forms of replica groups, or all pairs of a permute.

    Example:
        >>> partners("replica_groups=[2,4]<=[4,2]T(1,0)")
        ((0, 2, 4, 6),)
    """
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        return (_group_of_iota(int(iota[2]), _numbers(iota[3]), _numbers(iota[4] or "")),)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return (_numbers(listed[1]),)
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        wanted = [name for name in re.findall(r"'([^']+)'", mesh[2]) if name in sizes]
        places = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        group = places[tuple(slice(None) if name in wanted else 0 for name in sizes)].reshape(-1)
        order = re.search(r"device_ids=\(([\d,]+)\)", attributes)
        return (tuple(_numbers(order[1])[place] for place in group) if order else tuple(group.tolist()),)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,]+)", pairs[1] + "}")) if pairs else ()


def _group_of_iota(size: int, dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    places = np.arange(math.prod(dims)).reshape(dims)
    flat = (places.transpose(order) if order else places).reshape(-1)
    return tuple(flat[:size].tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
