"""Copy kernels: `cut_columns`, alone and in `matmul_scatter`, and `stack`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.flops import count_flops
from meshwright.parallel import local_map, matmul_scatter
from meshwright.parallel.kernels import copy_kernels
from meshwright.parallel.kernels.copy_kernels import cut_columns, stack

CUTS = [
    ((32, 512), ((256, 512), (0, 256)), "bfloat16"),
    ((64, 1024), ((768, 1024), (256, 768), (0, 256)), "float32"),
    ((24, 448), ((384, 448), (0, 384)), "bfloat16"),  # blocks of 8 rows and 64 columns
]


@pytest.fixture
def grids(monkeypatch):
    """Grids of all kernel calls."""
    seen, call = [], copy_kernels.call_kernel
    monkeypatch.setattr(copy_kernels, "call_kernel", lambda *args, **kw: seen.append(kw["grid"]) or call(*args, **kw))
    return seen


def weight(shape, dtype):
    return jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)


@pytest.mark.parametrize(("shape", "edges", "dtype"), CUTS)
def test_kernel_cuts_bitwise(shape, edges, dtype, grids):
    w = weight(shape, dtype)
    parts = jax.jit(functools.partial(cut_columns, edges=edges, kernels=True))(w)
    assert len(grids) == 1
    for part, (start, end) in zip(parts, edges, strict=True):
        assert part.dtype == w.dtype
        np.testing.assert_array_equal(part, w[:, start:end])


def test_grad_and_vmap_equal_slicing(grids):
    shape, edges, _ = CUTS[0]
    w = weight((3, *shape), "float32") / 1000

    def loss(w, kernels):
        first, second = cut_columns(w, edges, kernels=kernels)
        return jnp.sum(jnp.sin(first) * jnp.cos(second))

    for of in (jax.grad, lambda f: jax.grad(lambda w: jnp.sum(jnp.square(jax.grad(f)(w))))):
        mine, plain = (jax.jit(of(functools.partial(loss, kernels=kernels)))(w[0]) for kernels in (True, False))
        np.testing.assert_allclose(mine, plain, atol=1e-6)
    batched = jax.jit(jax.vmap(functools.partial(cut_columns, edges=edges, kernels=True)))(w)
    np.testing.assert_array_equal(batched[0], w[:, :, 256:])
    assert grids


@pytest.mark.parametrize(
    ("shape", "edges"),
    [
        ((32, 256), ((0, 256),)),
        ((30, 512), ((0, 256), (256, 512))),
        ((32, 300), ((0, 256), (256, 300))),
        ((0, 512), ((0, 256), (256, 512))),
    ],
    ids=["one part", "odd rows", "odd columns", "no rows"],
)
def test_unsupported_sizes_use_xla(shape, edges, grids):
    w = weight(shape, "float32")
    for part, (start, end) in zip(cut_columns(w, edges, kernels=True), edges, strict=True):
        np.testing.assert_array_equal(part, w[:, start:end])
    cut_columns(weight((32, 512), "complex64"), ((0, 256), (256, 512)), kernels=True)
    assert not grids


def test_kernels_are_off_by_default_on_cpus(grids):
    for kernels in (None, False):
        cut_columns(weight((32, 512), "float32"), ((0, 256), (256, 512)), kernels=kernels)
    assert not grids


def test_cut_does_not_count_as_matmul():
    shape, edges, dtype = CUTS[0]
    run = functools.partial(cut_columns, edges=edges, kernels=True)
    found = count_flops(lambda w: [part.T @ part for part in run(w)], weight(shape, dtype))
    plain = count_flops(lambda w: [w[:, start:end].T @ w[:, start:end] for start, end in edges], weight(shape, dtype))
    assert (found.matmul, found.notes) == (plain.matmul, ())


@pytest.fixture
def stand_in(monkeypatch):
    """The same as the kernel, in operations that run on several CPU devices."""
    used = []

    def call(kernel, w, *, grid, outs, **_):
        edges, rows, columns = (kernel.keywords[name] for name in ("edges", "rows", "columns"))
        assert (grid[0] * rows, grid[1] * columns) == w.shape
        assert [shape for shape, _ in outs] == [(w.shape[0], end - start) for start, end in edges]
        used.append(edges)
        return [w[:, start:end] for start, end in edges]

    monkeypatch.setattr(copy_kernels, "call_kernel", call)
    monkeypatch.setattr(copy_kernels, "uses_kernels", lambda wanted: wanted is not False)
    return used


@pytest.mark.parametrize("grad_form", [None, "parts"])
def test_scatters_in_parts_equal_one_device(grad_form, stand_in):
    rng = np.random.default_rng(0)
    x, w, d = (jnp.asarray(rng.standard_normal(shape), "float32") for shape in ((2, 16, 64), (64, 1024), (2, 16, 1024)))
    rows, columns = P(None, "tp", None), P(None, None, "tp")

    def loss(x, w, d, **options):
        call = functools.partial(matmul_scatter, axis="tp", form="parts", grad_form=grad_form, **options)
        run = local_map(call, mesh=mw.create_mesh("tp:8"), in_specs=(columns, P("tp", None)), out_specs=rows)
        return jnp.sum(run(x, w) * d)

    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w, d)
    assert len(stand_in) == 1
    assert len(stand_in[0]) > 1
    true, true_grads = jax.value_and_grad(lambda x, w: jnp.sum((x @ w) * d), argnums=(0, 1))(x, w)
    np.testing.assert_allclose(value, true, rtol=1e-4)
    for got, wanted in zip(grads, true_grads, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6 * np.abs(wanted).max())
    jax.jit(functools.partial(loss, kernels=False))(x, w, d)
    assert len(stand_in) == 1


# --- Stacking ---


def arrays(count, shape, dtype):
    return [jax.random.normal(jax.random.key(seed), shape).astype(dtype) for seed in range(count)]


@pytest.mark.parametrize(
    ("count", "shape", "dtype"),
    [(5, (32, 64), jnp.bfloat16), (6, (1024, 3), jnp.float32), (9, (16, 1024), jnp.float32)],
)
def test_kernel_stacks_bitwise(count, shape, dtype, monkeypatch):
    given, used = arrays(count, shape, dtype), []
    call = copy_kernels.call_kernel
    monkeypatch.setattr(copy_kernels, "call_kernel", lambda *args, **kw: used.append(kw["grid"]) or call(*args, **kw))
    stacked = jax.jit(lambda given: stack(given, kernels=True))(given)
    assert stacked.dtype == dtype
    assert stacked.shape == (count, *shape)
    assert (stacked == jnp.stack(given)).all()
    (grid,) = used
    assert grid[1] == count


@pytest.mark.parametrize(("count", "shape"), [(4, (64, 64)), (8, (30, 7))])
def test_few_arrays_and_odd_sizes_use_xla(count, shape, monkeypatch):
    monkeypatch.setattr(copy_kernels, "call_kernel", None)
    given = arrays(count, shape, jnp.float32)
    assert (stack(given, kernels=True) == jnp.stack(given)).all()
