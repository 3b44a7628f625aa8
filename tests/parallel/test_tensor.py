"""Tensor-parallel layers against one device: every layer, axis size and view, with the gradient of every argument."""

import contextlib
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.parallel import (
    column_dense,
    fused_column_dense,
    gather_matmul,
    local_heads,
    local_map,
    matmul_scatter,
    row_dense,
    sequence_norm,
    vary,
    varying_axes,
    vocab_cross_entropy,
    vocab_embed,
)
from meshwright.plan.schedule import read_schedule

# Sizes that every axis size divides, all different, so that no two dims can be mistaken for each other.
BATCH, ROWS, DIM, HIDDEN, VOCAB = 2, 16, 6, 24, 40
SPLIT, WHOLE = P("dp", "tp"), P("dp")
FEATURES = P("dp", None, "tp")
UP, DOWN = P(None, "tp"), P("tp")


@functools.cache
def mesh_of(ways):
    """Data parallelism beside the tensor axis wherever devices are left for it."""
    data = 2 if ways <= 4 else 1
    return mw.create_mesh(f"dp:{data},tp:{ways}", devices=data * ways)


@dataclass(frozen=True)
class Layer:
    """A layer as a function of named arrays, the same in plain jnp, and how a mesh splits arrays and result."""

    ours: Any
    plain: Any
    specs: Any
    out: Any
    name: str


def rows(sp):
    return SPLIT if sp else WHOLE


def normed(x, scale, bias=None, center=False):
    x = x - x.mean(-1, keepdims=True) if center else x
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale
    return y if bias is None else y + bias


def cross_entropy(x, head, targets, mask=None):
    loss = -jnp.take_along_axis(jax.nn.log_softmax(x @ head), targets[..., None], -1)[..., 0]
    return loss if mask is None else jnp.where(mask, loss, 0)


def block(a, sp=None, layers=None):
    """A small model of all layers, with two uses of the row-split stream, so that gradients add up along it."""
    if layers is None:
        embed = lambda ids, table: table[ids]  # noqa: E731
        norm, loss = normed, cross_entropy
        fused, down = lambda x, ws, bs: [x @ w + b for w, b in zip(ws, bs, strict=True)], lambda h, w, b: h @ w + b
    else:
        embed, norm, fused, down, loss = (
            functools.partial(f, axis="tp", **({} if f is sequence_norm else {"sequence_parallel": sp}))
            for f in (vocab_embed, sequence_norm, fused_column_dense, row_dense, vocab_cross_entropy)
        )
    x = embed(a["ids"], a["table"])
    gate, up = fused(norm(x, a["scale"]), (a["gate"], a["up"]), (a["b_gate"], a["b_up"]))
    x = x + down(jnp.tanh(gate) * up, a["down"], a["b_down"])
    return loss(norm(x, a["scale"]), a["head"], a["targets"], mask=a["mask"])


LAYERS = [
    Layer(
        lambda a, sp: column_dense(a["x"], a["gate"], a["b_gate"], axis="tp", sequence_parallel=sp),
        lambda a: a["x"] @ a["gate"] + a["b_gate"],
        lambda sp: {"x": rows(sp), "gate": UP, "b_gate": DOWN},
        lambda sp: FEATURES,
        "column",
    ),
    Layer(
        lambda a, sp: sum(
            fused_column_dense(a["x"], (a["gate"], a["up"]), (None, a["b_up"]), axis="tp", sequence_parallel=sp)
        ),
        lambda a: a["x"] @ a["gate"] + a["x"] @ a["up"] + a["b_up"],
        lambda sp: {"x": rows(sp), "gate": UP, "up": UP, "b_up": DOWN},
        lambda sp: FEATURES,
        "fused",
    ),
    Layer(
        lambda a, sp: row_dense(a["hidden"], a["down"], a["b_down"], axis="tp", sequence_parallel=sp),
        lambda a: a["hidden"] @ a["down"] + a["b_down"],
        lambda sp: {"hidden": FEATURES, "down": DOWN, "b_down": P()},
        rows,
        "row",
    ),
    Layer(
        lambda a, sp: sequence_norm(a["x"], a["scale"], axis="tp"),
        lambda a: normed(a["x"], a["scale"]),
        lambda sp: {"x": rows(sp), "scale": P()},
        rows,
        "norm",
    ),
    Layer(
        lambda a, sp: sequence_norm(a["x"], a["scale"], a["b_down"], axis="tp", center=True),
        lambda a: normed(a["x"], a["scale"], a["b_down"], center=True),
        lambda sp: {"x": rows(sp), "scale": P(), "b_down": P()},
        rows,
        "layer norm",
    ),
    Layer(
        lambda a, sp: vocab_embed(a["ids"], a["table"], axis="tp", sequence_parallel=sp),
        lambda a: a["table"][a["ids"]],
        lambda sp: {"ids": WHOLE, "table": DOWN},
        rows,
        "embed",
    ),
    Layer(
        lambda a, sp: vocab_cross_entropy(
            a["x"], a["head"], a["targets"], axis="tp", mask=a["mask"], sequence_parallel=sp
        ),
        lambda a: cross_entropy(a["x"], a["head"], a["targets"], a["mask"]),
        lambda sp: {"x": rows(sp), "head": UP, "targets": WHOLE, "mask": WHOLE},
        lambda sp: WHOLE,
        "cross-entropy",
    ),
    Layer(
        lambda a, sp: block(a, sp, "ours"),
        block,
        lambda sp: {
            "ids": WHOLE,
            "table": DOWN,
            "scale": P(),
            "gate": UP,
            "up": UP,
            "b_gate": DOWN,
            "b_up": DOWN,
            "down": DOWN,
            "b_down": P(),
            "head": UP,
            "targets": WHOLE,
            "mask": WHOLE,
        },
        lambda sp: WHOLE,
        "model",
    ),
]
BY_NAME = {layer.name: layer for layer in LAYERS}


