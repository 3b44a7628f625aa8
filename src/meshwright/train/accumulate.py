"""Gradient accumulation over minibatches; the result is the gradient of the whole batch.

Minibatches have equal numbers of rows but, with masks and padding, different numbers of valid targets. So each one is
weighted by the count of its loss. Sums are in float32 for any parameter dtype, and random numbers belong to rows
(`meshwright.parallel.row_key`), so dropout does not depend on the number of minibatches.

Metrics combine as they declare (`meshwright.metrics`); plain values are averaged with the weights of the minibatches. A
minibatch with weight 0 (all targets masked) adds nothing, even if it contains NaN.

Model state, such as running statistics, passes from one minibatch to the next. Devices then combine theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.hardware.chips import chip_family
from meshwright.mesh.axes import is_manual, pcast_varying, varying_axes
from meshwright.mesh.current import current_mesh
from meshwright.metrics import MetricPart, combine, finish, is_pair, neutral, over, over_devices, parts_of, wide
from meshwright.parallel.fp8.weight import Amaxes
from meshwright.parallel.loop_slices import slices_first
from meshwright.parallel.row_keys import row_key
from meshwright.parallel.rows import split_rows
from meshwright.train.model_state import StateReduce, check_same_state, reduce_state
from meshwright.train.sync import Sync, make_sync_plan
from meshwright.types import Metrics, PRNGKeyArray, PyTree


class Accumulated(NamedTuple):
    """The result of `accumulate`: mean loss, float32 gradients sharded like the parameters, metrics and model state.

    `fp8` holds the amaxes of this batch, with fp8.
    """

    loss: Any
    grads: PyTree
    metrics: Metrics
    model_state: PyTree = None
    fp8: Amaxes | None = None


def accumulate(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    rng: PRNGKeyArray | None = None,
    *,
    num_minibatches: int,
    specs: PyTree = None,
    sync: Sync = "hybrid",
    gather_axes: Sequence[str] | None = None,
    axes: Sequence[str] | None = None,
    row_axes: Sequence[str] | None = None,
    grad_specs: PyTree = None,
    dtypes: PyTree = None,
    reduce_dtype: Any = None,
    row_blocks: int = 1,
    interleaved: bool = False,
    with_gradients: bool = True,
    trainable: Sequence[bool] | None = None,
    model_state: PyTree = None,
    model_state_reduce: StateReduce = "mean",
    fp8: Amaxes | None = None,
    gather_first: Sequence[tuple[str, Any] | None] | None = None,
    fp8_weights: PyTree = None,
) -> Accumulated:
    """Returns loss and gradients of a batch whose rows are split over devices and minibatches, in the local view.

    The result is the same as on one device with the whole batch: the sum of all losses divided by the number of valid
    targets on all devices. Also works outside `shard_map`, on one device.

    Args:
        loss_fn: `loss_fn(params, minibatch, rng) -> (loss, metrics)`. The loss is a `(sum, count)` pair over the
            minibatch's valid targets; multiply terms that are not per target by the count. A scalar loss is treated as
            a mean, with equal weights for all minibatches and devices.
        params: this device's shards. `loss_fn` gets them gathered along `gather_axes`.
        batch: this device's rows.
        rng: a key that is the same on all devices; `loss_fn` gets a `row_key` of it.
        num_minibatches: number of minibatches, computed one after the other.
        specs: the PartitionSpec of each parameter, as passed to `local_map` (default: replicated).
        sync: how often devices reduce gradients and gather parameters. `"every"`: for each minibatch. `"hybrid"`: for
            each minibatch along the axes that split parameters, once along the others. `"once"`: once per batch, which
            needs memory for whole parameters and whole float32 gradients.
        gather_axes: the axes to gather parameters along (default: `("fsdp",)`). With `()`, the loss gathers its
            parameters (layer by layer, for instance), even with `sync="once"`.
        axes: the axes along which the loss is a partial sum (default: those that split the batch). Add the pipeline
            axis if only the last stage computes the loss; its sum and count must be zero on the other stages.
        row_axes: the axes that split the batch's rows, in the order of the batch's spec.
        grad_specs: specs of the gradients (default: `specs`). A leaf's spec may have one more axis; its gradient is
            then reduce-scattered along that axis, which sends half the bytes of an all-reduce (ZeRO-1).
        dtypes: the dtype of each parameter in `loss_fn` and in its all-gather (default: its own).
        reduce_dtype: the dtype in which devices exchange gradients (default: float32).
        row_blocks: number of devices that rows are split over in the global view. Each minibatch then takes a slice of
            each device's rows.
        interleaved: whether the devices' slices of a minibatch are contiguous rows of the whole batch, so that this
            device's rows are its slice of the first minibatch, then of the second, and so on (default: the rows of a
            device are contiguous).
        with_gradients: whether to compute gradients; if False, they are None.
        trainable: whether each parameter, in the order of `jax.tree.leaves`, has a gradient (default: all). The
            gradient of any other is None.
        model_state: arrays that the loss updates, replicated; `loss_fn(params, model_state, minibatch, rng)` then
            returns `(loss, metrics, model_state)`. Minibatches update it one after the other.
        model_state_reduce: how devices combine their model states: "mean" (default), "sum", "max" or "min" of floats
            and the maximum of other dtypes, or `(regex, reduction)` pairs. A sum adds the changes of all devices.
        fp8: amaxes for the fp8 matmuls of the loss, replicated, passed to it as `fp8=`. Those of this batch are
            returned: the largest of all minibatches and devices.
        gather_first: for each parameter, in the order of `jax.tree.leaves`, None or an axis to gather it along once,
            before the minibatches, in any sync mode, and the dtype to send it in. Use it for parameters that the
            devices of a pipeline store in slices but use whole.
        fp8_weights: this device's shards of weights in fp8 (`CastWeight`, in dicts like `params`), cast once for all
            minibatches. They are gathered like parameters and passed to the loss as `fp8_weights=`, which must read
            these instead of the parameters; gradients still belong to the parameters.

    Example:
        >>> import meshwright as mw
        >>> from jax.sharding import PartitionSpec as P
        >>> specs, rows = {"w": P("fsdp")}, P(("dp", "fsdp"))
        >>> def loss_fn(params, minibatch, rng):
        ...     errors = (minibatch["x"] @ params["w"] - minibatch["y"]) ** 2
        ...     return ((errors * minibatch["mask"]).sum(), minibatch["mask"].sum()), {}
        >>> step = mw.parallel.local_map(
        ...     lambda params, batch: accumulate(loss_fn, params, batch, num_minibatches=2, specs=specs),
        ...     mesh=mw.create_mesh("dp:2,fsdp:4"),
        ...     in_specs=(specs, rows),
        ...     out_specs=Accumulated(loss=P(), grads=specs, metrics=P()),
        ... )
        >>> batch = {"x": jnp.eye(16, 4), "y": jnp.ones(16), "mask": jnp.arange(16) < 5}
        >>> result = step({"w": jnp.zeros(4)}, batch)
        >>> float(result.loss), result.grads["w"].tolist()
        (1.0, [-0.4000000059604645, -0.4000000059604645, -0.4000000059604645, -0.4000000059604645])
    """
    plan = make_sync_plan(
        params,
        batch,
        specs,
        sync=sync,
        gather_axes=gather_axes,
        axes=axes,
        row_axes=row_axes,
        grad_specs=grad_specs,
        dtypes=dtypes,
        reduce_dtype=reduce_dtype,
        trainable=trainable,
        gather_first=gather_first,
        fp8_weights=fp8_weights,
    )
    parts = split_rows(batch, num_minibatches, who="accumulate", part="minibatch", num_blocks=row_blocks)
    first_row = plan.first_row(parts.num_rows * (1 if interleaved else num_minibatches))
    between = parts.num_rows * plan.num_row_devices if interleaved else parts.num_rows // row_blocks
    block = parts.num_rows // row_blocks
    blocks = {"block": block, "stride": block * num_minibatches} if row_blocks > 1 else {}

    # Only trainable leaves are differentiated, so that nothing is computed, sent or kept for the gradients of others.
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(params)
    learns = [True] * len(leaves) if trainable is None else list(trainable)
    learned, fixed = plan.only(learns), plan.only([not learn for learn in learns])
    masters = [wide(leaf) for leaf, learn in zip(leaves, learns, strict=True) if learn]
    frozen = [leaf for leaf, learn in zip(leaves, learns, strict=True) if not learn]

    def join(learned: Sequence[Any], fixed: Sequence[Any]) -> PyTree:
        rest = (iter(fixed), iter(learned))
        return structure.unflatten([next(rest[learn]) for learn in learns])

    # Gradients are reduced by the transpose of this preparation: marks and gathers before the loop become one sum or
    # scatter after it, in float32.
    prepared, pull = jax.vjp(lambda own: learned.before(own, masters), learned.own(masters))
    others = fixed.before(fixed.own(frozen), frozen)
    prepared, others = learned.settled(prepared), fixed.settled(others)

    # Amaxes are marked before the loss is differentiated, so that those of all devices are combined once, by maximum.
    everywhere = _manual_axes()
    marked, first_state = pcast_varying(fp8, everywhere), model_state
    casts = pcast_varying(fp8_weights, everywhere)
    if sync == "once":
        casts = plan.gather_casts(casts)

    def step(index: Any, slices: Any, model_state: PyTree) -> Any:
        key = None if rng is None else row_key(rng, first_row + index * between, **blocks)
        # Without this dependency, XLA would hoist the gather out of the loop and keep whole parameters in memory.
        once = sync == "once" or num_minibatches == 1
        ready = (prepared, others, casts)
        held, held_fixed, held_casts = ready if once else after(index, ready)
        held_casts = held_casts if sync == "once" else plan.gather_casts(held_casts)

        whole, pull_inside = jax.vjp(lambda held: learned.inside(held, masters), held)
        constants = fixed.narrow(fixed.inside(held_fixed, frozen))

        def local_sum(params: Sequence[Any], fp8: Amaxes | None) -> Any:
            options: dict[str, Any] = {} if fp8 is None else {"fp8": fp8}
            options |= {} if held_casts is None else {"fp8_weights": held_casts}
            arguments = (join(params, constants), parts.join(slices), key)
            if model_state is None:
                (loss, metrics), new_state = loss_fn(*arguments, **options), None
            else:
                loss, metrics, new_state = loss_fn(arguments[0], model_state, *arguments[1:], **options)
                check_same_state(new_state, model_state, axes=plan.axes)
            total, count = loss if is_pair(loss) else (loss, jnp.float32(1))
            plan.check_loss(total)
            # The sum over devices and the division come once, after the loop; pcast_varying makes gradients match that
            # sum even if the loss is already equal on all devices.
            total = pcast_varying(jnp.asarray(total).astype(jnp.float32), plan.axes)
            return total, (jnp.asarray(count), metrics, new_state)

        if with_gradients:
            # Widening after the gradients are stacked writes them once, in half the bytes.
            both = jax.value_and_grad(local_sum, argnums=(0, 1), has_aux=True)
            (total, aux), (grads, amaxes) = both(learned.narrow(whole), marked)
            grads = written_once(grads)
            (grads,) = pull_inside([grad.astype(leaf.dtype) for grad, leaf in zip(grads, whole, strict=True)])
            grads = jax.tree.map(wide, grads)
        else:
            (total, aux), grads, amaxes = local_sum(learned.narrow(whole), marked), None, None
        count, metrics, new_state = aux
        found = (MetricPart(total, count, "sum", "pair"), parts_of(metrics, count))
        return pcast_varying((found, new_state), plan.axes), (grads, amaxes)

    model_state = pcast_varying(model_state, plan.axes)
    if num_minibatches == 1:
        (found, model_state), (grads, amaxes) = step(0, [array[0] for array in parts.arrays], model_state)
    else:

        def body(carry: Any, x: Any) -> tuple[Any, None]:
            (found, state), (grads, amaxes) = carry
            (more, state), (more_grads, more_amaxes) = step(x[0], x[1], state)
            largest = jax.tree.map(jnp.maximum, amaxes, more_amaxes)
            return ((combine(found, more), state), (add(grads, more_grads), largest)), None

        (zeros, _), zero_grads = zeros_for(lambda: step(0, [array[0] for array in parts.arrays], model_state))
        xs = (jnp.arange(num_minibatches), parts.arrays)
        carry = ((neutral(zeros), model_state), zero_grads)
        if sync == "once" and chip_family(current_mesh()) == "gpu":
            body = slices_first(body, carry, jax.tree.map(lambda leaf: leaf[0], xs))
        ((found, model_state), (grads, amaxes)), _ = lax.scan(body, carry, xs)

    loss, metrics = over_devices(found, plan.axes, row_axes=plan.row_axes)
    if with_gradients:
        (grads,) = pull(grads)
        grads = join([_mean(leaf, loss.count) for leaf in grads], [None] * len(frozen))
    if everywhere and amaxes is not None:
        amaxes = lax.pmax(amaxes, everywhere)
    if model_state is not None:
        model_state = reduce_state(model_state, first_state, model_state_reduce, plan.axes)
    return Accumulated(over(loss.total, loss.count), grads, finish(metrics), model_state, amaxes)


def _mean(grad: Any, count: Any) -> Any:
    """Returns `over(grad, count)`, on GPUs with zeros of its own.

    XLA:GPU would merge them with the zeros that a loop starts from to sum or stack gradients, and keep these in memory
    during the loop: one float32 gradient for each shape. The count makes the barrier unlike those of `own_zeros`, which
    XLA would merge as well, and then copy before each update in place.
    """
    if chip_family(current_mesh()) != "gpu":
        return over(grad, count)
    zero, count = lax.optimization_barrier((jnp.zeros((), grad.dtype), count))
    return jnp.where(count > 0, grad / jnp.where(count > 0, count, 1), zero)


def _manual_axes() -> tuple[str, ...]:
    mesh = current_mesh()
    return () if mesh is None else tuple(axis for axis in mesh.axis_names if is_manual(axis))


# --- Sums over minibatches ---


def add(first: PyTree, second: PyTree) -> PyTree:
    """Returns the sum of two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, first, second)


