"""The chunks of `linear_cross_entropy`: the sums of one chunk of logits, their gradient, and how rows are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from meshwright.mesh.axes import axis_index, axis_size, pcast_alike
from meshwright.parallel.kernels.gradient_kernels import softmax_gradient
from meshwright.specs import ceil_div

# Each chunk reads and writes the head's float32 gradient. On an H200, chunks of 1024 rows take 6% longer than chunks of
# 2048, and larger ones up to 2% less, which small vocabularies have memory for.
CHUNK_ROWS, CHUNK_BYTES = 2048, 512 * 2**20
LOWEST = float(jnp.finfo(jnp.float32).min)  # Not -inf, because -inf - -inf is NaN.


class LossSums(NamedTuple):
    """Weighted sums over the tokens of a batch, in float32. Only `total` has a gradient."""

    total: Any
    """Cross-entropy with label smoothing, plus z-loss."""
    cross_entropy: Any
    """`-log p(target)`, without label smoothing and z-loss."""
    z_loss: Any
    """`z_loss * log(sum(exp(logits)))**2`."""
    count: Any
    """The weights."""
    correct: Any
    """Tokens whose target has the largest logit; ties go to the lowest token id."""


class GroupedLossSums(NamedTuple):
    """`LossSums` and, in addition, the sums of groups of tokens."""

    total: Any
    cross_entropy: Any
    z_loss: Any
    count: Any
    correct: Any
    by_group: Any
    """`total` and `count` of each group, `[2, num_groups]`."""


@dataclass(frozen=True)
class ChunkOptions:
    """Checked options of `linear_cross_entropy`, as one device applies them to a chunk."""

    axis: str | None
    gathers: bool
    batch_axes: tuple[str, ...]
    island: tuple[str, ...]
    vocab_size: int
    z_loss: float
    label_smoothing: float
    soft_cap: float | None
    chunk_rows: int | None
    logits_dtype: Any
    kernels: bool | None
    num_groups: int


def chunk_loss(plan: ChunkOptions, products: Any, targets: Any, weights: Any, groups: Any) -> tuple[LossSums, Any]:
    """Returns the sums of a chunk, and a function that returns the gradient of `total` for `products`."""
    num_columns, last = products.shape[-1], products.ndim - 1
    places, first = lax.broadcasted_iota(jnp.int32, products.shape, last), axis_index(plan.axis) * num_columns
    is_real: Any = True
    if plan.vocab_size < num_columns * axis_size(plan.axis):
        is_real = places < plan.vocab_size - first
    is_target = places == (targets - first)[..., None]
    capped = _cap(products, plan.soft_cap)
    logits = jnp.where(is_real, capped, LOWEST)

    # Find the largest before the cap: capped values that are computed twice may differ in the last bit.
    peak = jnp.where(is_real, products, LOWEST).max(axis=-1)
    largest, is_peak = _cap(peak, plan.soft_cap), is_real & (products == peak[..., None])
    # Take the target's logit relative to the largest, so that XLA reuses the pass that sums the exponentials.
    below, is_here = logits - largest[..., None], (targets >= first) & (targets < first + num_columns)
    found = _Found(
        largest=largest,
        exponentials=jnp.exp(below).sum(axis=-1),
        of_target=jnp.where(is_here, jnp.where(is_target, below, 0.0).sum(axis=-1) + largest, 0.0),
        place=jnp.where(is_peak, places, num_columns).min(axis=-1),
        logits=jnp.where(is_real, logits, 0.0).sum(axis=-1) if plan.label_smoothing else jnp.zeros_like(largest),
    )
    if plan.axis is not None:
        found = _over_devices(found, plan.axis, num_columns)
    log_sum = found.largest + jnp.log(found.exponentials)

    factor, smoothing = _factors(plan, targets, weights), plan.label_smoothing
    cross_entropy = log_sum - found.of_target
    smoothed = cross_entropy + smoothing * (found.of_target - found.logits / plan.vocab_size)
    sums = _sums(plan, smoothed, cross_entropy, log_sum, found.place == targets, factor, weights, groups)

    def make_dlogits() -> Any:
        of_softmax = factor * (1 + 2 * plan.z_loss * log_sum) if plan.z_loss else factor
        dlogits = of_softmax[..., None] * jnp.exp(logits - log_sum[..., None])
        dlogits = dlogits - jnp.where(is_target, (factor * (1 - smoothing))[..., None], 0.0)
        if smoothing:
            dlogits = dlogits - jnp.where(is_real, (factor * (smoothing / plan.vocab_size))[..., None], 0.0)
        return dlogits if plan.soft_cap is None else dlogits * (1 - jnp.square(capped / plan.soft_cap))

    return sums, make_dlogits


def _factors(plan: ChunkOptions, targets: Any, weights: Any) -> Any:
    """Returns the weights, with NaN for targets outside the vocabulary whose weight is not zero."""
    is_valid = (targets >= 0) & (targets < plan.vocab_size)
    return jnp.where((weights != 0) & ~is_valid, jnp.nan, weights)


def _sums(
    plan: ChunkOptions,
    smoothed: Any,
    cross_entropy: Any,
    log_sum: Any,
    correct: Any,
    factor: Any,
    weights: Any,
    groups: Any,
) -> LossSums:
    def counted(terms: Any, factor: Any) -> Any:
        return jnp.where(weights != 0, terms * factor, 0.0)

    def add_up(terms: Any, factor: Any = factor) -> Any:
        return counted(terms, factor).sum()

    z_loss = plan.z_loss * log_sum**2
    sums = LossSums(
        total=add_up(smoothed + z_loss),
        cross_entropy=add_up(cross_entropy),
        z_loss=add_up(z_loss),
        count=add_up(1.0, weights),
        correct=add_up(correct, weights),
    )
    if groups is None:
        return sums
    # A comparison with every group fuses with the sum, unlike a scatter; there are few groups.
    terms = jnp.stack([counted(smoothed + z_loss, factor), counted(1.0, weights)])
    is_in = groups[..., None] == jnp.arange(plan.num_groups)
    by_group = jnp.where(is_in, terms[..., None], 0.0).sum(axis=tuple(range(1, terms.ndim)))
    grouped: Any = GroupedLossSums(*sums, by_group)
    return grouped  # type: ignore[no-any-return]  # has the fields of `LossSums`


def chunk_by_kernel(plan: ChunkOptions, products: Any, targets: Any, weights: Any, groups: Any) -> tuple[LossSums, Any]:
    """Returns the sums of a chunk and the gradient of `total` for `products`, from the Pallas kernel."""
    factor = _factors(plan, targets, weights)
    flat = products.reshape(-1, products.shape[-1]), targets.ravel(), factor.ravel()
    found = softmax_gradient(*pcast_alike(*flat), z_loss=plan.z_loss)
    log_sum, of_target, place = (part.reshape(targets.shape) for part in found[1:])
    cross_entropy = log_sum - of_target
    sums = _sums(plan, cross_entropy, cross_entropy, log_sum, place == targets, factor, weights, groups)
    return sums, found.d_logits.reshape(products.shape)


def _cap(values: Any, soft_cap: float | None) -> Any:
    return values if soft_cap is None else soft_cap * jnp.tanh(values / soft_cap)


class _Found(NamedTuple):
    """Statistics of each token's logits, over this device's columns or over all columns."""

    largest: Any
    exponentials: Any  # Sum of exp(logits - largest).
    of_target: Any
    place: Any  # Index of the (first) largest logit.
    logits: Any  # Sum of the logits.


def _over_devices(found: _Found, axis: str, num_columns: int) -> _Found:
    """Combines the statistics of all devices along an axis, in one all-gather."""
    everyone = lax.all_gather(jnp.stack([part.astype(jnp.float32) for part in found], axis=-1), axis, to="invarying")
    largest, exponentials, of_target, place, logits = (everyone[..., index] for index in range(len(found)))
    top = largest.max(axis=0)
    of_device = lax.broadcasted_iota(jnp.int32, place.shape, 0) * num_columns
    place = jnp.where(largest == top, place.astype(jnp.int32) + of_device, jnp.iinfo(jnp.int32).max)
    return _Found(
        largest=top,
        exponentials=(exponentials * jnp.exp(largest - top)).sum(axis=0),
        of_target=of_target.sum(axis=0),
        place=place.min(axis=0),
        logits=logits.sum(axis=0),
    )


# --- Chunks of rows ---


@dataclass(frozen=True)
class RowChunks:
    """How tokens are cut into equal chunks along their last dim.

    Leading dims stay whole if chunks are large enough, and a chunk's rows are `num_chunks` apart. So every chunk has an
    equal share of each device's rows, whichever dim XLA splits over devices.
    """

    shape: tuple[int, ...]
    kept: tuple[int, ...]  # The shape that is cut, along its last dim.
    num_chunks: int
    per_chunk: int

    @classmethod
    def of(cls, shape: tuple[int, ...], row_bytes: int, chunk_rows: int | None) -> RowChunks:
        most = chunk_rows or max(CHUNK_ROWS, CHUNK_BYTES // row_bytes)
        leading = max(1, math.prod(shape[:-1]))
        kept, most = (shape, most // leading) if most >= leading else ((math.prod(shape),), most)
        num_chunks = max(1, ceil_div(kept[-1], most))
        if chunk_rows is None:
            # A chunk more costs less than padding: XLA copies logits whose rows are no multiple of 8 for cuBLAS, twice.
            few_more = range(num_chunks, ceil_div(5 * num_chunks, 4) + 1)
            num_chunks = next((count for count in few_more if kept[-1] % count == 0), num_chunks)
        return cls(shape, kept, num_chunks, ceil_div(kept[-1], num_chunks))

    def cut(self, array: Any, *, features: bool = False) -> Any:
        """Returns `[num_chunks, ..., rows]`, padded with zeros."""
        rest = array.shape[-1:] if features else ()
        array = array.reshape(*self.kept, *rest)
        where = len(self.kept) - 1
        missing = self.per_chunk * self.num_chunks - self.kept[-1]
        if missing:
            array = jnp.pad(array, [(0, missing if dim == where else 0) for dim in range(array.ndim)])
        return jnp.moveaxis(array.reshape(*self.kept[:-1], self.per_chunk, self.num_chunks, *rest), where + 1, 0)

    def join(self, chunks: Any) -> Any:
        """Returns `[..., rows, features]` from chunks, without the padding."""
        where, features = len(self.kept) - 1, chunks.shape[-1]
        joined = jnp.moveaxis(chunks, 0, where + 1)
        joined = joined.reshape(*self.kept[:-1], self.per_chunk * self.num_chunks, features)
        return lax.slice_in_dim(joined, 0, self.kept[-1], axis=where).reshape(*self.shape, features)
