"""`accumulate_gradients` with uneven counts on a mesh: the mean over devices of the gradient of each device's rows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.compat.xlstm_jax.common_types import TrainState
from meshwright.compat.xlstm_jax.distributed import (
    PipelineModule,
    accumulate_gradients,
    shard_module_params,
    sync_gradients,
)
from meshwright.compat.xlstm_jax.distributed.single_gpu import Batch
from meshwright.compat.xlstm_jax.distributed.tensor_parallel import ModelParallelismWrapper

WIDTH, ROWS, DEVICES = 8, 32, 4
FORMS = pytest.mark.parametrize("use_scan", [False, True], ids=["loop", "scan"])
CHECKS = pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])


def make_batch(empty):
    """Returns rows with a mask; devices and minibatches hold between none and all of their rows."""
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    y = jax.random.normal(jax.random.key(2), (ROWS, WIDTH))
    valid = np.random.default_rng(0).random(ROWS) < np.linspace(0.2, 1.0, ROWS)
    valid[:: ROWS // DEVICES] = True  # a row on each device
    if empty:
        valid[: ROWS // DEVICES // 2] = False  # all rows of a minibatch
    return Batch(inputs=x, targets=jnp.concatenate([y, valid[:, None]], axis=1))


def loss_fn(params, apply_fn, batch, rng, safe=True):
    """Mean squared error of the valid rows; without valid rows it is NaN unless `safe`."""
    targets, valid = batch.targets[:, :-1], batch.targets[:, -1]
    errors = ((apply_fn({"params": params}, batch.inputs) - targets) ** 2).sum(-1) * valid
    count = valid.sum()
    loss = errors.sum() / (jnp.maximum(count, 1) if safe else count)
    return loss, ({"loss": {"value": errors.sum(), "count": count.astype(jnp.int32), "log_modes": ["mean"]}}, None)


class MLP(nn.Module):
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(self.dense(WIDTH, bias_init=nn.initializers.normal(), name="up")(x))
        return self.dense(WIDTH, name="down")(h)


def reference(params, batch):
    """Returns the mean over devices of the gradient of each device's rows, in float64 on one device."""
    with jax.enable_x64():
        params, batch = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), (params, batch))
        rows = ROWS // DEVICES

        def mean(params):
            losses = [
                loss_fn(params, MLP(dense=functools.partial(nn.Dense, param_dtype=jnp.float64)).apply,
                        batch[start : start + rows], None)[0]
                for start in range(0, ROWS, rows)
            ]  # fmt: skip
            return sum(losses) / DEVICES

        return jax.device_get(jax.jit(jax.grad(mean))(params))


def assert_close(got, expected):
    # A float32 sum of at most 32 * 8 * 8 products is within 2048 * 2**-24 of its largest terms.
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-13 * np.abs(b).max(), err_msg=jax.tree_util.keystr(path))


@functools.cache
def start():
    return jax.jit(MLP().init)(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]


def step_of(model, use_scan, num_minibatches=2, safe=True, axes=("dp", "fsdp")):
    def step(params, batch):
        state = TrainState(step=0, apply_fn=model.apply, params=params, tx=None, opt_state=None)
        loss = functools.partial(loss_fn, safe=safe)
        grads, metrics, _ = accumulate_gradients(state, batch, None, num_minibatches, loss, use_scan)
        assert metrics["loss"].pop("log_modes") == ["mean"]
        return sync_gradients(grads, axes), jax.tree.map(lambda leaf: lax.psum(leaf, axes), metrics)

    return step


