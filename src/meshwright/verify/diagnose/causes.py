"""Likely causes of a difference: one small function per cause, on plain arrays.

Each function returns a `Cause`, or None if the cause does not apply.
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
"""The slices of a leaf that each device holds, as returned by `NamedSharding.devices_indices_map`."""

# Relative distance within which a ratio counts as an axis size.
CLOSE = 1e-3


@dataclass(frozen=True)
class Cause:
    """A likely cause of a difference: a short `kind`, the observation (`text`), and how to fix it."""

    kind: str
    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}\nfix: {self.fix}"


# --- Sums over devices ---


def reduction(ratio: Ratio | None, axis_sizes: Mapping[str, int], *, what: str) -> Cause | None:
    """A sum over axes is missing or doubled: the ratio is constant, and equals an axis size or a product of some.

    Example:
        >>> print(reduction(Ratio(4.0, 4.0, 4.0, 10), {"dp": 2, "tp": 4}, what="the loss").text)
        the loss is 4x the single-device value: summed twice over `tp` (4 devices), or a mean became a sum.
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
    square = f" ({count} squared, so the error is squared later)" if squared else ""
    if inverse:
        seen = f"1/{round(factor)} of the single-device value{square}: not summed over {over}, or a sum became a mean."
        fix = "jax.lax.psum partial results over that axis once; use pmean only if each device holds a complete result."
    else:
        seen = f"{round(factor)}x the single-device value{square}: summed twice over {over}, or a mean became a sum."
        fix = "sum over that axis once; a value that is equal on all its devices (a psum's result) is already summed."
    return Cause("reduction", f"{what} is {seen}", fix)


def axes_with_product(number: float, axis_sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the smallest groups of axes (of size 2 or more) whose sizes multiply to `number`."""
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
    """Copies that should be identical differ along some axes, so a reduction over these axes is missing."""
    if not axes:
        return None
    named = ", ".join(f"`{axis}`" for axis in axes)
    return Cause(
        "copies",
        f"{what} should be identical on all devices along {named}, but the copies differ: a reduction is missing.",
        "jax.lax.psum it over that axis, and keep check_vma=True in shard_map, so that JAX rejects such programs.",
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
    """Only the rows of one device contribute: the value on the mesh is a multiple of the value for these rows.

    Example:
        >>> rows = [np.array([1.0, 2.0]), np.array([3.0, 5.0])]
        >>> print(one_block_of_rows(rows[1] / 2, rows, ["dp"], what="the gradient of `w`", tolerance=1e-5).text)
        the gradient of `w` covers only the rows of device 1 of 2 (times 0.5): a reduction over `dp` is missing.
    """
    matching = []
    for number, own in enumerate(by_block):
        ratio = ratio_of(own, measured)
        # Any scalar is a multiple of any other, so scalars have to be equal.
        if ratio is not None and ratio.is_constant and (np.size(own) > 1 or abs(ratio.median - 1) <= 10 * tolerance):
            matching.append((number, ratio.median))
    if not matching or len(matching) == len(by_block):
        return None
    (number, factor), *_ = matching
    named = " x ".join(f"`{axis}`" for axis in axes)
    times = "" if abs(factor - 1) < CLOSE else f" (times {factor:.4g})"
    where = f"device {number} of {len(by_block)}{times}"
    return Cause(
        "rows",
        f"{what} covers only the rows of {where}: a reduction over {named} is missing.",
        "sum over the axes that split the batch. The train step does so unless the loss drops the contribution of "
        "some rows: look for stop_gradient, axis_index and custom gradients in the loss.",
    )


def mean_of_means(
    measured: float, reference: float, by_block: Sequence[float], *, tolerance: float, blocks: str
) -> Cause | None:
    """The loss on the mesh is the unweighted mean over blocks of rows, and the loss on one device is not.

    Example:
        >>> cause = mean_of_means(2.0, 1.5, [1.0, 3.0], tolerance=1e-5, blocks="2 devices")
        >>> print(cause.text)
        the loss is an unweighted mean over 2 devices, but they hold different numbers of valid elements.
    """
    if len(by_block) < 2:
        return None
    mean = float(np.mean(by_block))
    allowed = 10 * tolerance * max(abs(mean), largest(np.asarray(by_block)))
    if not abs(measured - mean) <= allowed or abs(reference - mean) <= allowed:
        return None
    return Cause(
        "mean of means",
        f"the loss is an unweighted mean over {blocks}, but they hold different numbers of valid elements.",
        "return the loss as a (sum, count) pair instead of a mean: ((losses * mask).sum(), mask.sum()).",
    )


# --- Shards of a leaf ---


def blocks_of(blocks: Blocks, shape: Sequence[int]) -> dict[tuple[tuple[int, int], ...], list[Any]]:
    """Returns the distinct shards of a leaf, as (start, stop) per dim, with the devices that hold each."""
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in blocks.items():
        part = tuple(entry.indices(size)[:2] for entry, size in zip(index, shape, strict=True))
        parts.setdefault(part, []).append(device)
    return parts


def one_part(reference: Array, measured: Array, blocks: Blocks, *, allowed: float, what: str) -> Cause | None:
    """Only some shards of a leaf differ.

    Example:
        >>> right = np.ones(8)
        >>> wrong = np.where(np.arange(8) < 4, right, 5.0)
        >>> blocks = {"cpu:0": (slice(0, 4),), "cpu:1": (slice(4, 8),)}
        >>> print(one_part(right, wrong, blocks, allowed=1e-5, what="`w`").text)
        `w` differs only in [4:8], 1 of its 2 shards (on cpu:1).
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
        f"{what} differs only in {shown}{more}, {len(bad)} of its {len(parts)} shards "
        f"(on {devices}{', ...' if more else ''}).",
        "check code that depends on the device's position: axis_index, the ends of a ring, padding, the last slice.",
    )


