"""From a difference to its likely cause: one small function per cause, each on plain arrays.

Every function returns a `Cause`, or None where it does not apply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.verify.compare import Array, Named, Ratio, apart, largest, ratio_of

Blocks = Mapping[Any, tuple[slice, ...]]
"""What each device holds of a leaf, as `NamedSharding.devices_indices_map` says."""

# How close a ratio has to be to an axis size to be taken for it.
CLOSE = 1e-3


@dataclass(frozen=True)
class Cause:
    """Why a mesh probably computes something else: `kind` in a word or two, what is seen, and what to do about it."""

    kind: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}\nfix: {self.fix}"


# --- Sums over devices ---


def reduction(ratio: Ratio | None, axis_sizes: Mapping[str, int], *, what: str) -> Cause | None:
    """A constant ratio that is an axis size, or a product of some: a sum over that axis is missing or done twice.

    Example:
        >>> print(reduction(Ratio(4.0, 4.0, 4.0, 10), {"dp": 2, "tp": 4}, what="the gradient").text)
        the gradient is 4x: summed twice over `tp` (4 devices), or a mean that was taken on one side only.
    """
    if ratio is None or not ratio.is_constant or ratio.median <= 0:
        return None
    for power in (1, 2):
        for inverse in (False, True):
            wanted = 1 / ratio.median if inverse else ratio.median
            axes = axes_with_product(wanted ** (1 / power), axis_sizes)
            if axes:
                return _reduction(wanted, axes, axis_sizes, what=what, inverse=inverse, squared=power == 2)
    return None


def _reduction(
    factor: float, axes: list[tuple[str, ...]], sizes: Mapping[str, int], *, what: str, inverse: bool, squared: bool
) -> Cause:
    named = [" x ".join(f"`{axis}`" for axis in group) for group in axes]
    count = math.prod(sizes[axis] for axis in axes[0])
    over = f"{' or '.join(named)} ({count} devices)"
    times = f"{'1/' if inverse else ''}{round(factor)}"
    square = f", the square of {count}: something that is squared later" if squared else ""
    if inverse:
        seen = f"{what} is {times} of what it should be{square}: not summed over {over}, or a mean where a sum belongs."
        fix = "jax.lax.psum partial results over that axis, once; pmean only where devices hold whole results."
    else:
        seen = f"{what} is {times}x{square}: summed twice over {over}, or a mean that was taken on one side only."
        fix = "sum over that axis once. What is the same on all its devices (a psum's result) must not be summed again."
    return Cause("reduction", seen, fix)


def axes_with_product(number: float, axis_sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the smallest groups of axes whose sizes multiply to a number; none for 1, which is no factor.

    Example:
        >>> axes_with_product(4, {"dp": 2, "fsdp": 2, "tp": 4})
        [('tp',)]
        >>> axes_with_product(2, {"dp": 2, "fsdp": 2, "tp": 4})
        [('dp',), ('fsdp',)]
    """
    axes = [axis for axis, size in axis_sizes.items() if size > 1]
    for length in range(1, len(axes) + 1):
        groups = [
            group
            for group in itertools.combinations(axes, length)
            if math.isclose(math.prod(axis_sizes[axis] for axis in group), number, rel_tol=CLOSE)
        ]
        if groups:
            return groups
    return []


def copies(what: str, axes: Sequence[str]) -> Cause | None:
    """Devices that should hold the same value hold different ones: nobody summed over the axes along which they do."""
    if not axes:
        return None
    named = ", ".join(f"`{axis}`" for axis in axes)
    return Cause(
        "copies",
        f"{what} should be the same on all devices along {named}, but each holds its own: no reduction over {named}.",
        "sum it over that axis (jax.lax.psum), and leave check_vma on in shard_map: JAX then refuses such a program.",
    )


def copies_along(array: Any, *, allowed: float) -> tuple[str, ...]:
    """Returns the mesh axes along which an array's copies differ by more than `allowed`."""
    sharding = array.sharding
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or len(sharding.device_set) == 1:
        return ()
    held = {shard.device: (shard.index, np.asarray(shard.data)) for shard in array.addressable_shards}
    found = []
    for number, axis in enumerate(mesh.axis_names):
        rows = np.moveaxis(mesh.devices, number, 0).reshape(mesh.devices.shape[number], -1)
        for first, other in ((rows[0, line], device) for row in rows[1:] for line, device in enumerate(row)):
            same_part = first in held and other in held and held[first][0] == held[other][0]
            if same_part and _apart(held[first][1], held[other][1]) > allowed:
                found.append(axis)
                break
    return tuple(found)


