"""NNX modules have the same parameters on every mesh, and the same results and gradients in every view."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import PlacementError
from meshwright.parallel import local_map
from meshwright.parallel.nnx import (
    ColumnDense,
    FusedColumnDense,
    RowDense,
    SequenceNorm,
    VocabEmbed,
    VocabHead,
    param_specs,
)

BATCH, ROWS, DIM, HIDDEN, VOCAB = 2, 16, 6, 24, 37  # no axis size divides 37 tokens


class Model(nnx.Module):
    def __init__(self, sp, rngs, dtype=None):
        options = {"axis": "tp", "rngs": rngs}
        dense = options | {"sequence_parallel": sp, "dtype": dtype}
        self.embed = VocabEmbed(VOCAB, DIM, pad_to_multiple_of=8, **dense)
        self.norm = SequenceNorm(DIM, **options)
        self.mlp = FusedColumnDense(DIM, {"gate": HIDDEN, "up": HIDDEN}, use_bias=False, **dense)
        self.down = RowDense(HIDDEN, DIM, bias_init=nnx.initializers.normal(), **dense)
        self.last_norm = SequenceNorm(DIM, center=True, use_bias=True, **options)
        self.last = ColumnDense(DIM, HIDDEN, bias_init=nnx.initializers.normal(), **dense)
        self.back = RowDense(HIDDEN, DIM, use_bias=False, **dense)
        self.head = VocabHead(DIM, VOCAB, pad_to_multiple_of=8, **dense)

    def __call__(self, ids, targets, mask):
        x = self.embed(ids)
        gate, up = self.mlp(self.norm(x))
        x = x + self.down(jax.nn.silu(gate) * up)
        x = x + self.back(jnp.tanh(self.last(self.last_norm(x))))
        return self.head(x, targets, mask=mask).sum() + self.embed.loss(x, targets, mask=mask).sum()


@functools.cache
def mesh_of(ways):
    data = 2 if ways <= 4 else 1
    return mw.create_mesh(f"dp:{data},tp:{ways}", devices=data * ways)


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    ids, targets = (rng.integers(0, VOCAB, (BATCH, ROWS), np.int32) for _ in range(2))
    return ids, targets, rng.random((BATCH, ROWS)) < 0.8


def init(key, sp=True):
    return nnx.split(Model(sp, nnx.Rngs(key)))[1]


@functools.cache
def state_on(ways):
    """Parameters initialized in shards. The option makes random numbers the same on every mesh."""
    mesh = mesh_of(ways)
    specs = param_specs(jax.eval_shape(init, jax.random.key(0)))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(init, out_shardings=shardings, compiler_options=options)(jax.random.key(0))


def loss_of(graph):
    return lambda state, *batch: nnx.merge(graph, state)(*batch)


@functools.cache
def expected():
    """The same model written with plain matmuls."""
    state = jax.device_get(nnx.to_pure_dict(state_on(1)))

    def loss(p, ids, targets, mask):
        def norm(x, layer, center):
            x = x - x.mean(-1, keepdims=True) if center else x
            return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * layer["scale"] + layer.get("bias", 0)

        x = jnp.asarray(p["embed"]["embedding"])[ids]
        h = norm(x, p["norm"], False)
        h = jax.nn.silu(h @ p["mlp"]["gate"]["kernel"]) * (h @ p["mlp"]["up"]["kernel"])
        x = x + h @ p["down"]["kernel"] + p["down"]["bias"]
        h = jnp.tanh(norm(x, p["last_norm"], True) @ p["last"]["kernel"] + p["last"]["bias"])
        x = x + h @ p["back"]["kernel"]
        total = 0.0
        for head in (p["head"]["kernel"], p["embed"]["embedding"].T):
            each = -jnp.take_along_axis(jax.nn.log_softmax(x @ head[:, :VOCAB]), targets[..., None], -1)[..., 0]
            total = total + jnp.where(mask, each, 0).sum()
        return total

    return jax.device_get(jax.value_and_grad(loss)(state, *batch()))


def check(loss, grads, tolerance=2e-6):
    true_loss, true = expected()
    np.testing.assert_allclose(loss, true_loss, rtol=max(tolerance, 1e-6))
    ours = nnx.to_pure_dict(grads)
    assert jax.tree.structure(ours) == jax.tree.structure(true)
    for (path, got), want in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(true), strict=True):
        error = np.abs(np.asarray(got, np.float32) - want).max()
        assert error <= tolerance * np.abs(want).max(), (jax.tree_util.keystr(path), error)


def local_loss(graph, ways, specs):
    def loss(state, *batch):
        total = nnx.merge(graph, state)(*batch)
        return lax.psum(total, "dp") if mesh_of(ways).shape["dp"] > 1 else total

    return local_map(loss, mesh=mesh_of(ways), in_specs=(specs, *[P("dp")] * 3), out_specs=P())


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_one_seed_gives_bitwise_equal_parameters_on_every_mesh(ways):
    one, many = (nnx.to_pure_dict(jax.device_get(state_on(w))) for w in (1, ways))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    kernel = state_on(ways)["mlp"]["gate"]["kernel"][...]
    assert kernel.addressable_shards[0].data.shape == (DIM, HIDDEN // ways)


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_local_view_equals_one_device(ways, sp):
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Model(sp, nnx.Rngs(0))))
    f = local_loss(graph, ways, param_specs(abstract))
    check(*jax.jit(jax.value_and_grad(f))(state_on(ways), *batch()))


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("ways", [1, 4])
def test_global_view_equals_one_device(ways, sp):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Model(sp, nnx.Rngs(0))))
    with jax.set_mesh(mesh_of(ways)):
        check(*jax.jit(jax.value_and_grad(loss_of(graph)))(state_on(ways), *batch()))


def test_a_module_runs_without_a_mesh_and_under_nnx_transforms():
    model = Model(True, nnx.Rngs(0))
    nnx.update(model, jax.device_get(state_on(1)))
    loss, grads = nnx.jit(nnx.value_and_grad(lambda model, *batch: model(*batch)))(model, *batch())
    check(loss, grads)


def test_dtype_is_the_compute_dtype():
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Model(True, nnx.Rngs(0), dtype=jnp.bfloat16)))
    loss, grads = jax.jit(jax.value_and_grad(local_loss(graph, 4, param_specs(abstract))))(state_on(4), *batch())
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    check(loss, grads, tolerance=5e-2)


def test_specs_of_mixed_modules():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.theirs = nnx.Linear(2, 3, rngs=rngs)
            self.ours = FusedColumnDense(2, {"q": 8, "k": 8}, axis="tp", rngs=rngs)

    specs = nnx.to_pure_dict(param_specs(Mixed(nnx.Rngs(0))))
    column = {"kernel": P(None, "tp"), "bias": P("tp")}
    assert specs == {"theirs": {"kernel": P(), "bias": P()}, "ours": {"q": column, "k": column}}


def test_leaving_out_a_bias_does_not_change_other_layers():
    with_bias, without = (
        nnx.to_pure_dict(nnx.state(FusedColumnDense(2, {"q": 8, "k": 8}, axis="tp", use_bias=use, rngs=nnx.Rngs(0))))
        for use in (True, False)
    )
    np.testing.assert_array_equal(with_bias["k"]["kernel"], without["k"]["kernel"])


def test_bad_names_of_a_fused_layer():
    for names in ({}, {"__call__": 8}, {"names": 8}, {"not a name": 8}):
        with pytest.raises(PlacementError, match=r"FusedColumnDense got layers named .*\nhint: use identifiers"):
            FusedColumnDense(2, names, axis="tp", rngs=nnx.Rngs(0))
