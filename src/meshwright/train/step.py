"""The train step: loss, gradients, clipping and optimizer update in one compiled program, for any mesh.

Gradients are computed in the global view (XLA inserts the collectives) or in the local view (Meshwright layers do). The
norm, clipping, the optimizer and the check for non-finite values always work on global arrays, so an optimizer that
uses the norm or mean of a parameter sees the whole parameter, not a shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.distributed.same_batch import require_same_batch
from meshwright.errors import PlacementError
from meshwright.hardware.chips import chip_family
from meshwright.layout import Layout
from meshwright.metrics import compute
from meshwright.models.execution import Remat
from meshwright.parallel.rows import count_rows
from meshwright.specs import round_up
from meshwright.train.fp8_scaling import are_finite
from meshwright.train.gradients import Gradients, make_gradients, named_shardings
from meshwright.train.guards import check_scaling_state, is_concrete, require_live_state, require_same_state
from meshwright.train.optimizer.ema import averaged_params, check_ema, moved, require_ema
from meshwright.train.optimizer.norms import check_clip, clipped
from meshwright.train.optimizer.optimizer_update import require_known_optimizer, update
from meshwright.train.padding import cut, fill, part_leaves
from meshwright.train.precision import Precision
from meshwright.train.state import RunState, gradient_specs, only_trainable, with_frozen
from meshwright.train.step_options import xla_options
from meshwright.train.sync import Sync
from meshwright.train.views import View
from meshwright.types import Metrics, PyTree


def make_train_step(
    job: Any,
    optimizer: Any,
    layout: Layout,
    *,
    view: View | None = None,
    num_minibatches: int = 1,
    sync: Sync | None = None,
    precision: Precision | str = "float32",
    remat: Remat = "none",
    clip: float | None = None,
    skip_nonfinite: bool = True,
    data_axes: str | Sequence[str] | None = None,
    donate: bool = True,
    overlap: bool = True,
    compiler_options: dict[str, Any] | None = None,
    ema: float | None = None,
) -> Step:
    """Returns `step(state, batch) -> (state, metrics)`, compiled for the mesh of a layout.

    Args:
        job: a job whose `loss(params, batch, rng) -> (loss, metrics)` returns a `(sum, count)` pair over valid targets,
            or a mean. If the loss takes `gather=`, it gathers its parameters layer by layer; otherwise it gets them
            gathered. If it takes `remat=`, it applies the policy; otherwise the policy applies to the whole loss. With
            `model_state`, the loss also takes and returns it; `frozen` parameters stay as they are.
        optimizer: any optax optimizer but `lookahead`. Those that take the loss (`value=`) get it, and line searches
            (`lbfgs`) get the loss as a function of the parameters, which costs several evaluations per step.
        layout: the layout of the whole state, from `state_layout`.
        view: "local": Meshwright layers insert the collectives, and parameters are gathered along `fsdp`; the loss must
            communicate over any other axis that splits its parameters, and the job declares these axes in
            `local_axes`. "global": XLA inserts the collectives, for any loss that works on one device. None: chosen by
            `choose_view`; `step.view` says which view it is, and why.
        num_minibatches: number of minibatches, computed one after the other (default: 1).
        sync: how often devices exchange gradients in the local view (default: "hybrid"); see `accumulate`.
        precision: "float32", "mixed", "bfloat16", "fp8", or a `Precision`; with fp8, the loss must take `fp8=`.
        remat: activations to recompute in the backward pass: "none", "dots", "full", "offload", or a `jax.checkpoint`
            policy.
        clip: the largest global gradient norm; larger gradients are scaled down (default: no clipping).
        skip_nonfinite: whether to keep the old state and count the step as skipped if loss or gradients are not finite.
        data_axes: the axes that split the batch's rows (default: `dp` and `fsdp`, if in the mesh).
        donate: whether to donate the input state, which then cannot be used again.
        overlap: whether to pass XLA options that hide collectives on the mesh's chips, in the local view; see
            `meshwright.parallel.overlap_options`.
        compiler_options: additional XLA options by name, which override the defaults for the mesh's devices.
        ema: decay of a moving average of the trained parameters, `ema * average + (1 - ema) * parameters` after each
            step that is not skipped; the layout needs `state_layout(..., ema=...)` (default: no average).

    The metrics are the values of the job's metrics over the whole batch (see `meshwright.metrics`), plus `loss`,
    `grad_norm`, `tokens` (the count of the loss), `skipped` (total), `skipped_in_a_row`, and `bad_leaf`: the index of
    the first parameter with a non-finite gradient, or -1.

    Example:
        >>> import meshwright as mw, optax
        >>> def loss(params, batch, rng):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2), {}
        >>> job = mw.Job(init=lambda key: {"w": jnp.zeros(8)}, rules=[("w", P("fsdp"))], loss=loss)
        >>> layout = mw.train.state_layout(job, optax.sgd(0.1), mw.create_mesh("dp:2,fsdp:4"))
        >>> state = mw.train.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        >>> step = make_train_step(job, optax.sgd(0.1), layout)
        >>> state, metrics = step(state, {"x": np.eye(8, dtype=np.float32), "y": np.ones(8, np.float32)})
        >>> float(metrics["loss"]), int(state.step)
        (1.0, 1)
    """
    require_known_optimizer(layout)

    def make(with_gradients: bool) -> Gradients:
        return make_gradients(
            job,
            layout,
            view=view,
            num_minibatches=num_minibatches,
            sync=sync,
            precision=precision,
            remat=remat,
            data_axes=data_axes,
            with_gradients=with_gradients,
        )

    gradients = make(True)
    check_clip(clip)
    check_ema(ema, layout)
    check_scaling_state(gradients.fp8, layout)
    trainable = gradients.trainable
    fine_specs = only_trainable(gradient_specs(layout), trainable)
    fine = named_shardings(layout.mesh, fine_specs)
    learned = [leaf for leaf, learns in zip(part_leaves(layout, "params"), trainable, strict=True) if learns]
    statistics = part_leaves(layout, "opt_state")
    trained = jnp.asarray([place for place, learns in enumerate(trainable) if learns])

    def step(state: RunState, batch: PyTree) -> tuple[RunState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step)
        result, squares = gradients(state.params, batch, key, state.model_state, state.fp8)
        loss, grads, metrics, model_state, amaxes = result
        norm = jnp.sqrt(squares.sum())
        if clip is not None:
            grads = clipped(grads, norm, clip)
        # With ZeRO-1, each device updates the shard of the parameter whose statistics it holds.
        mine = jax.lax.with_sharding_constraint(only_trainable(state.params, trainable), fine)
        grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, mine)
        # An optimizer may take means over a parameter, so it sees parameters and statistics without padding.
        own, own_grads = cut(mine, learned), cut(grads, learned)

        def at(with_gradients: bool, params: PyTree) -> Any:
            whole = with_frozen(fill(params, learned), state.params, trainable)
            result, _ = make(with_gradients)(whole, batch, key, state.model_state, state.fp8)
            return (result.loss, cut(result.grads, learned)) if with_gradients else result.loss

        updates, opt_state = update(
            optimizer,
            own_grads,
            cut(state.opt_state, statistics),
            own,
            loss=loss,
            loss_at=functools.partial(at, False),
            loss_and_grads_at=functools.partial(at, True),
            clipped=clip is not None,
            specs=fine_specs,
        )
        params = jax.tree.map(lambda leaf, update: (leaf + update).astype(leaf.dtype), own, updates)
        params, opt_state = fill(params, learned), fill(opt_state, statistics)
        good, scaling = jnp.isfinite(loss) & jnp.isfinite(norm), state.fp8
        if gradients.fp8 is not None and amaxes is not None:
            good, scaling = good & are_finite(amaxes), gradients.fp8.update(scaling, amaxes)
        average = state.ema if ema is None else moved(state.ema, params, decay=ema)
        if skip_nonfinite:
            params, opt_state, model_state, scaling, average = jax.tree.map(
                lambda new, old: jnp.where(good, new, old),
                (params, opt_state, model_state, scaling, average),
                (mine, state.opt_state, state.model_state, state.fp8, state.ema),
            )
        bad = (~good & skip_nonfinite).astype(jnp.int32)
        state = RunState(
            step=state.step + 1,
            params=with_frozen(params, state.params, trainable),
            opt_state=opt_state,
            rng=state.rng,
            skipped=state.skipped + bad,
            skipped_in_a_row=(state.skipped_in_a_row + bad) * bad,
            model_state=model_state,
            fp8=scaling,
            ema=average,
        )
        finite = jnp.isfinite(squares)
        return state, {
            **compute(metrics),
            "grad_norm": norm,
            "skipped": state.skipped,
            "skipped_in_a_row": state.skipped_in_a_row,
            "bad_leaf": jnp.where(finite.all(), -1, trained[jnp.argmin(finite)]),
        }

    is_fp8, is_local = gradients.fp8 is not None, gradients.view.view == "local"
    options = xla_options(layout.mesh, compiler_options, overlap=overlap and is_local, fp8=is_fp8)
    return Step(step, layout, gradients, updates=True, donate=donate, compiler_options=options)


def make_eval_step(
    job: Any,
    layout: Layout,
    *,
    view: View | None = None,
    num_minibatches: int = 1,
    precision: Precision | str = "float32",
    data_axes: str | Sequence[str] | None = None,
    compiler_options: dict[str, Any] | None = None,
    raw: bool = False,
    ema: bool = False,
) -> Step:
    """Returns `evaluate(state, batch) -> metrics`: the loss without gradients or dropout (`rng` is None).

    The loss is the job's `eval_loss`, if it has one. With `raw`, the metrics are declared metrics, which
    `meshwright.metrics.merge` combines over batches. With `ema`, it evaluates the state's average of the parameters.

    Example:
        >>> import meshwright as mw, optax
        >>> job = mw.Job(
        ...     init=lambda key: {"w": jnp.ones(8)},
        ...     rules=[("w", P("fsdp"))],
        ...     loss=lambda params, batch, rng: (jnp.mean(batch["x"] @ params["w"]), {}),
        ... )
        >>> layout = mw.train.state_layout(job, optax.sgd(0.1), mw.create_mesh("fsdp:8"))
        >>> state = mw.train.init_state(job, optax.sgd(0.1), layout, jax.random.key(0))
        >>> float(make_eval_step(job, layout)(state, {"x": np.ones((8, 8), np.float32)})["loss"])
        8.0
    """
    losses = make_gradients(
        job,
        layout,
        view=view,
        num_minibatches=num_minibatches,
        precision=precision,
        data_axes=data_axes,
        with_gradients=False,
        evaluates=True,
    )

    if ema:
        require_ema(layout)
    check_scaling_state(losses.fp8, layout, evaluates=True)

    def step(state: RunState, batch: PyTree) -> Metrics:
        params = averaged_params(state, losses.trainable) if ema else state.params
        result, _ = losses(params, batch, None, state.model_state, state.fp8)
        return result.metrics if raw else compute(result.metrics)

    options = xla_options(layout.mesh, compiler_options, fp8=losses.fp8 is not None)
    return Step(step, layout, losses, updates=False, donate=False, compiler_options=options)


class Step:
    """A compiled step, called with a state and a batch, whose rows are split over the mesh."""

    def __init__(
        self,
        function: Callable[..., Any],
        layout: Layout,
        gradients: Gradients,
        *,
        updates: bool,
        donate: bool,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.layout = layout
        self.row_axes = gradients.row_axes
        self.view = gradients.view
        self.donates = donate
        self._shardings: dict[Any, PyTree] = {}
        self._programs: dict[Any, Any] = {}
        self._on_simulated_devices = layout.mesh.size > 1 and chip_family(layout.mesh) == "cpu"
        self._last: Any = None
        self._compared = False  # whether all processes gave the same batch

        @functools.wraps(function)
        def under_mesh(state: RunState, batch: PyTree) -> Any:
            with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
                return function(state, batch)

        replicated = NamedSharding(layout.mesh, P())
        self._jit = jax.jit(
            under_mesh,
            in_shardings=(layout.shardings, None),
            out_shardings=(layout.shardings, replicated) if updates else replicated,
            donate_argnums=(0,) if donate else (),
            compiler_options=compiler_options,
        )

    def __call__(self, state: RunState, batch: PyTree) -> Any:
        if not self._is_expected(state):  # the checks below give better errors, but naming leaves is slow
            require_live_state(state, donates=self.donates)
            require_same_state(state, self.layout)
        if self._on_simulated_devices:
            # XLA:CPU shares one thread pool between programs, so collectives of two steps in flight can deadlock.
            jax.block_until_ready(self._last)
        program = self._programs.get(_shapes(batch), self._jit) if self._programs else self._jit
        result = program(state, self.place(batch))
        if self._on_simulated_devices:
            last = jax.tree.leaves(result)[-1]  # a metric, which is never donated
            self._last = last if is_concrete(last) else None
        return result

    def _is_expected(self, state: RunState) -> bool:
        leaves, structure = jax.tree.flatten(state)
        return structure == self.layout.structure and all(
            is_concrete(leaf)
            and not leaf.is_deleted()
            and leaf.shape == known.stored_shape
            and leaf.dtype == known.dtype
            for leaf, known in zip(leaves, self.layout.leaves, strict=True)
        )

    def place(self, batch: PyTree) -> PyTree:
        """Returns the batch on the mesh, with rows split over the data axes; does not copy a batch already there."""
        leaves, shapes = jax.tree.leaves(batch), _shapes(batch)
        if not self._compared and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            require_same_batch(batch, who="step")  # once, because it fetches the batch
            self._compared = True
        if shapes not in self._shardings:
            self._shardings[shapes] = self.batch_shardings(batch)
        shardings = self._shardings[shapes]
        if all(
            is_concrete(leaf) and leaf.committed and leaf.sharding == sharding
            for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
        ):
            return batch
        return jax.device_put(batch, shardings)

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """Returns the sharding of each array of a batch: arrays are split by rows, scalars are replicated."""
        ways = math.prod(self.layout.mesh.shape[axis] for axis in self.row_axes)
        rows = count_rows(batch, who="step")
        if rows % ways:
            down, up = rows // ways * ways, round_up(rows, ways)
            raise PlacementError(
                f"a batch of {rows} rows cannot be split over {ways} devices "
                f"({' x '.join(f'{axis}={self.layout.mesh.shape[axis]}' for axis in self.row_axes)}).",
                hint=f"use {f'{down} or {up}' if down else up} rows.",
            )
        mesh = self.layout.mesh
        return jax.tree.map(lambda leaf: NamedSharding(mesh, P(self.row_axes) if np.ndim(leaf) else P()), batch)

    def lower(self, batch: PyTree) -> Any:
        """Returns the program lowered for a batch of these shapes; needs no device and allocates nothing."""
        shapes = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding),
            batch,
            self.batch_shardings(batch),
        )
        return self._jit.lower(self.layout.abstract, shapes)

    def compile(self, batch: PyTree) -> Any:
        """Returns the program compiled for a batch of these shapes, which later calls with such batches run."""
        shapes = _shapes(batch)
        if shapes not in self._programs:
            self._programs[shapes] = self.lower(batch).compile()
        return self._programs[shapes]


def _shapes(batch: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(batch)
    return (structure, *((np.shape(leaf), np.dtype(leaf.dtype)) for leaf in leaves))
