"""Overlapped matmuls in parts: how they cut, compute and send, and when they are chosen."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import PlacementError
from meshwright.parallel import Form, gather_matmul, local_map, matmul_scatter
from meshwright.parallel.kernels.matmul_kernel import tile_columns
from meshwright.parallel.overlap import forms as overlap_forms
from meshwright.parallel.overlap.collective_parts import MULTIPROCESSORS, part_bounds
from meshwright.parallel.overlap.forms import FORMS, PARTS, choose_form
from meshwright.plan.compiled.collectives import read_schedule

EVENER = Form(ring=False, parts=(2, 2, 3, 4, 5))


@given(
    total=st.integers(1, 5000),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    unit=st.sampled_from([1, 8, 16, 128, 256]),
    tiles=st.integers(1, 300),
)
@settings(max_examples=200, deadline=None)
def test_parts_cover_everything_once_and_in_order(total, parts, unit, tiles):
    edges = part_bounds(total, parts, unit=unit, tiles=tiles)
    assert (edges[0][0], edges[-1][1]) == (0, total)
    assert len(edges) <= len(parts)
    assert all(start < end for start, end in edges)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(edges))
    assert total % unit or all(end % unit == 0 for _, end in edges)


@pytest.mark.parametrize(
    ("rows", "columns"), [(16384, 3584), (8192, 3584), (16384, 1792), (32768, 1728), (16384, 2304), (65536, 1024)]
)
def test_parts_need_no_more_rounds_than_the_whole(rows, columns):
    """Rows of 8 devices, cut for tiles of 128 rows."""
    across = -(-columns // tile_columns(columns))
    sizes = [end - start for start, end in part_bounds(rows // 8, PARTS.parts, unit=16, tiles=across)]

    def rounds(num_rows):
        return math.ceil(num_rows / 128 * across / MULTIPROCESSORS)

    assert len(sizes) >= 3
    assert sum(rounds(8 * size) for size in sizes) <= rounds(rows)
    assert sizes == sorted(sizes)
    assert sizes[0] <= rows // 8 / 6  # the exposed part


@given(rows=st.integers(32, 512), columns=st.integers(8, 48))
@settings(max_examples=100, deadline=None)
def test_cutting_columns_costs_little(rows, columns):
    """A scatter with tiles of 128 x 256 cuts columns, and one tile column may need slightly more than a round."""
    sizes = [(end - start) // 256 for start, end in part_bounds(256 * columns, PARTS.parts, unit=256, tiles=rows)]
    in_one = math.ceil(columns * rows / MULTIPROCESSORS)
    more = sum(math.ceil(size * rows / MULTIPROCESSORS) for size in sizes) - in_one
    exposed = in_one / 2 * sizes[0] / columns  # parts that double assume transfers take half as long as matmuls
    assert more + exposed < 0.15 * in_one + 1.1


@functools.cache
def problem(lead, ways, dtype="float32"):
    rng = np.random.default_rng(ways)
    rows, dim, hidden = ways * 5, 6, ways * 20
    shapes = ((*lead, rows, dim), (dim, hidden), (hidden, dim), (*lead, rows, dim))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def loss_of(lead, ways, form):
    rows = P(*[None] * len(lead), "tp", None)

    def loss(x, up, down, weight):
        y = gather_matmul(x, up, axis="tp", form=form, grad_form=form)
        y = matmul_scatter(jnp.tanh(y), down, axis="tp", form=form, grad_form=form)
        return lax.psum(jnp.sum((y * weight).astype(jnp.float32)), "tp")

    mesh = mw.create_mesh(f"tp:{ways}", devices=ways)
    return local_map(loss, mesh=mesh, in_specs=(rows, P(None, "tp"), P("tp", None), rows), out_specs=P())


def reference(x, up, down, weight):
    return jnp.sum(jnp.tanh(x @ up) @ down * weight)


@pytest.mark.parametrize(
    ("lead", "ways", "form"),
    [
        ((), 2, PARTS),
        ((2, 3), 4, PARTS),
        ((), 8, PARTS),
        ((2, 3), 8, EVENER),
        ((2,), 3, EVENER),
        ((2,), 4, Form(ring=False, parts=(3,))),
    ],
    ids=str,
)
def test_any_leading_dims_equal_one_device(lead, ways, form):
    """Rows need not divide into the parts, and come back in order for any leading dims."""
    values = problem(lead, ways)
    grads = jax.jit(jax.grad(loss_of(lead, ways, form), argnums=(0, 1, 2)))(*values)
    for got, true in zip(grads, jax.grad(reference, argnums=(0, 1, 2))(*values), strict=True):
        np.testing.assert_allclose(got, true, atol=2e-6 * np.abs(true).max())


@pytest.mark.parametrize("ways", [2, 8])
def test_bfloat16_is_as_close_as_the_unsplit_form(ways):
    low = problem((3,), ways, "bfloat16")
    exact = jax.grad(reference, argnums=(0, 1, 2))(*(value.astype(jnp.float32) for value in low))

    def errors(form):
        grads = jax.jit(jax.grad(loss_of((3,), ways, form), argnums=(0, 1, 2)))(*low)
        return [float(jnp.linalg.norm(g - t) / jnp.linalg.norm(t)) for g, t in zip(grads, exact, strict=True)]

    for parts, whole in zip(errors("parts"), errors("whole"), strict=True):
        assert parts < 1.2 * whole < 2e-2


def test_bytes_are_minimal():
    ways, lead = 8, (2,)
    x, up, down, weight = problem(lead, ways)
    compiled = jax.jit(loss_of(lead, ways, "parts")).lower(x, up, down, weight).compile()
    moved = [c for c in read_schedule(compiled.as_text()).collectives if c.kind != "all-reduce"]
    assert {c.kind for c in moved} == {"all-gather", "reduce-scatter"}
    assert sum(c.wire_bytes for c in moved) == 2 * x.nbytes * (ways - 1) / ways


# --- Choice of form ---


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(overlap_forms, "chip_family", lambda mesh: "gpu")


@pytest.mark.parametrize(
    ("operation", "axis_size", "width", "form"),
    [
        ("gather_matmul", 8, 3584, PARTS),
        ("gather_matmul", 8, 3583, Form(ring=False, parts=(1,) * 6)),
        ("gather_matmul", 8, 1727, FORMS["gpu"]["gather_matmul"]),
        ("gather_matmul", 4, 7168, FORMS["gpu"]["gather_matmul"]),
        ("matmul_scatter", 8, 3584, PARTS),
        ("matmul_scatter", 4, 1792, Form(ring=False, parts=(1,) * 4)),
        ("matmul_scatter", 8, 1376, FORMS["gpu"]["matmul_scatter"]),
        ("matmul_scatter", 2, 3584, FORMS["gpu"]["matmul_scatter"]),
        ("gather_matmul_grad", 8, 3584, FORMS["gpu"]["gather_matmul_grad"]),
        ("matmul_scatter_grad", 8, 3584, FORMS["gpu"]["matmul_scatter_grad"]),
    ],
)
def test_gpus_choose_the_form_by_width(on_a_gpu, operation, axis_size, width, form):
    assert choose_form(operation, None, axis_size=axis_size, width=width) == form


def test_other_chips_use_their_table(monkeypatch):
    for chip in ("v5e", "v5p", "v6e", "cpu"):
        monkeypatch.setattr(overlap_forms, "chip_family", lambda mesh, chip=chip: chip)
        chosen = choose_form("matmul_scatter", None, axis_size=8, width=8192)
        assert chosen == FORMS[chip]["matmul_scatter"]


def test_with_other_automatic_axes_all_forms_are_rings(on_a_gpu):
    """In an island, XLA gathers arrays split over other axes before any collective that is not a hop."""
    mesh = mw.create_mesh("dp:2,tp:4")
    batch = jax.NamedSharding(mesh, P("dp", "tp", None))
    x, up, down, weight = problem((2,), 4)

    def loss(x, up, down):
        y = matmul_scatter(jnp.tanh(gather_matmul(x, up, axis="tp")), down, axis="tp")
        return jnp.sum(y * weight)

    with jax.set_mesh(mesh):
        arguments = jax.device_put(x, batch), up, down
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()
    found = read_schedule(compiled.as_text()).collectives
    over = {(c.kind, c.axes({"dp": 2, "tp": 4})) for c in found if c.kind != "all-reduce"}
    assert over == {("collective-permute", ("tp",))}


@pytest.mark.parametrize(
    "options", [{"ring": True}, {"ring": False, "tie": "next"}, {"ring": False, "both_ways": True}]
)
def test_parts_need_ring_false(options):
    with pytest.raises(PlacementError, match="parts must be positive and need ring=False"):
        Form(parts=(1, 2), **options)
    with pytest.raises(PlacementError, match="positive"):
        Form(ring=False, parts=(1, 0))