def after(done: PyTree, tree: PyTree) -> PyTree:
    """Returns `tree` with a dependency on `done`, so that XLA computes `done` first.

    A leaf waits only for entries of `done` that vary along no more axes than the leaf, because its type would change.
    """

    def wait(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # optimization_barrier does not take random keys
            return leaf
        known = [item for item in jax.tree.leaves(done) if varying_axes(item) <= varying_axes(leaf)]
        return lax.optimization_barrier((leaf, *known))[0]

    return jax.tree.map(wait, tree)


def written_once(tree: PyTree) -> PyTree:
    """Returns a tree whose leaves are written to memory before use, on GPUs.

    Otherwise XLA fuses the stacking of layer gradients into the optimizer update, which is slower
    (benchmarks/results/decoder_h200.md).
    """
    # One barrier per leaf, because the outputs of one barrier vary along the same axes.
    return jax.tree.map(lax.optimization_barrier, tree) if chip_family(current_mesh()) == "gpu" else tree


def zeros_for(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns zeros with the shapes, dtypes and varying axes of `function(*args)`, without running it."""
    shapes = jax.eval_shape(function, *args)
    return jax.tree.map(
        lambda leaf: pcast_varying(jnp.zeros(leaf.shape, leaf.dtype), sorted(varying_axes(leaf))), shapes
    )