def boxed(mesh):
    """Returns the reference's parameters in the boxes of FSDP, and their specs."""
    model = MLP(dense=shard_module_params(nn.Dense, "fsdp", min_weight_size=WIDTH))
    run = jax.shard_map(model.init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    boxes = jax.eval_shape(run, jax.random.key(0), jnp.ones((1, WIDTH)))["params"]

    def is_box(node):
        return isinstance(node, nn.Partitioned)

    params = jax.tree.map(lambda box, leaf: box.replace(value=leaf) if is_box(box) else leaf, boxes, start(),
                          is_leaf=is_box)  # fmt: skip
    return model, params, nn.get_partition_spec(boxes)


@pytest.mark.parametrize("mesh", ["dp:4,fsdp:1", "dp:1,fsdp:4", "dp:2,fsdp:2"])
@pytest.mark.parametrize("num_minibatches", [1, 4])
@FORMS
@CHECKS
def test_data_and_fsdp_axes(mesh, num_minibatches, use_scan, check):
    batch, mesh = make_batch(empty=num_minibatches > 1), mw.create_mesh(mesh, devices=DEVICES)
    model, params, specs = boxed(mesh)
    run = jax.shard_map(
        step_of(model, use_scan, num_minibatches),
        mesh=mesh,
        in_specs=(specs, P(("dp", "fsdp"))),
        out_specs=(specs, P()),
        check_vma=check,
    )
    grads, metrics = jax.jit(run)(params, batch)
    assert_close(nn.meta.unbox(grads), reference(start(), batch))
    assert (int(metrics["loss"]["count"]), metrics["loss"]["count"].dtype) == (
        int(batch.targets[:, -1].sum()),
        np.int32,
    )


@FORMS
@CHECKS
def test_a_minibatch_without_targets_may_be_nan_if_parameters_are_replicated(use_scan, check):
    """With FSDP, the NaN of one device would be summed into the gradients of the others."""
    batch, mesh = make_batch(empty=True), mw.create_mesh("dp:4", devices=DEVICES)
    run = jax.shard_map(
        step_of(MLP(), use_scan, safe=False, axes=("dp",)),
        mesh=mesh,
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=check,
    )
    grads, _ = jax.jit(run)(start(), batch)
    assert_close(grads, reference(start(), batch))


class Stage(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(WIDTH)(x))


class Pipeline(nn.Module):
    @nn.compact
    def __call__(self, x):
        stage = functools.partial(ModelParallelismWrapper, "pp", Stage)
        return PipelineModule("pp", num_microbatches=2, module_fn=stage)(x)


@FORMS
@CHECKS
def test_counts_that_are_zero_except_on_the_last_stage_of_a_pipeline(use_scan, check):
    """Code for the original masks loss and counts on the other stages, so that sums over devices are right."""
    num_stages, mesh = 2, mw.create_mesh("dp:2,pp:2", devices=4)
    batch, model = make_batch(empty=False), Pipeline()

    def init(key):
        return model.init(key, jnp.ones((2, WIDTH)))["params"]

    shapes = jax.eval_shape(
        jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), jax.random.key(0)
    )
    specs = nn.get_partition_spec(shapes)
    params = jax.jit(jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check))(jax.random.key(0))

    def masked(params, apply_fn, batch, rng):
        loss, (metrics, _) = loss_fn(params, apply_fn, batch, rng)
        last = lax.axis_index("pp") == num_stages - 1
        pair = {part: jnp.where(last, metrics["loss"][part], 0) for part in ("value", "count")}
        return jnp.where(last, loss, 0), ({"loss": pair}, None)

    def step(params, batch):
        state = TrainState(step=0, apply_fn=model.apply, params=params, tx=None, opt_state=None)
        grads, metrics, _ = accumulate_gradients(state, batch, None, 2, masked, use_scan)
        return sync_gradients(grads, ("dp", "pp")), jax.tree.map(lambda leaf: lax.psum(leaf, ("dp", "pp")), metrics)

    run = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(specs, P()), check_vma=check)
    grads, metrics = jax.jit(run)(params, batch)
    bias, kernel = jax.tree.leaves(nn.meta.unbox(params))
    arrays = {"bias": bias, "kernel": kernel}

    def mean(arrays):
        def apply(_, x):
            for stage in range(num_stages):
                x = jnp.tanh(x @ arrays["kernel"][stage] + arrays["bias"][stage])
            return x

        return sum(loss_fn(None, apply, batch[rows], None)[0] for rows in (slice(0, 16), slice(16, 32))) / 2

    assert_close(jax.tree.leaves(nn.meta.unbox(grads)), jax.tree.leaves(jax.jit(jax.grad(mean))(arrays)))
    assert int(metrics["loss"]["count"]) == int(batch.targets[:, -1].sum())


@FORMS
def test_counting_first_costs_no_matmul_and_no_collective(use_scan):
    """The pass that counts runs before the gradients; XLA removes the model from it."""
    mesh = mw.create_mesh("dp:1,fsdp:4", devices=DEVICES)
    model, params, specs = boxed(mesh)

    def compiled(with_count):
        def loss(params, apply_fn, batch, rng):
            value, (metrics, _) = loss_fn(params, apply_fn, batch, rng)
            return value, (metrics if with_count else {}, None)

        def step(params, batch):
            state = TrainState(step=0, apply_fn=model.apply, params=params, tx=None, opt_state=None)
            return sync_gradients(accumulate_gradients(state, batch, None, 2, loss, use_scan)[0], ("dp", "fsdp"))

        rows = P(("dp", "fsdp"))
        run = jax.shard_map(step, mesh=mesh, in_specs=(specs, rows), out_specs=specs)
        text = jax.jit(run).lower(params, make_batch(empty=False)).compile().as_text()
        return {op: len(re.findall(rf" {op}\(", text)) for op in ("dot", "all-gather", "reduce-scatter")}

    plain, counted = compiled(False), compiled(True)
    assert min(plain["dot"], plain["all-gather"]) > 0
    assert counted == plain
