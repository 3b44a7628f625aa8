"""Fused linear layer, softmax and cross-entropy, computed in chunks of rows without storing all logits.

With a vocabulary of 131072, float32 logits take half a megabyte per token, and autodiff keeps them for the backward
pass. Here the logits of each chunk are discarded after use. Recomputing them in the backward pass would add a fourth
matmul to the other three. But the cotangent of a *sum* of losses is one scalar that multiplies every gradient, so the
forward pass computes the gradients next to the logits, and the backward pass only scales them.

If a mesh axis splits the head, `P(None, axis)`, each device computes its columns of the logits. The rows of `x` are
gathered once, their gradients scattered once, and each device sends five numbers per token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.mesh.axes import (
    is_manual,
    pcast_varying,
    summing_dtype,
    varying_axes,
)
from meshwright.mesh.current import current_mesh, require_axes
from meshwright.parallel.kernels.dispatch import uses_kernels
from meshwright.parallel.kernels.gradient_kernels import fits_softmax
from meshwright.parallel.local_map import AxisView, local_map
from meshwright.parallel.logit_chunks import ChunkOptions, LossSums, RowChunks, chunk_by_kernel, chunk_loss
from meshwright.parallel.overlap.ring_loops import dot, dot_rows
from meshwright.parallel.vocabulary import check_targets, checked_vocab_size, own_zeros, whole_numbers


class LossOptions(TypedDict, total=False):
    """Options of `linear_cross_entropy`, for functions that pass them on."""

    axis: str | None
    sequence_parallel: bool
    batch_axes: Sequence[str]
    vocab_size: int | None
    z_loss: float
    label_smoothing: float
    soft_cap: float | None
    chunk_rows: int | None
    logits_dtype: Any
    kernels: bool | None
    groups: Any
    num_groups: int


@jax.named_scope("loss")
def linear_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    axis: str | None = None,
    sequence_parallel: bool = True,
    batch_axes: Sequence[str] = (),
    vocab_size: int | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    chunk_rows: int | None = None,
    logits_dtype: Any = None,
    kernels: bool | None = None,
    groups: jax.Array | None = None,
    num_groups: int = 0,
) -> LossSums:
    """Returns the summed cross-entropy of `x @ head`, holding only one chunk of logits at a time.

    Value and gradient take three matmuls, as if the logits were kept. For per-token losses, use `vocab_cross_entropy`,
    which keeps them. In the local view, the sums are replicated over `axis` and cover this device's rows along data
    axes, as `train.accumulate` expects.

    Args:
        x: `[..., rows, D]`, split by rows over `axis`, or replicated if `sequence_parallel=False`.
        head: `[D, V]`, split by columns. With tied embeddings, pass the transposed table. Its gradient is summed in
            float32.
        targets: `[..., rows]`, replicated over `axis`. One outside the vocabulary makes loss and gradients NaN.
        weights: `[..., rows]`, floats or a mask, without gradient. Tokens of weight zero are ignored, even if NaN.
        axis: the mesh axis that splits the head, or None.
        batch_axes: in a `jit` program, the axes that split the first dim of `x`. The head's gradient is then summed
            over them once; XLA would sum it after every chunk.
        vocab_size: number of real columns, if the head is padded (default: V). Padding gets no probability.
        z_loss: coefficient of `log(sum(exp(logits)))**2`, which keeps logits from drifting.
        label_smoothing: share of the target's probability to spread evenly over the vocabulary.
        soft_cap: bound logits to `soft_cap * tanh(logits / soft_cap)` (default: no cap).
        chunk_rows: tokens per chunk (default: as many as fit in 512 MiB, at least 2048).
        logits_dtype: dtype of the logits between the float32 accumulation and the float32 softmax (default: that of
            `x`). float32 moves twice the bytes of bfloat16.
        kernels: use a Pallas kernel for the softmax gradient (default: on GPUs). It needs an unsplit head and no
            `label_smoothing` or `soft_cap`.
        groups: `[..., rows]`, the group of each token, from 0 to `num_groups - 1`, such as the source of its text.
        num_groups: number of groups; the result has one more field, `by_group`: `total` and `count` of each group,
            `[2, num_groups]`.

    Example:
        >>> x, head, targets = jnp.zeros((2, 8, 4)), jnp.ones((4, 16)), jnp.zeros((2, 8), int)
        >>> sums = linear_cross_entropy(x, head, targets, weights=jnp.array([[1.0] * 8, [0.0] * 8]))
        >>> float(sums.count), bool(jnp.allclose(sums.total, 8 * jnp.log(16.0)))
        (8.0, True)
    """
    x, head, targets = jnp.asarray(x), jnp.asarray(head), whole_numbers(targets)
    weights = None if weights is None else jnp.asarray(weights)
    view = AxisView.of(axis, who="linear_cross_entropy")
    view.check_matmul(x, (head,))
    view.check_split(head=head)
    groups = None if groups is None else whole_numbers(groups)
    check_targets(view, x, sequence_parallel, targets=targets, weights=weights, groups=groups)
    _check_options(view, targets, label_smoothing, soft_cap, chunk_rows)
    data_axes = _automatic(view, batch_axes, x)
    if view.kind == "global":
        view.check_divides(head.shape[1], "tokens of vocabulary")
        if sequence_parallel:
            view.check_divides(x.shape[-2], "rows")
    plan = ChunkOptions(
        axis=axis if view.kind != "plain" else None,
        gathers=view.kind != "plain" and sequence_parallel,
        batch_axes=data_axes,
        island=(*data_axes, axis) if view.kind == "global" and axis is not None else data_axes,
        vocab_size=checked_vocab_size(view, vocab_size, head.shape[1], "columns"),
        z_loss=float(z_loss),
        label_smoothing=float(label_smoothing),
        soft_cap=None if soft_cap is None else float(soft_cap),
        chunk_rows=chunk_rows,
        logits_dtype=logits_dtype,
        kernels=kernels,
        num_groups=0 if groups is None else num_groups,
    )
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    operands = x, head, targets, lax.stop_gradient(weights), groups
    # The gradients of a custom_vjp must vary like its inputs, so gradients are summed over data axes at this pcast.
    everywhere: frozenset[str] = frozenset().union(*map(varying_axes, jax.tree.leaves(operands)))
    x, head, targets, weights, groups = pcast_varying(operands, sorted(name for name in everywhere if name != axis))
    if view.kind == "local" and sequence_parallel:
        x = pcast_varying(x, axis)
    sums = _loss_sums(plan, x, head, targets, weights, groups)
    found: LossSums = type(sums)(sums.total, *map(lax.stop_gradient, sums[1:]))
    return found


# --- The sums and their gradients ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sums(plan: ChunkOptions, x: Any, head: Any, targets: Any, weights: Any, groups: Any) -> LossSums:
    return _run(plan, False, x, head, targets, weights, groups)[0]


def _loss_sums_bwd(plan: ChunkOptions, grads: Any, d_sums: LossSums) -> tuple[Any, ...]:
    dx, dhead = ((grad.astype(jnp.float32) * d_sums.total).astype(grad.dtype) for grad in grads)
    return dx, dhead, None, None, None


_loss_sums.defvjp(lambda plan, *args: _run(plan, True, *args), _loss_sums_bwd)


def _run(plan: ChunkOptions, with_grads: bool, x: Any, head: Any, *tokens: Any) -> tuple[LossSums, Any]:
    call: Callable[..., Any] = functools.partial(_on_device, plan, with_grads)
    if plan.island:
        # The island is inside the custom_vjp, so JAX never differentiates through it.
        axis = plan.axis if plan.axis in plan.island else None
        of_x, of_head, of_tokens = _specs(plan.batch_axes, axis, plan.gathers, x.ndim)
        call = local_map(
            call,
            axes=plan.island,
            in_specs=(of_x, of_head, *(None if part is None else of_tokens for part in tokens)),
            out_specs=(P(), (of_x, of_head) if with_grads else None),
        )
    result: tuple[LossSums, Any] = call(x, head, *tokens)
    return result


def _specs(batch_axes: tuple[str, ...], axis: str | None, rows_split: bool, ndim: int) -> tuple[P, P, P]:
    of_rows = (axis,) if axis is not None and rows_split else ()
    if ndim == 2:  # The rows are the batch.
        return P((*batch_axes, *of_rows)), P(None, axis), P(batch_axes)
    return P(batch_axes, *[None] * (ndim - 3), of_rows), P(None, axis), P(batch_axes)


def _on_device(
    plan: ChunkOptions, with_grads: bool, x: Any, head: Any, targets: Any, weights: Any, groups: Any
) -> tuple[LossSums, Any]:
    whole = lax.all_gather(x, plan.axis, axis=x.ndim - 2, tiled=True) if plan.gathers else x
    kind = jnp.result_type(x.dtype, head.dtype)
    wire = jnp.dtype(plan.logits_dtype or kind)
    columns, rows = head.astype(kind), RowChunks.of(targets.shape, head.shape[1] * wire.itemsize, plan.chunk_rows)
    is_plain = plan.axis is None and plan.vocab_size == head.shape[1] and not (plan.soft_cap or plan.label_smoothing)
    by_kernel = with_grads and is_plain and fits_softmax(head.shape[1]) and uses_kernels(plan.kernels)

    def step(dhead: Any, chunk: Any) -> tuple[Any, Any]:
        x_chunk, its_targets, its_weights, its_groups = chunk
        # Rows of weight zero may be NaN, and 0 * NaN is NaN.
        x_chunk = jnp.where((its_weights != 0)[..., None], x_chunk, jnp.zeros_like(x_chunk))
        products = dot(x_chunk, columns, wire)
        if by_kernel:
            sums, dlogits = chunk_by_kernel(plan, products, its_targets, its_weights, its_groups)
        else:
            its = its_targets, its_weights, its_groups
            sums, make_dlogits = chunk_loss(plan, products.astype(jnp.float32), *its)
            if not with_grads:
                return dhead, (sums, None)
            dlogits = make_dlogits()
        dlogits = dlogits.astype(kind)
        # In one expression, XLA adds inside the matmul and needs no second buffer.
        return dhead + dot_rows(x_chunk, dlogits), (sums, dot(dlogits, columns.T, x.dtype))

    start = None
    if with_grads:
        axes = frozenset().union(*map(varying_axes, (whole, head, targets, weights)))
        start = pcast_varying(own_zeros(*head.shape), sorted(axes))
    per_token = jax.tree.map(rows.cut, (targets, weights, groups))
    chunks = (rows.cut(whole.astype(kind), features=True), *per_token)
    # Unrolled, XLA would add the products in pairs and hold several gradients of the head at once.
    dhead, (sums, dx) = lax.scan(step, start, chunks)
    sums = jax.tree.map(lambda part: part.sum(axis=0), sums)
    sums = lax.psum(sums, plan.batch_axes) if plan.batch_axes else sums
    if not with_grads:
        return sums, None
    dx = rows.join(dx)
    if plan.gathers:
        dx = lax.psum_scatter(dx.astype(summing_dtype(dx.dtype)), plan.axis, scatter_dimension=x.ndim - 2, tiled=True)
    return sums, (_summed_as(x, dx), _summed_as(head, dhead))


def _summed_as(value: Any, grad: Any) -> Any:
    """Sums a gradient over the axes along which only it varies, and casts it to the value's dtype."""
    axes = tuple(sorted(varying_axes(grad) - varying_axes(value)))
    summed = lax.psum(grad.astype(summing_dtype(grad.dtype)), axes) if axes else grad
    return summed.astype(value.dtype)


