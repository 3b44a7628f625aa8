"""Parser for mesh strings such as `"dp:2@dcn,fsdp:-1,tp:2"`.

Grammar: `[!]AXIS[,AXIS...]`. Each AXIS is `name:size`, or a bare `size` for the next of the given names. `size` is
positive, or -1 (once) for all remaining devices. `@dcn` after a size puts the axis on the slow network between slices
or hosts; `fsdp:8@dcn=2` spans 2 of them, with 4 devices in each. A leading `!` keeps the devices in JAX's order instead
of ordering them by their links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.errors import MeshError, did_you_mean

_AXIS = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)\s*:)?\s*(?P<size>[+-]?\d+)\s*(?:@\s*dcn(?:\s*=\s*(?P<dcn>\d+))?(?P<at>))?"
)
_EXAMPLE = 'write axes as name:size, for example "dp:2,fsdp:-1,tp:2" or "dp:2@dcn,fsdp:4"'


@dataclass(frozen=True)
class MeshAxis:
    """One mesh axis; `dcn` is the factor of its `size` that crosses the slow network (None: the whole size)."""

    name: str
    size: int
    dcn: int | None = 1

    def __str__(self) -> str:
        crossing = {1: "", None: "@dcn"}.get(self.dcn, f"@dcn={self.dcn}")
        return f"{self.name}:{self.size}{crossing}"


@dataclass(frozen=True)
class MeshSpec:
    """The axes of a mesh in order; `resolve` replaces a -1 when the number of devices is known."""

    axes: tuple[MeshAxis, ...]
    plain_order: bool = False

    def __post_init__(self) -> None:
        _check_axes(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def dcn_sizes(self) -> tuple[int, ...]:
        return tuple(axis.size if axis.dcn is None else axis.dcn for axis in self.axes)

    @property
    def ici_sizes(self) -> tuple[int, ...]:
        return tuple(size // dcn for size, dcn in zip(self.sizes, self.dcn_sizes, strict=True))

    @property
    def is_hybrid(self) -> bool:
        return any(axis.dcn != 1 for axis in self.axes)

    def __str__(self) -> str:
        text = ",".join(map(str, self.axes))
        return f"!{text}" if self.plain_order else text

    def resolve(self, num_devices: int, *, instead: Callable[[int], str] | None = None) -> MeshSpec:
        """Returns the mesh with its -1 filled in; raises if the product of the sizes is not `num_devices`.

        Args:
            instead: returns another remedy for the hint, by the number of devices that the mesh needs, or "".
        """
        fixed = math.prod(size for size in self.sizes if size != -1)
        shown = " x ".join(f"{axis.name}={axis.size}" for axis in self.axes if axis.size != -1)
        free = next((axis for axis in self.axes if axis.size == -1), None)
        if free is not None and num_devices % fixed:
            raise MeshError(
                f"cannot fill in {free.name}=-1: {shown} = {fixed} does not divide {num_devices} devices.",
                hint=f"choose sizes whose product divides {num_devices}.",
            )
        if free is None and fixed != num_devices:
            raise MeshError(
                f"the mesh {shown} needs {fixed} devices, but there are {num_devices}.",
                hint=self._nearest_fix(fixed, num_devices, "" if instead is None else instead(fixed)),
            )
        axes = tuple(replace(axis, size=num_devices // fixed) if axis is free else axis for axis in self.axes)
        resolved = MeshSpec(axes, self.plain_order)
        for axis, dcn in zip(axes, resolved.dcn_sizes, strict=True):
            if axis.size % dcn:
                raise MeshError(
                    f"axis {axis.name!r} has size {axis.size}, which its `@dcn={dcn}` does not divide.",
                    hint=f"use a size that is a multiple of {dcn}, or another `@dcn=`.",
                )
        return resolved

    def _nearest_fix(self, product: int, num_devices: int, instead: str) -> str:
        # An axis that crosses slices must still fit them.
        for axis in sorted(self.axes, key=lambda axis: axis.dcn != 1):
            size, rest = divmod(num_devices, product // axis.size)
            if rest == 0 and size % (axis.dcn or 1) == 0:
                fixed = (replace(one, size=size) if one is axis else one for one in self.axes)
                return ", or ".join(filter(None, [f"use {MeshSpec(tuple(fixed), self.plain_order)}", instead]))
        return instead or f"choose sizes whose product is {num_devices}"


def parse_mesh(text: str, names: Sequence[str] | None = None) -> MeshSpec:
    """Parses a mesh string. Named axes keep their order, unless `names` gives another.

    Example:
        >>> parse_mesh("dp:2@dcn,fsdp:-1,tp:2").resolve(16)
        MeshSpec(axes=(MeshAxis(name='dp', size=2, dcn=None), MeshAxis(name='fsdp', size=4, dcn=1), \
MeshAxis(name='tp', size=2, dcn=1)), plain_order=False)
        >>> str(parse_mesh("4,-1", names=("data", "model")).resolve(8))
        'data:4,model:2'
    """
    body = text.strip()
    plain_order = body.startswith("!")
    parts = [part.strip() for part in body.removeprefix("!").split(",")]
    axes = []
    for part in parts:
        match = _AXIS.fullmatch(part)
        if match is None:
            raise MeshError(f"mesh {text!r}: cannot parse {part!r}.", hint=_EXAMPLE)
        dcn = 1 if match["at"] is None else int(match["dcn"]) if match["dcn"] else None
        axes.append(MeshAxis(match["name"] or "", int(match["size"]), dcn))
    named = [axis.name != "" for axis in axes]
    if any(named) and not all(named):
        raise MeshError(f"mesh {text!r} mixes sizes with and without names.", hint="name all axes, or none.")
    if not any(named):
        if names is None:
            raise MeshError(f"mesh {text!r} has no axis names.", hint=_EXAMPLE)
        check_counts(len(axes), names)
        axes = [replace(axis, name=name) for axis, name in zip(axes, names, strict=True)]
    elif names is not None:
        axes = _in_order_of(names, axes, text)
    return MeshSpec(tuple(axes), plain_order)


def check_counts(num_sizes: int, names: Sequence[str]) -> None:
    """Raises if the number of sizes differs from the number of names."""
    if num_sizes != len(names):
        raise MeshError(
            f"got {num_sizes} axis sizes for {len(names)} axis names ({', '.join(names)}).",
            hint="pass one size per name; an axis of size 1 costs nothing.",
        )


def _in_order_of(names: Sequence[str], axes: list[MeshAxis], text: str) -> list[MeshAxis]:
    given = {axis.name: axis for axis in axes}
    for axis in axes:
        if axis.name not in names:
            raise MeshError(
                f"mesh {text!r} has an axis {axis.name!r}; the expected axes are: {', '.join(names)}.",
                hint=did_you_mean(axis.name, names) or f"use one of: {', '.join(names)}",
            )
    _check_axes(axes)
    missing = [name for name in names if name not in given]
    if missing:
        raise MeshError(
            f"mesh {text!r} lacks axis {missing[0]!r}; the required axes are: {', '.join(names)}.",
            hint=f'use "{",".join([text, *(f"{name}:1" for name in missing)])}".',
        )
    return [given[name] for name in names]


def _check_axes(axes: Sequence[MeshAxis]) -> None:
    if not axes:
        raise MeshError("a mesh needs at least one axis.", hint=_EXAMPLE)
    names = [axis.name for axis in axes]
    for axis in axes:
        if names.count(axis.name) > 1:
            raise MeshError(f"axis {axis.name!r} appears more than once.", hint="give each axis a different name.")
        if axis.size == 0 or axis.size < -1:
            raise MeshError(
                f"axis {axis.name!r} has size {axis.size}.",
                hint="use a size of 1 or more, or -1 for all remaining devices.",
            )
        if axis.dcn is not None and axis.dcn < 1:
            raise MeshError(f"axis {axis.name!r} has `@dcn={axis.dcn}`.", hint="use 1 or more.")
    free = [axis.name for axis in axes if axis.size == -1]
    if len(free) > 1:
        raise MeshError(
            f"axes {' and '.join(map(repr, free))} all have size -1; only one size can be filled in.",
            hint="write the size of every axis but one.",
        )