@functools.cache
def values():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {
        "x": normal(BATCH, ROWS, DIM),
        "hidden": normal(BATCH, ROWS, HIDDEN),
        "gate": normal(DIM, HIDDEN),
        "up": normal(DIM, HIDDEN),
        "b_gate": normal(HIDDEN),
        "b_up": normal(HIDDEN),
        "down": normal(HIDDEN, DIM),
        "b_down": normal(DIM),
        "scale": normal(DIM),
        "table": normal(VOCAB, DIM),
        "head": normal(DIM, VOCAB),
        "ids": rng.integers(0, VOCAB, (BATCH, ROWS), np.int32),
        "targets": rng.integers(0, VOCAB, (BATCH, ROWS), np.int32),
        "mask": rng.random((BATCH, ROWS)) < 0.8,
    }


def floats(args):
    return {name: value for name, value in args.items() if jnp.issubdtype(value.dtype, jnp.floating)}


def arguments(layer, dtype="float32"):
    args = {name: values()[name] for name in layer.specs(True)}
    return args | {name: value.astype(dtype) for name, value in floats(args).items()}


def weights_like(y):
    return np.random.default_rng(1).standard_normal(y.shape, np.float32)


def grads_of(f, args, weight):
    """The result, and the gradient of its weighted sum, which no symmetry of the layer can make zero."""

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
    """The layer in the local view. Where it marks nothing itself, JAX sums gradients over dp in their own dtype, which
    XLA's CPU compiler cannot do in bfloat16; `marked` is for that (see `summing_dtype`)."""

    def f(a, weight):
        y = layer.ours(a | vary(floats(a), "dp") if marked else a, sp)
        total = jnp.sum(y.astype(jnp.float32) * weight)
        return lax.psum(total, tuple(sorted(varying_axes(total)))), y

    specs, out = layer.specs(sp), layer.out(sp)
    return local_map(f, mesh=mesh_of(ways), in_specs=(specs, out), out_specs=(P(), out))


def close(got, true, tolerance, what):
    error = np.abs(np.asarray(got, np.float32) - true).max()
    assert error <= tolerance * np.abs(true).max(), (what, error)


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
def test_without_a_mesh_it_is_the_plain_layer(name):
    check(name, lambda a, _: BY_NAME[name].ours(a, True))


@pytest.mark.parametrize("mesh", ["none", "global", "local"])
def test_no_axis_means_one_device_whatever_the_mesh(mesh):
    """In the local view of other axes too, where each device has its own rows."""
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
            return loss, jax.grad(lambda moving: layers(a | moving, axis).sum())(vary(floats(a), "dp"))

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


