"""Target machines by name: `v5p:4x4x8`, `h200:8x8`, `cpu:8`.

Grammar: `KIND:SHAPE[*SLICES]`. KIND is `cpu` or a chip in `meshwright.hardware.chips`. SHAPE is a TPU torus (`16x16`,
`4x4x8`), hosts x GPUs per host (`8x8`), or a number of simulated CPU devices. `*4` means four TPU slices connected by
the data-center network.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.errors import MeshError, did_you_mean
from meshwright.hardware.chips import ALIASES, CHIPS, Chip, chip_of
from meshwright.mesh.string import MeshSpec, parse_mesh
from meshwright.specs import ceil_div

_FORM = re.compile(r"(?P<kind>[A-Za-z][\w.\-]*):(?P<shape>\d+(?:[xX]\d+)*)(?:\*(?P<slices>\d+))?")
_EXAMPLES = "use e.g. v5e:16x16, v5p:4x4x8, v5p:4x4x8*4 (four slices), h200:8x8 (hosts x GPUs per host), cpu:8."
MOST_CHIPS = 2**20
"""Largest machine; a search over the meshes of a larger one, such as a mistyped one, would not end."""
# A torus dim wraps around to a ring only if its size is a multiple of this, by the number of dims.
_WRAP_LENGTH = {2: 16, 3: 4}


@dataclass(frozen=True)
class Target:
    """A machine to plan for; made by `parse_target`.

    Args:
        kind: "cpu" or the name of a chip.
        shape: torus of a TPU slice, (hosts, GPUs per host), or (CPU devices,).
        num_slices: number of TPU slices.
    """

    kind: str
    shape: tuple[int, ...]
    num_slices: int = 1

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.kind}:{shape}" + (f"*{self.num_slices}" if self.num_slices > 1 else "")

    def __str__(self) -> str:
        return self.name

    @property
    def chip(self) -> Chip | None:
        """The chip's data sheet; None for CPUs."""
        return chip_of(self.kind)

    @property
    def platform(self) -> Literal["cpu", "tpu", "gpu"]:
        return "cpu" if self.chip is None else self.chip.platform

    @property
    def devices_per_slice(self) -> int:
        return math.prod(self.shape) * (1 if self.chip is None else self.chip.devices_per_chip)

    @property
    def num_devices(self) -> int:
        """Devices as JAX counts them: two for each TPU7x chip."""
        return self.devices_per_slice * self.num_slices

    @property
    def devices_per_host(self) -> int:
        if self.chip is None:
            return self.num_devices
        return self.shape[1] if self.platform == "gpu" else min(self.chip.devices_per_host, self.devices_per_slice)

    @property
    def num_hosts(self) -> int:
        return ceil_div(self.num_devices, self.devices_per_host)

    @property
    def memory_bytes(self) -> int | None:
        """Memory that a program can use per device; None for CPUs, whose devices share it."""
        return None if self.chip is None else self.chip.memory_bytes

    def matmul_rate(self, dtype: str) -> float | None:
        """Returns the FLOP/s that matmuls reach; None if the peak is unknown.

        Example:
            >>> parse_target("v5p:4x4x8").matmul_rate("bfloat16") / chip_of("v5p").peak()
            0.84
        """
        if self.chip is None:
            return None
        peak = self.chip.peak(dtype)
        return None if peak is None else peak * self.chip.rates.share(dtype)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dim of a TPU's torus wraps around to a ring."""
        if self.platform != "tpu":
            return ()
        return tuple(size % _WRAP_LENGTH[len(self.shape)] == 0 for size in self.shape)

    @property
    def title(self) -> str:
        """A description of the machine."""
        if self.chip is None:
            return f"{self.num_devices} simulated CPU device{'' if self.num_devices == 1 else 's'}"
        if self.platform == "gpu":
            hosts = "1 host" if self.shape[0] == 1 else f"{self.shape[0]} hosts"
            return f"{self.num_devices} x {self.chip.title} ({hosts} of {self.shape[1]})"
        torus = "x".join(map(str, self.shape))
        slices = f"{self.num_slices} slices of " if self.num_slices > 1 else ""
        return f"{slices}{self.devices_per_slice // self.chip.devices_per_chip} x {self.chip.title} (torus {torus})"