# --- Checks ---


def _automatic(view: AxisView, batch_axes: Sequence[str], x: Any) -> tuple[str, ...]:
    """Returns the batch axes that are automatic and larger than 1."""
    mesh = current_mesh()
    if mesh is None or not batch_axes:
        return ()
    require_axes(mesh, batch_axes, where=f"{view.who}: batch_axes")
    found = tuple(axis for axis in batch_axes if mesh.shape[axis] > 1 and not is_manual(axis))
    ways = math.prod(mesh.shape[axis] for axis in found)
    if x.shape[0] % ways:
        raise view.error(
            f"the first dim of x, of shape {x.shape}, cannot be split over the {ways} devices of {found}.",
            hint="pass only the axes that split the batch, or none.",
        )
    return found


def _check_options(
    view: AxisView, targets: Any, label_smoothing: float, soft_cap: float | None, chunk_rows: int | None
) -> None:
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise view.error(f"targets are {targets.dtype}.", hint="pass integer token ids.")
    if not 0 <= label_smoothing < 1:
        raise view.error(f"label_smoothing={label_smoothing} is out of range.", hint="use 0 or more, and less than 1.")
    if soft_cap is not None and soft_cap <= 0:
        raise view.error(f"soft_cap={soft_cap} is out of range.", hint="use a positive number, or None for no cap.")
    if chunk_rows is not None and chunk_rows < 1:
        raise view.error(
            f"chunk_rows={chunk_rows} is out of range.", hint="use a positive number, or None for the default."
        )