def test_no_axis_in_errors():
    v = values()
    with pytest.raises(PlacementError, match=r"hint: the bias must be \[24\]\.$"):
        column_dense(v["x"], v["gate"], v["b_down"], axis=None)
    with pytest.raises(PlacementError, match=r"hint: targets must be x's shape without its last dim"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"][:1], axis=None)


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("ways", [1, 4, 8])
@pytest.mark.parametrize("name", ["column", "row", "norm", "embed", "cross-entropy"])
def test_bfloat16_is_as_close_as_its_digits(name, ways, sp):
    """Eight bits: a result or a gradient that was summed in bfloat16, rather than rounded to it, would be further."""
    check(name, local(BY_NAME[name], ways, sp, marked=True), dtype="bfloat16", tolerance=2e-2)


@pytest.mark.parametrize("ways", [2, 4])
def test_the_axis_may_be_automatic_inside_another_one_that_is_manual(ways):
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
    """As a train step does: parameters marked first, and each device's part of the sum differentiated."""
    layer, ways = BY_NAME["model"], 4

    def step(a, weight):
        marked = vary(floats(a), "dp")
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
    """Gradients of what is replicated need vma; values do not."""
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


# --- Communication ---


def collectives(f, specs, out, args, ways=8):
    mesh = mw.create_mesh(f"tp:{ways}", devices=ways)
    mapped = local_map(f, mesh=mesh, in_specs=specs, out_specs=out)
    return read_schedule(jax.jit(mapped).lower(*args).compile().as_text()).collectives


def counts(found):
    kinds = {}
    for c in found:
        kinds[c.kind] = kinds.get(c.kind, 0) + c.trips
    return kinds


R, F = P(None, "tp"), P(None, None, "tp")


@pytest.mark.parametrize("ways", [2, 8])
def test_a_ring_has_one_hop_less_than_devices_and_nothing_else(ways):
    v = values()
    run = functools.partial(collectives, ways=ways)
    column = run(
        lambda x, w, b: column_dense(x, w, b, axis="tp", form="ring"),
        (R, UP, DOWN),
        F,
        (v["x"], v["gate"], v["b_gate"]),
    )
    fused = run(
        lambda x, *ws: fused_column_dense(x, ws, axis="tp", form="ring"), (R, UP, UP, UP), F, (v["x"], *3 * [v["gate"]])
    )
    row = run(
        lambda x, w, b: row_dense(x, w, b, axis="tp", form="ring"),
        (F, DOWN, P()),
        R,
        (v["hidden"], v["down"], v["b_down"]),
    )
    for found in (column, fused, row):
        assert counts(found) == {"collective-permute": ways - 1}
        assert sum(c.bytes_moved for c in found) == v["x"].nbytes * (ways - 1) / ways


def test_without_sequence_parallelism_one_sum_per_pair_of_layers_and_direction():
    v = values()

    def mlp(x, up, down):
        h = column_dense(x, up, axis="tp", sequence_parallel=False)
        return row_dense(jnp.tanh(h), down, axis="tp", sequence_parallel=False)

    args, specs = (v["x"], v["gate"], v["down"]), (P(), UP, DOWN)
    forward = collectives(mlp, specs, P(), args)
    assert counts(forward) == {"all-reduce": 1}
    assert forward[0].bytes_moved == v["x"].nbytes

    def grads(*args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(mlp(*args))), argnums=(0, 1, 2))(*args)

    assert counts(collectives(grads, specs, specs, args)) == {"all-reduce": 2}


def test_the_norm_sums_its_scale_gradient_once_and_says_nothing_else():
    v = values()
    norm = functools.partial(sequence_norm, axis="tp")
    assert not collectives(norm, (R, P()), R, (v["x"], v["scale"]))

    def grads(x, scale):
        return jax.grad(lambda x, s: jnp.sum(jnp.sin(norm(x, s))), argnums=(0, 1))(x, scale)

    found = collectives(grads, (R, P()), (R, P()), (v["x"], v["scale"]))
    assert counts(found) == {"all-reduce": 1}
    assert found[0].bytes_moved == v["scale"].nbytes
    # In bfloat16 the sum still is of float32 values.
    low = [value.astype(jnp.bfloat16) for value in (v["x"], v["scale"])]
    assert collectives(grads, (R, P()), (R, P()), low)[0].bytes_moved == 4 * DIM