def one_block_of_rows(
    measured: Array, by_block: Sequence[Array], axes: Sequence[str], *, what: str, tolerance: float
) -> Cause | None:
    """The mesh's value is that of one device's rows, up to a factor: the others' were never added.

    Example:
        >>> rows = [np.array([1.0, 2.0]), np.array([3.0, 5.0])]
        >>> print(one_block_of_rows(rows[1] / 2, rows, ["dp"], what="the gradient of `w`", tolerance=1e-5).text)
        the gradient of `w` is that of the rows of device 1 of 2 alone, times 0.5: no reduction over `dp`.
    """
    matching = []
    for number, own in enumerate(by_block):
        ratio = ratio_of(own, measured)
        # A single number is some multiple of any other.
        if ratio is not None and ratio.is_constant and (np.size(own) > 1 or abs(ratio.median - 1) <= 10 * tolerance):
            matching.append((number, ratio.median))
    if not matching or len(matching) == len(by_block):
        return None
    (number, factor), *_ = matching
    named = " x ".join(f"`{axis}`" for axis in axes)
    times = "" if abs(factor - 1) < CLOSE else f", times {factor:.4g}"
    return Cause(
        "rows",
        f"{what} is that of the rows of device {number} of {len(by_block)} alone{times}: no reduction over {named}.",
        "sum over the axes that split the batch. The step does so for any loss that returns what its own rows add: "
        "look for stop_gradient, axis_index and custom gradients in the loss.",
    )


def mean_of_means(
    measured: float, reference: float, by_block: Sequence[float], *, tolerance: float, blocks: str
) -> Cause | None:
    """The mesh's loss is the plain average of its blocks' losses, and the one device's is not.

    Example:
        >>> cause = mean_of_means(2.0, 1.5, [1.0, 3.0], tolerance=1e-5, blocks="2 devices")
        >>> print(cause.text)
        the loss is the average of the losses of 2 devices, which weigh the same though not equally much counts on each.
    """
    if len(by_block) < 2:
        return None
    mean = float(np.mean(by_block))
    allowed = 10 * tolerance * max(abs(mean), largest(np.asarray(by_block)))
    if not abs(measured - mean) <= allowed or abs(reference - mean) <= allowed:
        return None
    return Cause(
        "mean of means",
        f"the loss is the average of the losses of {blocks}, which weigh the same though not equally much counts on "
        "each.",
        "return the loss as a (sum, count) pair instead of a mean: ((losses * mask).sum(), mask.sum()).",
    )


# --- Parts of a leaf ---


def blocks_of(blocks: Blocks, shape: Sequence[int]) -> dict[tuple[tuple[int, int], ...], list[Any]]:
    """Returns the distinct parts that a leaf is held in, as (start, stop) per dim, with the devices that hold each."""
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in blocks.items():
        part = tuple(entry.indices(size)[:2] for entry, size in zip(index, shape, strict=True))
        parts.setdefault(part, []).append(device)
    return parts