def mesh_on(target: Target, mesh: str) -> MeshSpec:
    """Parses a mesh and resolves it for a target; an error also suggests a target that the mesh would fill.

    Example:
        >>> str(mesh_on(parse_target("h200:8x8"), "fsdp:-1,tp:8"))
        'fsdp:8,tp:8'
        >>> mesh_on(parse_target("h200:8x8"), "fsdp:32")
        Traceback (most recent call last):
        meshwright.errors.MeshError: the mesh fsdp=32 needs 32 devices, but there are 64.
        hint: use fsdp:64, or plan for h200:4x8
    """
    spec = parse_mesh(mesh)

    def other_target(count: int) -> str:
        fits = resized(target, count, slices=math.prod(spec.dcn_sizes) if target.platform == "tpu" else 1)
        return "" if fits is None else f"plan for {fits}"

    return spec.resolve(target.num_devices, instead=other_target)


def check_slices(target: Target, spec: MeshSpec) -> None:
    """Raises a `MeshError` unless the `@dcn` axes of a resolved mesh cross the slices of a target, and no more.

    Example:
        >>> from meshwright.mesh.string import parse_mesh
        >>> check_slices(parse_target("v5p:4x4x8*4"), parse_mesh("dp:4@dcn,fsdp:128"))
        >>> check_slices(parse_target("v5p:4x4x8*4"), parse_mesh("fsdp:512"))
        Traceback (most recent call last):
        meshwright.errors.MeshError: v5p:4x4x8*4 has 4 slices, but no axis of mesh 'fsdp:512' crosses them.
        hint: write fsdp:512@dcn=4, or put @dcn on another axis.
    """
    crossed, slices = math.prod(spec.dcn_sizes), target.num_slices
    if target.platform != "tpu" or crossed == slices:
        return
    found = f"{target} has {slices} slice{'' if slices == 1 else 's'}, but "
    if slices == 1:
        hint = "drop @dcn, or name the slices, e.g. --target v5p:4x4x8*4."
        raise MeshError(f"{found}mesh {str(spec)!r} crosses {crossed}.", hint=hint)
    hint = f"write {_crossing(spec, slices)}, or put @dcn on another axis."
    said = f"mesh {str(spec)!r} crosses {crossed}" if spec.is_hybrid else f"no axis of mesh {str(spec)!r} crosses them"
    raise MeshError(f"{found}{said}.", hint=hint)


def _crossing(spec: MeshSpec, slices: int) -> MeshSpec:
    """Returns a resolved mesh with `@dcn` on one axis that crosses all slices, best on `dp`, or else on several."""
    single = sorted((axis for axis in spec.axes if axis.size % slices == 0), key=lambda axis: axis.name != "dp")
    left, axes = slices, []
    for axis in spec.axes:
        crossed = math.gcd(axis.size, left) if not single or axis is single[0] else 1
        left //= crossed
        axes.append(replace(axis, dcn=None if 1 < crossed == axis.size else crossed))
    assert left == 1, "the sizes of a resolved mesh multiply to the devices of all slices"
    return MeshSpec(tuple(axes), spec.plain_order)


def parse_target(text: str | Target) -> Target:
    """Parses the name of a machine; an error suggests the nearest valid name.

    Example:
        >>> parse_target("v5p:4x4x8*4").num_devices, parse_target("h200:8x8").memory_bytes // 2**30
        (512, 139)
        >>> parse_target("v5p:128")
        Traceback (most recent call last):
        meshwright.errors.MeshError: 'v5p:128' is not a target: the torus of a v5p has 3 dims; got 1.
        hint: use v5p:4x4x8
    """
    if isinstance(text, Target):
        return text
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise MeshError(f"{text!r} is not a target.", hint=_EXAMPLES)
    written = match["kind"].lower()
    kind = ALIASES.get(written, written)
    shape = tuple(int(size) for size in match["shape"].lower().split("x"))
    slices = int(match["slices"] or 1)
    known = ("cpu", *(chip.name for chip in CHIPS))
    if kind not in known:
        hint = did_you_mean(kind, known) or f"known kinds: {', '.join(known)}."
        raise MeshError(f"{text!r} is not a target.", hint=f"{hint} {_EXAMPLES}")
    problem, nearest = _problem(kind, chip_of(kind), shape, slices)
    if problem:
        raise MeshError(f"{text!r} is not a target: {problem}.", hint=f"use {nearest}")
    return Target(kind, shape, slices)