@pytest.mark.parametrize("sp", [True, False])
def test_an_embedding_moves_rows_of_features_never_the_table(sp):
    v = values()
    embed = functools.partial(vocab_embed, axis="tp", sequence_parallel=sp)
    found = collectives(embed, (P(), DOWN), R if sp else P(), (v["ids"], v["table"]))
    assert counts(found) == {"reduce-scatter" if sp else "all-reduce": 1}
    assert found[0].bytes_moved == v["x"].nbytes

    def grad(ids, table):
        return jax.grad(lambda t: jnp.sum(jnp.sin(embed(ids, t))))(table)

    for c in collectives(grad, (P(), DOWN), DOWN, (v["ids"], v["table"])):
        assert c.bytes_moved <= v["x"].nbytes


@pytest.mark.parametrize("view", ["local", "global"])
@pytest.mark.parametrize("sp", [True, False])
def test_a_loss_moves_three_numbers_per_token_beside_its_rows(sp, view):
    """Neither logits nor head travel, forward or backward: the head is ten times as large as the rows."""
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 8, 4), (4, 1024)))
    targets = jnp.asarray(rng.integers(0, 1024, (1, 8)))
    mesh = mw.create_mesh("tp:8")

    def loss(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", sequence_parallel=sp).sum()

    specs = (R if sp else P(), UP, P())
    placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((x, head, targets), specs, strict=True)]

    def schedule(f, out):
        f = local_map(f, mesh=mesh, in_specs=specs, out_specs=out) if view == "local" else f
        out_shardings = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), out, is_leaf=lambda s: isinstance(s, P))
        with jax.set_mesh(mesh):
            text = jax.jit(f, out_shardings=out_shardings).lower(*placed).compile().as_text()
        return read_schedule(text).collectives

    forward = schedule(loss, P())
    beside = [c for c in forward if c.kind == "all-reduce"]
    assert sum(c.bytes_moved for c in beside) == 3 * targets.size * 4
    assert counts(forward).get("collective-permute", 0) == (7 if sp else 0)
    assert set(counts(forward)) <= {"all-reduce", "collective-permute"}
    for c in schedule(jax.grad(loss, argnums=(0, 1)), specs[:2]):
        assert c.bytes_moved <= x.nbytes, c


# --- Vocabularies ---


@pytest.mark.parametrize("ways", [1, 4])
def test_a_token_outside_of_the_vocabulary_is_nan_in_every_view(ways):
    v = values()
    ids = jnp.array([[0, VOCAB - 1, VOCAB, -1, -100, 3, 10**6, 7]])
    bad = np.array([False, False, True, True, True, False, True, False])

    def both(ids, table, head):
        x = vocab_embed(ids, table, axis="tp")
        return x, vocab_cross_entropy(jnp.nan_to_num(x), head, ids, axis="tp")

    args = ids, v["table"], v["head"]
    with jax.set_mesh(mesh_of(ways)):
        globally = jax.jit(both)(*args)
    locally = local_map(both, mesh=mesh_of(ways), in_specs=(P(), DOWN, UP), out_specs=(R, P()))
    for x, loss in (globally, jax.jit(locally)(*args), both(*args)):
        np.testing.assert_array_equal(np.isnan(x[0]).all(-1), bad)
        np.testing.assert_array_equal(np.isnan(x[0]).any(-1), bad)
        np.testing.assert_array_equal(np.isnan(loss[0]), bad)


def test_masked_tokens_may_have_any_target_and_get_no_gradient():
    v = values()
    targets = jnp.where(v["mask"], v["targets"], -100)

    def total(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", mask=v["mask"]).sum()

    true = jax.grad(lambda *args: cross_entropy(*args, v["targets"], v["mask"]).sum(), argnums=(0, 1))(
        v["x"], v["head"]
    )
    with jax.set_mesh(mesh_of(4)):
        ours = jax.jit(jax.grad(total, argnums=(0, 1)))(v["x"], v["head"], targets)
    for got, want in zip(ours, true, strict=True):
        close(got, want, 2e-6, "gradient")
    assert not np.asarray(ours[0])[~np.asarray(v["mask"])].any()


@pytest.mark.parametrize("sp", [True, False])
def test_columns_added_to_a_vocabulary_have_no_probability(sp):
    """33 tokens on 8 devices: padded to 40, the last device has nothing but padding."""
    v = values()
    head, targets = jnp.asarray(v["head"]).at[:, 33:].set(50.0), v["targets"] % 33

    def total(x, head, targets):
        return vocab_cross_entropy(x, head, targets, axis="tp", sequence_parallel=sp, vocab_size=33).sum()

    want, true = jax.value_and_grad(lambda *args: cross_entropy(*args, targets).sum(), argnums=(0, 1))(
        v["x"], head[:, :33]
    )
    mapped = local_map(total, mesh=mesh_of(8), in_specs=(P(None, "tp") if sp else P(), UP, P()), out_specs=P())
    got, ours = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(v["x"], head, targets)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    close(ours[0], true[0], 2e-6, "x")
    close(ours[1][:, :33], true[1], 2e-6, "head")
    assert not ours[1][:, 33:].any()


@pytest.mark.parametrize("ways", [1, 4])
def test_a_frequent_token_counts_exactly_in_bfloat16(ways):
    """1024 ones: in bfloat16, adding them one by one ends at 256."""
    ids, table = jnp.full((1, 1024), 5), jnp.zeros((8, 2), jnp.bfloat16)
    with jax.set_mesh(mesh_of(ways)):
        grad = jax.jit(jax.grad(lambda t: vocab_embed(ids, t, axis="tp").sum(dtype=jnp.float32)))(table)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.eye(8)[:, 5:6] * [[1024, 1024]])