# --- Other causes ---


def random_numbers(*, same: bool = False, line: str = "") -> Cause:
    """The mesh agrees with one device if the loss gets no random key.

    Args:
        same: whether every device draws the same numbers.
        line: the line that draws them.
    """
    where = f" at {line}" if line else ""
    seen = (
        f"every device draws the same random numbers{where}: the results agree without a random key (rng=None)."
        if same
        else f"the results agree without a random key (rng=None), so the random numbers{where} depend on the mesh."
    )
    return Cause(
        "random numbers",
        seen,
        "draw arrays with rows as the leading dim from the loss's key (a meshwright.parallel.row_key), or use "
        "meshwright.parallel.dropout; never fold in a device index, and never unwrap the key.",
    )


def initial(*, repeatable: bool) -> Cause:
    """Initial parameters differ; `repeatable` says whether `init` gave the same bits twice on one device."""
    if repeatable:
        return Cause(
            "init",
            "init returns different parameters on this mesh: it reads the mesh or a device index, or its random "
            "numbers depend on the sharding (as with rbg keys).",
            "draw everything from the key with jax.random and a threefry key, and let init_state place the result.",
        )
    return Cause(
        "init",
        "init returns different parameters each time it is compiled, even on one device: it uses more than its key.",
        "draw everything from the key; do not use numpy.random, counters or the time.",
    )


def backward() -> Cause:
    """The loss agrees but its gradients do not."""
    return Cause(
        "backward",
        "the loss agrees but the gradients do not: a reduction in the backward pass is missing, doubled or misplaced.",
        "check custom_vjp, stop_gradient and shard_map with check_vma=False: the transpose of psum is a copy, of a "
        "copy psum, and of all_gather psum_scatter.",
    )


def optimizer(
    reference: Named,
    measured: Named,
    blocks: Mapping[str, Blocks],
    *,
    after_one_step: bool,
    allowed: Mapping[str, float],
) -> Cause:
    """Gradients agree but parameters after the steps do not.

    Args:
        reference, measured: the change of each parameter in the first step, on one device and on the mesh.
        after_one_step: whether parameters still agree after the first step.
        allowed: the largest acceptable difference of each parameter.
    """
    fix = "update whole arrays outside shard_map, as make_train_step does."
    for name, expected in reference.items():
        parts = blocks_of(blocks[name], np.shape(expected))
        ratios = [ratio_of(_cut(expected, part), _cut(measured[name], part)) for part in parts]
        if len(parts) < 2 or _apart(expected, measured[name]) <= allowed[name]:
            continue
        medians = [ratio.median for ratio in ratios if ratio is not None and ratio.is_constant]
        if len(medians) == len(ratios) and any(abs(median - 1) > CLOSE for median in medians):
            shown = ", ".join(f"{median:.4g}" for median in medians[:4]) + (", ..." if len(medians) > 4 else "")
            seen = (
                f"gradients agree, but the update of each shard of `{name}` is off by a different factor ({shown}): "
                "the optimizer takes a norm or mean per shard instead of per parameter."
            )
            return Cause("optimizer", seen, fix)
    if after_one_step:
        return Cause(
            "optimizer",
            "gradients and parameters agree in the first step but parameters differ later: rounding errors grow, or "
            "an update depends on the step number.",
            "compare with num_steps=1 and with a smaller learning rate; if both agree, it is rounding.",
        )
    seen = "gradients agree but updated parameters do not: the optimizer sees shards, or uses more than gradients."
    return Cause("optimizer", seen, fix)