def one_part(reference: Array, measured: Array, blocks: Blocks, *, allowed: float, what: str) -> Cause | None:
    """Only some devices' parts of a leaf are different.

    Example:
        >>> right = np.ones(8)
        >>> wrong = np.where(np.arange(8) < 4, right, 5.0)
        >>> blocks = {"cpu:0": (slice(0, 4),), "cpu:1": (slice(4, 8),)}
        >>> print(one_part(right, wrong, blocks, allowed=1e-5, what="`w`").text)
        `w` differs only in [4:8], which is 1 of its 2 parts: what cpu:1 contributes.
    """
    parts = blocks_of(blocks, np.shape(reference))
    bad = {part: held for part, held in parts.items() if _apart(_cut(reference, part), _cut(measured, part)) > allowed}
    if not bad or len(bad) == len(parts):
        return None
    shown = " and ".join(f"[{', '.join(f'{start}:{stop}' for start, stop in part)}]" for part in list(bad)[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    devices = ", ".join(str(device) for held in list(bad.values())[:3] for device in held[:4])
    return Cause(
        "one part",
        f"{what} differs only in {shown}{more}, which is {len(bad)} of its {len(parts)} parts: "
        f"what {devices}{' ...' if more else ''} contribute{'s' if ',' not in devices else ''}.",
        "look at what depends on the device's place: axis_index, the ends of a ring, padding, the last slice.",
    )


# --- Everything else ---


def random_numbers() -> Cause:
    """The mesh agrees with one device once there is no random key."""
    return Cause(
        "random numbers",
        "without a random key (rng=None) both agree: random numbers depend on the mesh.",
        "draw with the rows as leading dim from the key that the loss gets (a meshwright.parallel.row_key), or use "
        "meshwright.parallel.dropout; never fold in a device's index.",
    )


def initial(*, repeatable: bool) -> Cause:
    """Initial parameters differ; `repeatable` says whether `init` gave the same bits twice on one device."""
    if repeatable:
        return Cause(
            "init",
            "init gives other parameters on this mesh: it looks at the mesh or a device's index, or draws numbers in a "
            "way that depends on how they are split (an rbg key, say).",
            "draw everything from the key, with jax.random and a threefry key, and let init_state place it.",
        )
    return Cause(
        "init",
        "init gives other parameters each time it is compiled, even on one device: it uses something besides its key.",
        "draw everything from the key; no numpy.random, no counters, no time.",
    )


def backward() -> Cause:
    """The loss agrees and its gradients do not."""
    return Cause(
        "backward",
        "the loss agrees and gradients do not: a reduction in the backward pass is missing, doubled, or misplaced.",
        "look at custom_vjp, stop_gradient and shard_map with check_vma=False: the gradient of psum is a copy, that of "
        "a copy is psum, that of all_gather is psum_scatter.",
    )


def optimizer(
    reference: Named,
    measured: Named,
    blocks: Mapping[str, Blocks],
    *,
    after_one_step: bool,
    allowed: Mapping[str, float],
) -> Cause:
    """Gradients agree and parameters after some steps do not; trees are changes of parameters.

    Args:
        after_one_step: whether parameters still agreed after the first step.
        allowed: for each leaf, the difference that is fine.
    """
    fix = "update whole arrays: outside of shard_map, as make_train_step does."
    for name, expected in reference.items():
        parts = blocks_of(blocks[name], np.shape(expected))
        ratios = [ratio_of(_cut(expected, part), _cut(measured[name], part)) for part in parts]
        if len(parts) < 2 or _apart(expected, measured[name]) <= allowed[name]:
            continue
        medians = [ratio.median for ratio in ratios if ratio is not None and ratio.is_constant]
        if len(medians) == len(ratios) and any(abs(median - 1) > CLOSE for median in medians):
            shown = ", ".join(f"{median:.4g}" for median in medians[:4]) + (", ..." if len(medians) > 4 else "")
            seen = (
                f"gradients agree, but each device's part of `{name}` is updated with a factor of its own ({shown}): "
                "the optimizer takes a norm or a mean of a slice for that of the parameter."
            )
            return Cause("optimizer", seen, fix)
    if after_one_step:
        return Cause(
            "optimizer",
            "gradients of the first step and parameters after it agree, and later parameters do not: rounding grows, "
            "or something depends on the number of the step.",
            "compare with num_steps=1 and with a smaller learning rate; if both agree, it is rounding.",
        )
    seen = "gradients agree and updated parameters do not: the optimizer looks at slices, or at more than gradients."
    return Cause("optimizer", seen, fix)


def not_finite(reference: Array, measured: Array, *, what: str) -> Cause | None:
    """Something is not finite on the mesh that is on one device."""
    expected, got = np.asarray(reference, np.float64), np.asarray(measured, np.float64)
    bad = int((np.isfinite(expected) & ~np.isfinite(got)).sum())
    if not bad:
        return None
    return Cause(
        "not finite",
        f"{what} has {bad} of {got.size} elements that are not finite on the mesh, and are on one device.",
        "look for a division by a device's own count, which may be 0 (return the loss as a (sum, count) pair), for "
        "norms of zeros, and for masked branches: where(valid, f(x), 0) has NaN gradients where f does.",
    )


def axes_alone(agrees: Mapping[str, bool]) -> Cause | None:
    """Nothing more specific was found; says for which axes, each taken alone, the mesh agrees with one device.

    Example:
        >>> print(axes_alone({"dp": True, "tp": False}).text)
        it differs with `tp` alone as well, and agrees with `dp` alone: what is done over `tp` is not right.
    """
    bad = " and ".join(f"`{axis}`" for axis, same in agrees.items() if not same)
    good = " and ".join(f"`{axis}`" for axis, same in agrees.items() if same)
    fix = "look for a sum over it that is missing, doubled or a mean, and for what depends on a device's place on it."
    if bad and not good:
        return Cause("axis", f"what is done over {bad} is not right.", fix)
    if bad:
        return Cause(
            "axis",
            f"it differs with {bad} alone as well, and agrees with {good} alone: what is done over {bad} is not right.",
            fix,
        )
    if good:
        return Cause(
            "axis",
            f"it agrees with each of {good} alone: what is wrong needs several axes.",
            "look for sums over one of several axes that split an array, and for blocks in the order of another mesh.",
        )
    return None


def sees_slices(axes: Sequence[str]) -> Cause | None:
    """A step that cannot be traced in the local view, on a mesh with axes over which the step itself does nothing."""
    if not axes:
        return None
    named = " and ".join(f"`{axis}`" for axis in axes)
    return Cause(
        "local view",
        f"in the local view the loss sees slices along {named}, and has to communicate over it itself.",
        "use the layers of meshwright.parallel or jax.lax.psum there, or the global view alone, where XLA does it.",
    )


def guilty_axes(outcomes: Sequence[tuple[Mapping[str, int], bool]]) -> tuple[str, ...]:
    """Returns the axes that all meshes which differ have, and none of those which agree; outcomes are (sizes, agrees).

    Example:
        >>> guilty_axes([({"dp": 8}, True), ({"dp": 2, "tp": 4}, False), ({"tp": 8}, False)])
        ('tp',)
    """
    bad = [{axis for axis, size in sizes.items() if size > 1} for sizes, agrees in outcomes if not agrees]
    good = [{axis for axis, size in sizes.items() if size > 1} for sizes, agrees in outcomes if agrees]
    if not bad or not good:
        return ()
    return tuple(axis for axis in sorted(set.intersection(*bad)) if not any(axis in axes for axes in good))


def _cut(array: Any, part: Sequence[tuple[int, int]]) -> Array:
    return np.asarray(array)[tuple(slice(start, stop) for start, stop in part)]


def _apart(first: Array, second: Array) -> float:
    return float(apart(first, second).max(initial=0.0))
