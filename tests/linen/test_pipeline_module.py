"""Pipelines of linen modules equal their stages run in order, with and without the wrapper."""

import faulthandler
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.linen.layers import ModelParallelismWrapper
from meshwright.linen.pipeline_module import PipelineModule, execute_pipeline, execute_pipeline_step
from meshwright.parallel.local_map import local_map

WIDTH = 8


@pytest.fixture(autouse=True)
def time_limit():
    """Ends the process after a deadlock between devices, because compiled code cannot be interrupted."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def assert_close(got, expected, tolerance=1e-5):
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() / scale < tolerance, jax.tree_util.keystr(path)


def mesh_of(text):
    size = int(np.prod([int(part.split(":")[1]) for part in text.split(",")]))
    return mw.create_mesh(text, devices=size)


class Block(nn.Module):
    width: int = WIDTH
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, gain=1.0, train=False, *, shift=0.0):
        y = nn.Dense(self.width, name="dense")(x * gain) + shift
        y = nn.Dropout(self.rate, deterministic=not train)(y)
        return y / jnp.sqrt((y**2).sum(-1, keepdims=True))


def test_arrays_without_rows_go_to_every_stage_and_have_gradients():
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))

    def piped(x, gain, shift):
        def stage(h, gain, *, shift):
            return jnp.tanh(h * gain + shift)

        out = execute_pipeline(stage, x, gain, shift=shift, num_microbatches=4, model_axis_name="pp")
        return (lax.psum(out, "pp") ** 2).sum()

    def in_order(x, gain, shift):
        for _ in range(4):
            x = jnp.tanh(x * gain + shift)
        return (x**2).sum()

    args = x, jnp.float32(1.5), jnp.linspace(0.0, 1.0, WIDTH)
    mapped = local_map(piped, mesh=mesh_of("pp:4"), in_specs=P(), out_specs=P())
    got = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1, 2)))(*args)
    assert_close(got, jax.value_and_grad(in_order, argnums=(0, 1, 2))(*args))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 4), (1, 2)])
def test_pipeline_module_equals_its_stages_in_order(num_stages, num_microbatches):
    module = PipelineModule(model_axis_name="pp", num_microbatches=num_microbatches, module_fn=Block)
    mesh = mesh_of(f"pp:{num_stages}")
    x = jax.random.normal(jax.random.key(0), (8, WIDTH))
    gain = jnp.linspace(0.5, 1.5, 8).reshape(8, 1)

    def init(key, x, gain):
        key = mw.fold_rng_over_axis(key, "pp")
        return jax.tree.map(lambda leaf: leaf[None], module.init(key, x, gain))

    params = local_map(init, mesh=mesh, in_specs=P(), out_specs=P("pp"))(jax.random.key(1), x, gain)
    assert list(params["params"]) == ["Block_0"]
    kernel = params["params"]["Block_0"]["dense"]["kernel"]
    assert kernel.shape == (num_stages, WIDTH, WIDTH)
    assert num_stages == 1 or not np.allclose(kernel[0], kernel[1])

    def piped(params, x, gain):
        out = module.apply(jax.tree.map(lambda leaf: leaf[0], params), x, gain, False, shift=0.25)
        return lax.psum(out, "pp") if num_stages > 1 else out

    def in_order(params, x, gain):
        for stage in range(num_stages):
            mine = jax.tree.map(operator.itemgetter(stage), params["params"]["Block_0"])
            x = Block().apply({"params": mine}, x, gain, False, shift=0.25)
        return x

    def with_grads(f):
        weight = jnp.arange(8.0).reshape(8, 1)
        loss = lambda params, x, gain: ((f(params, x, gain) + 1) ** 2 * weight).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(params, x, gain)

    piped = local_map(piped, mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=P())
    assert_close(with_grads(piped), with_grads(in_order))


def test_pipeline_module_in_the_wrapper():
    module = ModelParallelismWrapper(
        "pp", functools.partial(PipelineModule, model_axis_name="pp", num_microbatches=4, module_fn=Block)
    )
    mesh, x = mesh_of("dp:2,pp:2"), jax.random.normal(jax.random.key(0), (16, WIDTH))

    def loss_of(out):
        return ((out + 1) ** 2 * jnp.arange(WIDTH)).sum()

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda params: loss_of(lax.psum(module.apply(params, x), "pp")))(params)
        return lax.psum(loss, "dp"), grads

    init = local_map(module.init, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("pp"))
    step = local_map(step, mesh=mesh, in_specs=(P("pp"), P("dp")), out_specs=(P(), P("pp")))
    params = jax.jit(init)(jax.random.key(1), x)
    loss, grads = jax.jit(step)(params, x)
    params, grads = nn.meta.unbox(params), nn.meta.unbox(grads)
    stages, grads = (tree["params"]["sharded"]["Block_0"] for tree in (params, grads))
    assert stages["dense"]["kernel"].shape == (2, WIDTH, WIDTH)

    def in_order(stages):
        h = x
        for stage in range(2):
            h = Block().apply({"params": jax.tree.map(operator.itemgetter(stage), stages)}, h)
        return loss_of(h)

    assert_close((loss, grads), jax.value_and_grad(in_order)(stages))


def test_pipeline_module_dropout_differs_by_stage_and_row_not_by_microbatch():
    x = jnp.ones((8, WIDTH))
    outs = []
    for num_microbatches in (2, 4):
        module = PipelineModule("pp", num_microbatches, functools.partial(Block, rate=0.5))

        def run(key, x, module=module):
            params = module.init(jax.random.key(0), x)
            out = module.apply(params, x, 1.0, True, rngs={"dropout": key})
            return lax.psum(out, "pp")

        run = local_map(run, mesh=mesh_of("pp:2"), in_specs=P(), out_specs=P())
        outs.append(jax.jit(run)(jax.random.key(3), x))
    np.testing.assert_array_equal(outs[0] == 0, outs[1] == 0)
    assert len(np.unique(np.asarray(outs[0] == 0), axis=0)) > 1  # rows differ


def test_execute_pipeline_accepts_functions_and_needs_its_axis():
    def local(w, x, mask):
        return execute_pipeline(
            lambda h, mask, flag: h * w * mask if flag else h, x, mask, True, num_microbatches=2, model_axis_name="pp"
        )[None]

    mask = jnp.array([[1.0], [0.0], [1.0], [1.0]])
    run = local_map(local, mesh=mesh_of("pp:2"), in_specs=(P("pp"), P(), P()), out_specs=P("pp"))
    out = run(jnp.array([2.0, 5.0]), jnp.ones((4, 1)), mask)
    np.testing.assert_array_equal(out[1], 10 * mask)
    np.testing.assert_array_equal(out[0], jnp.zeros((4, 1)))
    with pytest.raises(mw.MeshError, match="did you mean 'pp'"):
        local_map(
            lambda x: execute_pipeline(lambda h: h, x, num_microbatches=1, model_axis_name="p"),
            mesh=mesh_of("pp:2"), in_specs=P(), out_specs=P(),
        )(jnp.ones((2, 1)))  # fmt: skip
    with pytest.raises(mw.PlacementError, match="differ in their leading dim"):
        run(jnp.array([2.0, 5.0]), jnp.ones((4, 1)), mask[:3])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_execute_pipeline_step_moves_by_one_stage(num_stages):
    def local(w, state, x):
        step = functools.partial(execute_pipeline_step, lambda h, shift: h * w[0] + shift, model_axis_name="pp")
        state, output = step(state, x, shift=1.0)
        return state[None], output[None]

    mesh = mesh_of(f"pp:{num_stages}")
    run = local_map(local, mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=(P("pp"), P("pp")))
    state, output = run(jnp.arange(2.0, 2.0 + num_stages), jnp.full((1,), 7.0), jnp.full((1,), 5.0))
    # The first stage computes 5 * 2 + 1, and the second 7 * 3 + 1 from the 7 it received.
    assert output[-1].item() == (22.0 if num_stages == 2 else 11.0)
    if num_stages == 2:
        assert state.ravel().tolist() == [0.0, 11.0]
        assert output[0].item() == 0.0