def enlarged(target: Target, factor: int) -> Target | None:
    """Returns a machine with `factor` times the chips per slice, with full hosts first; None if there is none.

    Example:
        >>> print(enlarged(parse_target("h200:1x4"), 4), enlarged(parse_target("v5e:4x4"), 4))
        h200:2x8 v5e:8x8
    """
    return _with_chips(target, math.prod(target.shape) * factor)


def resized(target: Target, num_devices: int, *, slices: int = 1) -> Target | None:
    """Returns a machine of the same kind with another number of devices; None if there is none.

    Example:
        >>> print(resized(parse_target("h200:8x8"), 32), resized(parse_target("v5p:4x4x4*4"), 128, slices=2))
        h200:4x8 v5p:4x4x4*2
        >>> print(resized(parse_target("v5p:4x4x8"), 48))
        None
    """
    each = slices * (1 if target.chip is None else target.chip.devices_per_chip)
    if num_devices % each or (slices > 1 and target.platform != "tpu"):
        return None
    other = replace(target, num_slices=slices)
    same = math.prod(target.shape) == num_devices // each
    return other if same else _with_chips(other, num_devices // each)


def _with_chips(target: Target, count: int) -> Target | None:
    if target.chip is None:
        shape: tuple[int, ...] = (count,)
    elif target.platform == "gpu":
        each = min(target.chip.devices_per_host, count)
        shape = (count // each, each)
    else:
        shape = _torus(count, target.chip.links.torus_dims)
    if math.prod(shape) != count or _problem(target.kind, target.chip, shape, target.num_slices)[0]:
        return None
    return Target(target.kind, shape, target.num_slices)


def _problem(kind: str, chip: Chip | None, shape: tuple[int, ...], slices: int) -> tuple[str, str]:
    """Returns the problem with a shape and the nearest valid name; "" and "" if there is none."""
    count = math.prod(shape)
    if count == 0 or slices == 0:
        return "sizes must be at least 1", _EXAMPLES.removeprefix("use ")
    if count * slices > MOST_CHIPS:
        return f"at most {MOST_CHIPS:,} chips can be planned; got {count * slices:,}", _EXAMPLES.removeprefix("use ")
    if slices > 1 and (chip is None or chip.platform != "tpu"):
        return "only TPUs have slices", f"{kind}:{'x'.join(map(str, (shape[0] * slices, *shape[1:])))}"
    if chip is None:
        return ("", "") if len(shape) == 1 else ("simulated CPU devices take one number", f"cpu:{count}")
    if chip.platform == "gpu":
        each = max(size for size in range(1, 9) if count % size == 0)
        nearest = f"{kind}:{count // each}x{each}"
        if len(shape) != 2:
            return f"GPUs take two sizes, hosts x GPUs per host; got {len(shape)}", nearest
        if shape[1] > chip.devices_per_host:
            return f"a host has at most {chip.devices_per_host} GPUs; got {shape[1]}", nearest
        return "", ""
    dims = chip.links.torus_dims
    nearest = f"{kind}:{'x'.join(map(str, _torus(count, dims)))}"
    if len(shape) != dims:
        return f"the torus of a {kind} has {dims} dims; got {len(shape)}", nearest
    fits = (1, 2, 4, 8, 16) if dims == 2 else (1, 2)
    for size in shape:
        if size not in fits and (dims == 2 or size % 4):
            sizes = "1, 2, 4, 8 or 16" if dims == 2 else "1, 2 or a multiple of 4"
            return f"a torus dim of a {kind} must be {sizes}; got {size}", nearest
    if count > chip.links.domain // chip.devices_per_chip:
        largest = chip.links.domain // chip.devices_per_chip
        return f"a slice has at most {largest} chips; got {count}", f"{nearest}, or several slices: {kind}:..*2"
    return "", ""


def _torus(count: int, dims: int) -> tuple[int, ...]:
    """Returns the torus closest to this number of chips, with sizes as equal as possible."""
    sizes = [1, 2, 4, 8, 16] if dims == 2 else [1, 2, 4, 8, 16, 32]
    shapes = itertools.combinations_with_replacement(sizes, dims)
    return min(shapes, key=lambda shape: (abs(math.prod(shape) - count), max(shape) / min(shape)))