def metric(name: str, parts: str) -> Cause:
    """Loss and gradients agree but a metric does not; the loss sees `parts` of the batch one by one."""
    over = f"the values of {parts} do not combine to that of the whole batch" if parts else "it depends on the mesh"
    return Cause(
        "metric",
        f"loss and gradients agree but the metric `{name}` does not: {over}.",
        "declare how it combines: metrics.Mean(x, weight=count), Sum(x), Max(x) or Min(x), or a (sum, count) pair. "
        "Compute a nonlinear function of a mean, such as a perplexity, from the logged mean.",
    )


def model_state(name: str, parts: str) -> Cause:
    """Loss and gradients agree but the model state does not."""
    over = f"{parts} update it from their own rows" if parts else "its update depends on the mesh"
    return Cause(
        "model state",
        f"loss and gradients agree but the model state `{name}` does not: {over}.",
        "use the global view, in which statistics cover the whole batch; or, in the local view, layers that "
        "synchronize their statistics (axis_name=...) and the right model_state_reduce.",
    )


def not_finite(reference: Array, measured: Array, *, what: str) -> Cause | None:
    """Some elements are finite on one device but not on the mesh."""
    expected, got = np.asarray(reference, np.float64), np.asarray(measured, np.float64)
    bad = int((np.isfinite(expected) & ~np.isfinite(got)).sum())
    if not bad:
        return None
    return Cause(
        "not finite",
        f"{bad} of {got.size} elements of {what} are finite on one device but not on the mesh.",
        "look for a division by a per-device count that can be 0 (return the loss as a (sum, count) pair), norms of "
        "zero vectors, and masked branches: where(valid, f(x), 0) has NaN gradients wherever f has.",
    )


def axes_alone(agrees: Mapping[str, bool]) -> Cause | None:
    """Names the axes that differ from one device when each is used alone; the fallback if no other cause applies.

    Example:
        >>> print(axes_alone({"dp": True, "tp": False}).text)
        it also differs with `tp` alone, and agrees with `dp` alone: the error is in the computation over `tp`.
    """
    bad = " and ".join(f"`{axis}`" for axis, same in agrees.items() if not same)
    good = " and ".join(f"`{axis}`" for axis, same in agrees.items() if same)
    if bad:
        alone = f"it also differs with {bad} alone, and agrees with {good} alone: " if good else ""
        return Cause(
            "axis",
            f"{alone}the error is in the computation over {bad}.",
            "look for a sum over that axis that is missing, doubled or replaced by a mean, and for code that depends "
            "on a device's position along it.",
        )
    if good:
        return Cause(
            "axis",
            f"it agrees with each of {good} alone: the error needs several axes.",
            "look for a sum over only one of several axes that split an array, and for blocks in another mesh's order.",
        )
    return None


def sees_slices(axes: Sequence[str]) -> Cause | None:
    """The step cannot be traced in the local view, and the mesh has axes over which only the loss can communicate."""
    if not axes:
        return None
    named = " and ".join(f"`{axis}`" for axis in axes)
    return Cause(
        "local view",
        f"in the local view the loss sees shards along {named} and has to communicate over it.",
        "use the layers of meshwright.parallel or jax.lax.psum, or only the global view, in which XLA communicates.",
    )


def guilty_axes(outcomes: Sequence[tuple[Mapping[str, int], bool]]) -> tuple[str, ...]:
    """Returns the axes present in every mesh that differs and in no mesh that agrees; outcomes are (sizes, agrees).

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