@pytest.mark.parametrize("sp", [True, False])
def test_logits_are_float32_whatever_the_parameters_are(sp):
    """In bfloat16, logits near 100 are 0.5 apart, and so would be the losses."""
    x = jnp.full((1, 8, 1), 10.0, jnp.bfloat16)
    head = jnp.asarray(np.linspace(9.0, 11.0, 16)[None], jnp.bfloat16)
    targets = jnp.arange(8)[None]
    true = cross_entropy(x.astype(jnp.float32), head.astype(jnp.float32), targets)
    with jax.set_mesh(mesh_of(4)):
        ours = jax.jit(lambda *a: vocab_cross_entropy(*a, axis="tp", sequence_parallel=sp))(x, head, targets)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-5)


def test_huge_logits_stay_finite():
    x, head = jnp.full((1, 8, 1), 1e4), jnp.asarray(np.linspace(-1, 1, 8)[None], jnp.float32)
    with jax.set_mesh(mesh_of(4)):
        loss = jax.jit(lambda *a: vocab_cross_entropy(*a, axis="tp"))(x, head, jnp.full((1, 8), 6))
    np.testing.assert_allclose(loss, 1e4 * (head[0, 7] - head[0, 6]), rtol=1e-5)


# --- Bad inputs ---


def test_bad_input_25_heads_not_divisible_by_the_tensor_axis():
    text = (
        r"12 heads are not divisible by the 8 devices of axis 'tp': 12 % 8 = 4."
        r"\nhint: use 8 or 16 heads, or an axis of 1, 2, 3, 4, 6, 12 devices"
    )
    with jax.set_mesh(mesh_of(8)), pytest.raises(PlacementError, match=text):
        local_heads(12, axis="tp")
    with jax.set_mesh(mesh_of(4)), pytest.raises(PlacementError, match=r"2 kv heads are .*\nhint: use 4 kv heads, or"):
        local_heads(2, axis="tp", what="kv heads")

    def seen(x):
        return x + local_heads(12, axis="tp")

    assert local_map(seen, mesh=mesh_of(4), in_specs=P("tp"), out_specs=P("tp"))(jnp.zeros(4)).tolist() == [3] * 4
    with pytest.raises(PlacementError, match="12 heads are not divisible"):
        local_map(seen, mesh=mesh_of(8), in_specs=P("tp"), out_specs=P("tp"))(jnp.zeros(8))
    assert local_heads(12, axis="tp") == 12


def run_locally(f, specs, *args, ways=4):
    return local_map(f, mesh=mesh_of(ways), in_specs=specs, out_specs=P())(*args)


def test_an_argument_that_should_be_a_slice_and_is_whole():
    v = values()
    text = r"{}: {} of shape .* is the same on every device of axis 'tp'; each needs its own slice.\nhint: name 'tp' in"
    whole = (P(), P(), P())
    dense, down = (v["x"], v["gate"], v["b_gate"]), (v["hidden"], v["down"], v["b_down"])
    calls = [
        ("column_dense", "w", lambda x, w, b: column_dense(x, w, axis="tp"), dense, whole),
        ("column_dense", "b", lambda x, w, b: column_dense(x, w, b[:6], axis="tp"), dense, (P(), UP, P())),
        ("row_dense", "w", lambda x, w, b: row_dense(x, w, b, axis="tp"), down, whole),
        ("vocab_embed", "table", lambda i, t: vocab_embed(i, t, axis="tp"), (v["ids"], v["table"]), whole[:2]),
        (
            "vocab_cross_entropy",
            "head",
            lambda x, h, t: vocab_cross_entropy(x, h, t, axis="tp"),
            (v["x"], v["head"], v["targets"]),
            whole,
        ),
    ]
    for who, name, f, args, specs in calls:
        with pytest.raises(PlacementError, match=text.format(who, name)):
            run_locally(f, specs, *args)


