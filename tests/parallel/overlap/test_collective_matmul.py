"""Overlapped matmuls equal one device for every form, axis size, pass and view."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshError, PlacementError
from meshwright.parallel import Form, gather_matmul, local_map, matmul_scatter
from meshwright.parallel.overlap import collective_parts
from meshwright.parallel.overlap.collective_parts import multiply_all
from meshwright.parallel.overlap.forms import FORMS, PARTS, WHOLE, choose_form
from meshwright.plan.compiled.collectives import read_schedule

from ..one_device import mesh_of

# Every form of the table and the plain ones; ties change only the scheduling, never the values.
TABLE_FORMS = sorted({form for chip in FORMS.values() for form in chip.values()} | {WHOLE, PARTS, Form()}, key=str)
ROWS, UP, DOWN = P("dp", "tp", None), P(None, "tp"), P("tp", None)
BATCH, DIM = 2, 6


@functools.cache
def problem(ways, rows_each=4, dtype="float32"):
    rng = np.random.default_rng(ways)
    rows, hidden = ways * rows_each, ways * 3
    shapes = ((BATCH, rows, DIM), (DIM, hidden), (DIM, hidden), (hidden, DIM), (BATCH, rows, DIM))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def block(x, gate, up, down, gather, scatter):
    """A gated MLP: two weights share one gather, and their product is scattered."""
    a, b = gather(x, (gate, up))
    return scatter(jnp.tanh(a) * b, down)


def reference(x, gate, up, down, weight):
    y = block(x, gate, up, down, lambda x, ws: tuple(x @ w for w in ws), lambda h, w: h @ w)
    return jnp.sum(y * weight)


@functools.cache
def expected(ways, rows_each=4):
    *args, weight = problem(ways, rows_each)
    return jax.value_and_grad(reference, argnums=(0, 1, 2, 3))(*args, weight)


def local_loss(ways, check_vma=True, **options):
    scatter_options = {k: v for k, v in options.items() if k != "save_gathered"}

    def loss(x, gate, up, down, weight):
        y = block(
            x,
            gate,
            up,
            down,
            lambda x, ws: gather_matmul(x, ws, axis="tp", **options),
            lambda h, w: matmul_scatter(h, w, axis="tp", **scatter_options),
        )
        axes = tuple(axis for axis, size in mesh_of(ways).shape.items() if size > 1)
        total = jnp.sum(y * weight)
        return lax.psum(total, axes) if axes else total

    return local_map(loss, mesh=mesh_of(ways), in_specs=(ROWS, UP, UP, DOWN, ROWS), out_specs=P(), check_vma=check_vma)


def check(ways, f, rows_each=4, tolerance=2e-6):
    loss, grads = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*problem(ways, rows_each))
    true_loss, true_grads = expected(ways, rows_each)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-5)
    for name, ours, true in zip(("x", "gate", "up", "down"), grads, true_grads, strict=True):
        scale = np.abs(true).max()
        assert np.abs(ours - true).max() <= tolerance * scale, name


# One device has nothing to send, and four differ from eight only in the number of hops.
WAYS = [(1, PARTS), (1, Form()), *((4, form) for form in TABLE_FORMS[::2]), *itertools.product([2, 8], TABLE_FORMS)]


@pytest.mark.parametrize(("ways", "form"), WAYS, ids=str)
def test_every_form_equals_one_device(ways, form):
    check(ways, local_loss(ways, form=form, grad_form=form))


@pytest.mark.parametrize("form", TABLE_FORMS, ids=str)
def test_gathered_rows_keep_their_order(form):
    """Alone: after a scatter with the same mistake, rows would be back in their places."""
    x, gate, *_ = problem(4)
    gather = jax.jit(local_map(
        lambda x, w: gather_matmul(x, w, axis="tp", form=form),
        mesh=mesh_of(4), in_specs=(ROWS, UP), out_specs=P("dp", None, "tp"),
    ))  # fmt: skip
    np.testing.assert_allclose(gather(x, gate), x @ gate, atol=1e-5)


@pytest.mark.parametrize("form", [None, "ring", "both_ways", "parts", "whole"])
@pytest.mark.parametrize("ways", [3, 8])
def test_named_forms_and_the_table_equal_one_device(ways, form):
    check(ways, local_loss(ways, form=form, grad_form=form))


@pytest.mark.parametrize("form", ["ring", "both_ways", "parts", "whole"])
@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_sums_of_integers_and_floats(form, dtype):
    """Partial sums of integer rows and float weights are floats; sums of integers are exact."""
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 9, (16, 8)).astype(dtype)
    for w in (rng.normal(size=(8, 8)).astype(np.float32), rng.integers(1, 2**22, (8, 8)).astype(np.int32)):
        scatter = jax.jit(local_map(
            lambda x, w: matmul_scatter(x, w, axis="tp", form=form),
            mesh=mw.create_mesh("tp:8"), in_specs=(P(None, "tp"), P("tp", None)), out_specs=P("tp", None),
        ))  # fmt: skip
        got, wanted = scatter(x, w), x.astype(w.dtype) @ w
        assert got.dtype == w.dtype
        if w.dtype == np.int32:
            np.testing.assert_array_equal(got, wanted)
        else:
            np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("form", ["ring", "both_ways", "parts", "whole"])
def test_save_gathered_gives_the_same_gradients(form):
    check(4, local_loss(4, form=form, grad_form=form, save_gathered=True))


def test_odd_shards_that_cannot_be_halved():
    check(4, local_loss(4, form="both_ways", grad_form="both_ways"), rows_each=3)


def test_as_an_island_in_a_jit_program():
    def loss(x, gate, up, down, weight):
        gather = functools.partial(gather_matmul, axis="tp")
        return jnp.sum(block(x, gate, up, down, gather, functools.partial(matmul_scatter, axis="tp")) * weight)

    with jax.set_mesh(mesh_of(4)):
        check(4, loss)


def test_without_a_mesh_they_are_matmuls():
    x, gate, _, down, _ = problem(2)
    np.testing.assert_allclose(gather_matmul(x, gate, axis="tp"), x @ gate, rtol=1e-6)
    hidden = x @ gate
    np.testing.assert_allclose(matmul_scatter(hidden, down, axis="tp"), hidden @ down, rtol=1e-6)


@pytest.mark.parametrize("form", ["ring", "both_ways", "parts", "whole"])
def test_without_vma_values_are_right(form):
    """Gradients of replicated weights need vma; values do not."""
    *args, weight = problem(8)
    f = jax.jit(local_loss(8, check_vma=False, form=form))
    np.testing.assert_allclose(f(*args, weight), expected(8)[0], rtol=1e-5)


@pytest.mark.parametrize("wire", [None, "float32"])
@pytest.mark.parametrize("form", ["ring", "both_ways", "parts", "whole"])
def test_bfloat16_accumulates_in_float32(form, wire):
    x, gate, up, down, weight = problem(8)
    low = [value.astype(jnp.bfloat16) for value in (x, gate, up, down)]
    ours = jax.jit(jax.grad(local_loss(8, form=form, grad_form=form, wire_dtype=wire), argnums=(0, 1, 2, 3)))
    exact = jax.grad(reference, argnums=(0, 1, 2, 3))(*(v.astype(jnp.float32) for v in low), weight)
    for got, true in zip(ours(*low, weight), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        error = jnp.linalg.norm(got.astype(jnp.float32) - true) / jnp.linalg.norm(true)
        assert float(error) < 1.5e-2


@pytest.mark.parametrize("both_ways", [False, True])
def test_bytes_are_minimal(both_ways):
    ways = 8
    x, gate, up, down, weight = problem(ways)
    options = {"form": Form(both_ways=both_ways), "grad_form": Form(both_ways=both_ways)}
    compiled = jax.jit(local_loss(ways, **options)).lower(x, gate, up, down, weight).compile()
    permutes = [c for c in read_schedule(compiled.as_text()).collectives if c.kind == "collective-permute"]
    gathered = x.size * x.dtype.itemsize
    assert sum(c.trips * c.bytes_moved for c in permutes) == 2 * gathered * (ways - 1) / ways


def test_replicated_weights_sum_their_gradient_once():
    """Replicated weights are marked outside the custom_vjp, so the sum over dp happens exactly once."""
    check(4, local_loss(4))


def test_the_choice_of_form():
    assert choose_form("gather_matmul", None, axis_size=8, width=64) == FORMS["cpu"]["gather_matmul"]
    assert choose_form("gather_matmul", "both_ways", axis_size=8, width=64) == Form(both_ways=True)
    assert choose_form("gather_matmul", WHOLE, axis_size=8, width=64) == WHOLE
    with pytest.raises(PlacementError, match=r"unknown form 'rign'.\nhint: did you mean 'ring'"):
        choose_form("gather_matmul", "rign", axis_size=8, width=64)


def test_bad_shapes_and_axes():
    x, gate, _, down, _ = problem(4)
    with pytest.raises(PlacementError, match=r"cannot multiply x of shape \(2, 16, 6\) by a weight of shape \(12, 6\)"):
        gather_matmul(x, down, axis="tp")
    with jax.set_mesh(mesh_of(4)), pytest.raises(MeshError, match="gather_matmul names axis 'tpp'"):
        gather_matmul(x, gate, axis="tpp")
    scatter = local_map(
        lambda h, w: matmul_scatter(h, w, axis="tp"), mesh=mesh_of(4), in_specs=(UP, DOWN), out_specs=DOWN
    )
    with pytest.raises(PlacementError, match=r"6 rows cannot be split over 4 .*: 6 % 4 = 2.\nhint: pad to 8"):
        scatter(jnp.ones((6, 12)), down)


def test_gradients_of_shared_rows_are_summed_newest_product_first():
    # In this order the addition is fused into the matmul; in the other order, XLA makes a separate pass.
    x, ws = jnp.ones((4, 8), jnp.bfloat16), tuple(jnp.ones((8, width), jnp.bfloat16) for width in (8, 16, 24))

    def pull(x, grads):
        return jax.vjp(lambda x: gather_matmul(x, ws, axis=None), x)[1](grads)

    jaxpr = jax.make_jaxpr(pull)(x, tuple(jnp.ones((4, w.shape[1]), jnp.bfloat16) for w in ws)).jaxpr
    made = {out: equation.primitive.name for equation in jaxpr.eqns for out in equation.outvars}
    sums = [equation for equation in jaxpr.eqns if equation.primitive.name.startswith("add")]
    assert len(sums) == 2
    assert [made[equation.invars[0]] for equation in sums] == ["dot_general", "dot_general"]
    assert made[sums[1].invars[1]] == sums[0].primitive.name


@pytest.mark.parametrize("form", ["ring", "whole", "parts"])
def test_the_gradient_of_the_weight_is_not_put_off(form):
    """Both gradients pass one barrier, so the gathered rows of one layer are freed before the next."""
    mesh, specs = mw.create_mesh("tp:2", devices=2), (P("tp"), P(None, "tp"))

    def pull(x, w, d):
        return jax.vjp(lambda x, w: gather_matmul(x, w, axis="tp", grad_form=form), x, w)[1](d)

    local = local_map(pull, mesh=mesh, in_specs=(*specs, P(None, "tp")), out_specs=specs)
    mapped = jax.make_jaxpr(local)(jnp.ones((32, 4)), jnp.ones((4, 8)), jnp.ones((32, 8))).jaxpr.eqns[-1]
    body = mapped.params["jaxpr"]
    last = [one for one in body.eqns if one.primitive.name == "optimization_barrier"][-1]
    assert [var.aval.shape for var in last.outvars] == [(16, 4), (4, 4)]
    assert list(last.outvars) == list(body.outvars)


def test_products_of_several_weights_are_summed_newest_first_on_gpus(monkeypatch):
    """As above, for the products of the backward pass that are scattered."""
    monkeypatch.setattr(collective_parts, "chip_family", lambda mesh: "gpu")
    pairs = [jnp.ones((4, 8), jnp.bfloat16)] * 3, [jnp.ones((8, 4), jnp.bfloat16)] * 3
    jaxpr = jax.make_jaxpr(lambda xs, ws: multiply_all(xs, ws, jnp.bfloat16))(*pairs).jaxpr
    made = {out: equation.primitive.name for equation in jaxpr.eqns for out in equation.outvars}
    sums = [equation for equation in jaxpr.eqns if equation.primitive.name == "add"]
    assert [made[equation.invars[0]] for equation in sums] == ["dot_general", "dot_general"]


def test_ring_buffers_are_allocated_inside_loops():
    """If allocated outside a loop over layers, they would be copied in every iteration."""
    x, gate, _, down, _ = problem(2)

    def layer(h, weights):
        up, down = weights
        return h + matmul_scatter(jnp.tanh(gather_matmul(h, up, axis="tp", form="ring")), down, axis="tp"), None

    def loss(x, ups, downs):
        return lax.psum(jnp.sum(lax.scan(layer, x, (ups, downs))[0]), ("dp", "tp"))

    specs = ROWS, P(None, *UP), P(None, *DOWN)
    split = local_map(loss, mesh=mesh_of(2), in_specs=specs, out_specs=P())
    whole = jax.make_jaxpr(jax.grad(split, argnums=(0, 1, 2)))(x, jnp.stack([gate] * 3), jnp.stack([down] * 3))
    passes = [equation.params["jaxpr"] for equation in whole.eqns if equation.primitive.name == "shard_map"]
    outside = [equation.primitive.name for one in passes for equation in getattr(one, "jaxpr", one).eqns]
    assert outside.count("scan") == 2  # forward and backward
    assert "empty" not in outside


def test_vmap():
    """The buffers of a ring get the new dim as well."""
    x, gate, *_ = problem(4)
    ring = local_map(
        lambda x, w: jax.vmap(lambda x, w: gather_matmul(x, w, axis="tp", form="ring"), in_axes=(0, None))(x, w),
        mesh=mesh_of(4),
        in_specs=(ROWS, UP),
        out_specs=P("dp", None, "tp"),
    )
    np.testing.assert_allclose(jax.jit(ring)(x, gate), x @ gate, atol=1e-5)


@pytest.mark.parametrize("save_gathered", [False, True])
def test_second_derivatives(save_gathered):
    *args, weight = problem(4)
    loss = local_loss(4, form="ring", grad_form="ring", save_gathered=save_gathered)

    def along(loss):
        """The product of the Hessian with the arguments."""
        first = jax.grad(loss, argnums=(0, 1, 2, 3))
        return jax.grad(lambda args: sum(jnp.vdot(g, a) for g, a in zip(first(*args, weight), args, strict=True)))

    for got, true in zip(jax.jit(along(loss))(tuple(args)), along(reference)(tuple(args)), strict=True):
        np.testing.assert_allclose(got, true, atol=2e-5 * np.abs(true).max())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: gather_matmul(jnp.ones((6, 8)), jnp.ones((8, 8)), axis="tp"),
            r"gather_matmul: 6 rows cannot be split over 4",
        ),
        (lambda: gather_matmul(jnp.ones((8, 8)), jnp.ones((8, 6)), axis="tp"), r"6 columns cannot be .* 6 % 4 = 2"),
        (
            lambda: matmul_scatter(jnp.ones((8, 6)), jnp.ones((6, 8)), axis="tp"),
            r"matmul_scatter: 6 columns cannot",
        ),
    ],
)
def test_sizes_that_do_not_divide_in_a_jit_program(call, text):
    with jax.set_mesh(mesh_of(4)), pytest.raises(PlacementError, match=text):
        call()


def test_short_dtype_names():
    x, w = jnp.ones((8, 8)), jnp.ones((8, 8))
    with jax.set_mesh(mesh_of(4)):
        assert gather_matmul(x, w, axis="tp", out_dtype="bf16").dtype == jnp.bfloat16
        np.testing.assert_array_equal(matmul_scatter(x, w, axis="tp", wire_dtype="bf16"), x @ w)
