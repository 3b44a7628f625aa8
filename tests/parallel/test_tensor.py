"""Tensor-parallel layers equal one device: every layer, axis size, view and gradient."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshwright.parallel import (
    column_dense,
    fused_column_dense,
    gather_matmul,
    local_heads,
    local_map,
    matmul_scatter,
    pcast_varying,
    row_dense,
    sequence_norm,
    varying_axes,
    vocab_cross_entropy,
    vocab_embed,
)

from .layers import BY_NAME, DIM, WHOLE, values
from .one_device import close, mesh_of


def floats(args):
    return {name: value for name, value in args.items() if jnp.issubdtype(value.dtype, jnp.floating)}


def arguments(layer, dtype="float32"):
    args = {name: values()[name] for name in layer.specs(True)}
    return args | {name: value.astype(dtype) for name, value in floats(args).items()}


def weights_like(y):
    return np.random.default_rng(1).standard_normal(y.shape, np.float32)


def grads_of(f, args, weight):
    """The result and the gradient of its weighted sum, which no symmetry of the layer makes zero."""

    def total(moving):
        y = f(args | moving, weight)
        return y if isinstance(y, tuple) else (jnp.sum(y.astype(jnp.float32) * weight), y)

    (_, y), grads = jax.value_and_grad(total, has_aux=True)(floats(args))
    return y, grads


@functools.cache
def expected(name):
    layer = BY_NAME[name]
    args = arguments(layer)
    weight = weights_like(jax.eval_shape(layer.plain, args))
    return (*jax.device_get(grads_of(lambda a, _: layer.plain(a), args, weight)), weight)


def local(layer, ways, sp, *, marked=False):
    """The layer in the local view. Set `marked` for bfloat16, which XLA's CPU compiler cannot sum over dp
    (see `summing_dtype`)."""

    def f(a, weight):
        y = layer.ours(a | pcast_varying(floats(a), "dp") if marked else a, sp)
        total = jnp.sum(y.astype(jnp.float32) * weight)
        return lax.psum(total, tuple(sorted(varying_axes(total)))), y

    specs, out = layer.specs(sp), layer.out(sp)
    return local_map(f, mesh=mesh_of(ways), in_specs=(specs, out), out_specs=(P(), out))


def check(name, f, tolerance=2e-6, dtype="float32"):
    y, grads, weight = expected(name)
    ours_y, ours_grads = jax.jit(lambda args: grads_of(f, args, weight))(arguments(BY_NAME[name], dtype))
    close(ours_y, y, tolerance, "result")
    assert set(ours_grads) == set(grads)
    for arg, true in grads.items():
        assert ours_grads[arg].dtype == dtype
        close(ours_grads[arg], true, tolerance, arg)


table = pytest.mark.parametrize(
    ("name", "ways", "sp"), [*itertools.product(BY_NAME, [1, 2, 4, 8], [True, False])], ids=str
)


@table
def test_local_view_equals_one_device(name, ways, sp):
    check(name, local(BY_NAME[name], ways, sp))


@table
def test_global_view_equals_one_device(name, ways, sp):
    with jax.set_mesh(mesh_of(ways)):
        check(name, lambda a, _: BY_NAME[name].ours(a, sp))


@pytest.mark.parametrize("name", BY_NAME)
def test_without_a_mesh_layers_are_plain(name):
    check(name, lambda a, _: BY_NAME[name].ours(a, True))


@pytest.mark.parametrize("mesh", ["none", "global", "local"])
def test_no_axis_means_one_device_on_any_mesh(mesh):
    """Also in the local view of other axes, with different rows on each device."""
    v = values()

    def layers(a, axis):
        x = vocab_embed(a["ids"], a["table"], axis=axis)
        gate, up = fused_column_dense(x, (a["gate"], a["up"]), (None, a["b_up"]), axis=axis)
        y = row_dense(gate * up, a["down"], a["b_down"], axis=axis, sequence_parallel=False)
        y = sequence_norm(y + row_dense(gate, a["down"], axis=axis), a["scale"], axis=axis)
        y = y + matmul_scatter(gather_matmul(y, a["gate"], axis=axis), a["down"], axis=axis)
        h = column_dense(y, a["gate"], a["b_gate"], axis=axis, sequence_parallel=False)
        return vocab_cross_entropy(y + h[..., :DIM], a["head"], a["targets"], axis=axis, mask=a["mask"])

    def run(axis):
        def both(a):
            loss = layers(a, axis)
            return loss, jax.grad(lambda moving: layers(a | moving, axis).sum())(pcast_varying(floats(a), "dp"))

        return both

    expected = jax.jit(run("tp"))(v)  # no mesh: one device
    f, context = run(None), contextlib.nullcontext()
    if mesh == "global":
        context = jax.set_mesh(mesh_of(4))
    elif mesh == "local":
        specs = {name: P("dp") if name in ("ids", "targets", "mask") else P() for name in v}
        grads = dict.fromkeys(floats(v), P())

        def summed(a):
            loss, grads = run(None)(a)
            return loss, lax.psum(grads, "dp")

        f = local_map(summed, mesh=mesh_of(4), in_specs=(specs,), out_specs=(WHOLE, grads))
    with context:
        got = jax.jit(f)(v)
        assert local_heads(7, axis=None) == 7
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("ways", [1, 4, 8])
@pytest.mark.parametrize("name", ["column", "row", "norm", "embed", "cross-entropy"])
def test_bfloat16_is_within_its_precision(name, ways, sp):
    """Results and gradients that were summed in bfloat16, not only rounded to it, would be further off."""
    check(name, local(BY_NAME[name], ways, sp, marked=True), dtype="bfloat16", tolerance=2e-2)


@pytest.mark.parametrize("ways", [2, 4])
def test_automatic_axis_inside_a_manual_one(ways):
    layer = BY_NAME["model"]

    def f(a, weight):
        y = layer.ours(a, True)
        return lax.psum(jnp.sum(y * weight), "dp"), y

    drop = functools.partial(
        jax.tree.map, lambda spec: P("dp") if "dp" in spec else P(), is_leaf=lambda x: isinstance(x, P)
    )
    mapped = local_map(
        f, mesh=mesh_of(ways), axes=("dp",), in_specs=(drop(layer.specs(True)), WHOLE), out_specs=(P(), WHOLE)
    )
    with jax.set_mesh(mesh_of(ways)):
        check("model", mapped)


@pytest.mark.parametrize("sp", [True, False])
def test_gradients_taken_inside_the_local_view(sp):
    """Like a train step: mark the parameters, then differentiate each device's part of the sum."""
    layer, ways = BY_NAME["model"], 4

    def step(a, weight):
        marked = pcast_varying(floats(a), "dp")
        (_, y), grads = jax.value_and_grad(
            lambda moving: (lambda y: (jnp.sum(y * weight), y))(layer.ours(a | moving, sp)), has_aux=True
        )(marked)
        return y, {name: g if "dp" in layer.specs(sp)[name] else lax.psum(g, "dp") for name, g in grads.items()}

    specs = layer.specs(sp)
    y, grads, weight = expected("model")
    mapped = local_map(
        step, mesh=mesh_of(ways), in_specs=(specs, WHOLE), out_specs=(WHOLE, {name: specs[name] for name in grads})
    )
    ours_y, ours_grads = jax.jit(mapped)(arguments(layer), weight)
    close(ours_y, y, 2e-6, "result")
    for name, true in grads.items():
        close(ours_grads[name], true, 2e-6, name)


@pytest.mark.parametrize("name", BY_NAME)
def test_without_vma_values_are_right(name):
    """Gradients of replicated arguments need vma; values do not."""
    layer = BY_NAME[name]
    y, *_ = expected(name)
    f = local_map(
        lambda a: layer.ours(a, True),
        mesh=mesh_of(4),
        in_specs=(layer.specs(True),),
        out_specs=layer.out(True),
        check_vma=False,
    )
    close(jax.jit(f)(arguments(layer)), y, 2e-6, "result")