def test_sizes_that_the_axis_does_not_divide():
    v = values()
    with jax.set_mesh(mesh_of(8)):
        with pytest.raises(
            PlacementError,
            match=r"50 tokens of vocabulary cannot be split over 8 devices of axis 'tp': 50 % 8 = 2.\nhint: pad to 56",
        ):
            vocab_cross_entropy(v["x"], jnp.ones((DIM, 50)), v["targets"], axis="tp")
        with pytest.raises(PlacementError, match=r"vocab_embed: 50 tokens of vocabulary .*\nhint: pad to 56"):
            vocab_embed(v["ids"], jnp.ones((50, DIM)), axis="tp")
        with pytest.raises(PlacementError, match=r"vocab_embed: 12 rows cannot .*\nhint: pad to 16"):
            vocab_embed(v["ids"][:, :12], v["table"], axis="tp")
        with pytest.raises(PlacementError, match=r"column_dense: 12 rows cannot .*\nhint: pad to 16"):
            column_dense(v["x"][:, :12], v["gate"], axis="tp")
        with pytest.raises(PlacementError, match=r"column_dense: 12 output features cannot .*\nhint: pad to 16"):
            column_dense(v["x"], v["gate"][:, :12], axis="tp")
        with pytest.raises(PlacementError, match=r"row_dense: 12 input features cannot .*\nhint: pad to 16"):
            row_dense(v["hidden"][..., :12], v["down"][:12], axis="tp")  # fmt: skip


def test_shapes_that_do_not_fit():
    v = values()
    with pytest.raises(PlacementError, match=r"column_dense cannot multiply x of shape \(2, 16, 6\) by .* \(24, 6\)"):
        column_dense(v["x"], v["down"], axis="tp")
    with pytest.raises(PlacementError, match=r"weight of shape \(24, 6\) and a bias of shape \(24,\) differ"):
        row_dense(v["hidden"], v["down"], v["b_up"], axis="tp")
    with pytest.raises(PlacementError, match="got 1 biases for 2 weights"):
        fused_column_dense(v["x"], (v["gate"], v["up"]), (v["b_up"],), axis="tp")
    with pytest.raises(PlacementError, match=r"x of shape \(2, 16, 6\) and scale of shape \(24,\) differ"):
        sequence_norm(v["x"], v["b_up"], axis="tp")
    with pytest.raises(PlacementError, match=r"ids must be .* of integers"):
        vocab_embed(v["x"], v["table"], axis="tp")
    with pytest.raises(PlacementError, match=r"needs targets of shape \(2, 16\); they have \(2, 8\)"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"][:, :8], axis="tp")
    with pytest.raises(PlacementError, match=r"needs targets of shape \(1, 16\); .*\nhint: targets are whole along"):
        local_map(
            lambda *a: vocab_cross_entropy(*a, axis="tp"), mesh=mesh_of(4), in_specs=(SPLIT, UP, SPLIT), out_specs=WHOLE
        )(v["x"], v["head"], v["targets"])
    with pytest.raises(PlacementError, match=r"vocab_size=41 of 40 columns.\nhint: use 1 to 40"):
        vocab_cross_entropy(v["x"], v["head"], v["targets"], axis="tp", vocab_size=41)


def test_options_without_effect_and_unknown_axes():
    v = values()
    for call in (
        lambda: column_dense(v["x"], v["gate"], axis="tp", sequence_parallel=False, form="ring"),
        lambda: row_dense(v["hidden"], v["down"], axis="tp", sequence_parallel=False, form="ring"),
        lambda: vocab_cross_entropy(v["x"], v["head"], v["targets"], axis="tp", sequence_parallel=False, form="ring"),
    ):
        with pytest.raises(PlacementError, match="form= would have no effect with sequence_parallel=False"):
            call()
    with jax.set_mesh(mesh_of(4)), pytest.raises(MeshError, match=r"sequence_norm names axis 'pt'; .*\nhint: did you"):
        sequence_norm(v["x"], v["scale"], axis="pt")
