"""The matmul kernel that writes products of gathered rows in place, alone and in `gather_matmul`."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.flops import count_flops
from meshwright.parallel import gather_matmul, local_map
from meshwright.parallel.kernels import matmul_kernel
from meshwright.parallel.kernels.matmul_kernel import can_write, row_unit, tile_columns, write_product
from meshwright.parallel.overlap import collective_matmul, collective_parts
from meshwright.plan.compiled.hlo import parse_program
from meshwright.plan.compiled.matmuls import Matmuls

needs_refs = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels take Refs since jax 0.11")


def whole_numbers(seed, *shape, dtype="bfloat16"):
    """Values with exact products and sums in float32, for bitwise comparison."""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


@needs_refs
@pytest.mark.parametrize(
    ("size", "blocks", "edges", "depth", "columns", "dtype"),
    [
        (8, 1, (0, 16, 48), 128, 256, "bfloat16"),
        (4, 2, (0, 16, 64), 192, 384, "bfloat16"),  # tiles of 192 columns; runs of 16 rows
        (2, 8, (0, 8, 24, 32), 64, 128, "float16"),
        (1, 1, (0, 128), 64, 512, "bfloat16"),
    ],
)
def test_products_are_written_in_place(size, blocks, edges, depth, columns, dtype):
    values = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "kernel_values.py"))
    assert values["wrong_products"](size, blocks, edges, depth, columns, dtype) == 0


@pytest.fixture
def hopper(monkeypatch):
    """Pretends that programs run on Hopper GPUs with kernels."""
    monkeypatch.setattr(matmul_kernel, "is_hopper", lambda mesh: True)
    monkeypatch.setattr(collective_matmul, "uses_kernels", lambda wanted: wanted is not False)
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 11)))


@pytest.mark.parametrize(
    ("shape", "columns", "dtypes", "size", "works"),
    [
        ((2048, 8192), (3584,), ("bfloat16", "bfloat16", None), 8, True),
        ((2048, 8192), (3584, 1024, 128), ("bfloat16", "bfloat16", None), 8, True),
        ((4, 512, 4096), (1728,), ("float16", "float16", None), 8, True),
        ((2048, 8192), (3584, 100), ("bfloat16", "bfloat16", None), 8, False),  # partial tiles
        ((2048, 8200), (3584,), ("bfloat16", "bfloat16", None), 8, False),
        ((2056, 8192), (3584,), ("bfloat16", "bfloat16", None), 8, False),
        ((2048, 8192), (3584,), ("float32", "float32", None), 8, False),
        ((2048, 8192), (3584,), ("bfloat16", "float32", None), 8, False),
        ((2048, 8192), (3584,), ("bfloat16", "bfloat16", "float32"), 8, False),
        ((0, 8192), (3584,), ("bfloat16", "bfloat16", None), 8, False),
        ((2048, 8192), (3584, 0), ("bfloat16", "bfloat16", None), 8, False),
    ],
)
def test_supported_shapes_and_dtypes(hopper, shape, columns, dtypes, size, works):
    x = jax.ShapeDtypeStruct(shape, dtypes[0])
    weights = [jax.ShapeDtypeStruct((shape[-1], count), dtypes[1]) for count in columns]
    assert can_write(x, weights, dtypes[2], size) is works


def test_other_chips_and_older_jax_do_not_use_it(hopper, monkeypatch):
    x, w = jax.ShapeDtypeStruct((2048, 8192), "bfloat16"), jax.ShapeDtypeStruct((8192, 3584), "bfloat16")
    monkeypatch.setattr(matmul_kernel, "is_interpreted", lambda: False)
    assert can_write(x, [w], None, 8)
    monkeypatch.setattr(matmul_kernel, "is_hopper", lambda mesh: False)
    assert not can_write(x, [w], None, 8)
    monkeypatch.setattr(matmul_kernel, "is_hopper", lambda mesh: True)
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert not can_write(x, [w], None, 8)


def test_row_units_fill_whole_tiles():
    assert [row_unit(together) for together in (1, 8, 16, 24, 32, 512)] == [128, 16, 8, 16, 8, 8]
    assert [tile_columns(columns) for columns in (3584, 1728, 128, 384, 1376)] == [256, 192, 128, 192, 256]


def write_plainly(out, rows, w, *, size, num_blocks, shard_rows, start):
    """The same as the kernel, in operations that run on several CPU devices."""
    product = (rows @ w).reshape(size, num_blocks, -1, w.shape[1])
    if out is None:
        out = jnp.full((num_blocks * size * shard_rows, w.shape[1]), jnp.nan, rows.dtype)
    places = out.reshape(num_blocks, size, shard_rows, w.shape[1])
    end = start + product.shape[2]
    return places.at[:, :, start:end].set(jnp.moveaxis(product, 0, 1)).reshape(out.shape)


@needs_refs
@pytest.mark.parametrize("num_rows", [16, 64, 2048])
def test_every_part_fills_whole_tiles(hopper, num_rows, monkeypatch):
    """Even if there are fewer tiles than parts."""
    sizes = []

    def record(out, rows, w, **options):
        sizes.append(rows.shape[0])
        return write_product(out, rows, w, **options)

    monkeypatch.setattr(collective_parts, "write_product", record)
    gather = functools.partial(gather_matmul, axis="tp", form="parts")
    split = local_map(gather, mesh=mw.create_mesh("tp:8"), in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    x, w = jax.ShapeDtypeStruct((8 * num_rows, 64), "bfloat16"), jax.ShapeDtypeStruct((64, 8 * 256), "bfloat16")
    jax.eval_shape(split, x, w)
    assert sum(sizes) == 8 * num_rows
    assert all(size % matmul_kernel.TILE_ROWS == 0 for size in sizes)


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize(("lead", "ways"), [((), 8), ((2, 3), 4), ((2,), 2)])
def test_gathers_with_the_kernel_equal_one_device(hopper, lead, ways, save_gathered, monkeypatch):
    """Loss and all gradients, two weights at once."""
    used = []
    monkeypatch.setattr(collective_matmul, "can_write", lambda *_: True)
    monkeypatch.setattr(
        collective_parts, "write_product", lambda *args, **kw: used.append(kw["start"]) or write_plainly(*args, **kw)
    )
    rng = np.random.default_rng(0)
    shapes = ((*lead, ways * 5, 6), (6, ways * 4), (6, ways * 3))
    x, up, gate = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    rows = P(*[None] * len(lead), "tp", None)

    def local(x, up, gate):
        a, b = gather_matmul(x, (up, gate), axis="tp", form="parts", save_gathered=save_gathered)
        return jax.lax.psum(jnp.sum(jnp.sin(a)) + jnp.sum(b * jnp.cos(b)), "tp")

    def plain(x, up, gate):
        return jnp.sum(jnp.sin(x @ up)) + jnp.sum(x @ gate * jnp.cos(x @ gate))

    mesh = mw.create_mesh(f"tp:{ways}", devices=ways)
    split = local_map(local, mesh=mesh, in_specs=(rows, P(None, "tp"), P(None, "tp")), out_specs=P())
    got = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2)))(x, up, gate)
    true = jax.value_and_grad(plain, argnums=(0, 1, 2))(x, up, gate)
    assert len(set(used)) > 1
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6 * np.abs(theirs).max())


@needs_refs
def test_vmap_and_second_derivatives_use_xla(hopper):
    """The kernel has no rules for them."""
    x, w = jax.ShapeDtypeStruct((2, 8 * 64, 128), "bfloat16"), jax.ShapeDtypeStruct((128, 8 * 256), "bfloat16")

    def loss(x, w):
        y = jax.vmap(lambda x: gather_matmul(x, w, axis="tp", form="parts"))(x)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), "tp")

    split = local_map(loss, mesh=mw.create_mesh("tp:8"), in_specs=(P(None, "tp"), P(None, "tp")), out_specs=P())
    first = jax.grad(split)
    found = str(jax.make_jaxpr(jax.grad(lambda x, w: jnp.vdot(first(x, w), x).astype(jnp.float32)))(x, w))
    assert "dot_general" in found
    assert "mpmd_map" not in found


def test_kernels_option_is_ignored_without_parts():
    x, w = jnp.ones((16, 4)), jnp.ones((4, 8))
    split = local_map(
        functools.partial(gather_matmul, axis="tp", form="ring", kernels=True),
        mesh=mw.create_mesh("tp:8"),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    np.testing.assert_array_equal(jax.jit(split)(x, w), x @ w)


@needs_refs
def test_flops_are_counted(hopper, monkeypatch):
    monkeypatch.setattr(matmul_kernel, "is_interpreted", lambda: True)
    rows, depth, columns = 8 * 64, 128, 8 * 256
    x, w = jax.ShapeDtypeStruct((rows, depth), "bfloat16"), jax.ShapeDtypeStruct((depth, columns), "bfloat16")
    mesh = mw.create_mesh("tp:8")

    def count(**options):
        gather = functools.partial(gather_matmul, axis="tp", form="parts", **options)
        return count_flops(
            local_map(gather, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")), x, w
        )

    mine, plain = count(), count(kernels=False)
    assert mine.matmul == plain.matmul == 2 * rows * depth * columns
    assert not mine.notes
    assert mine.by_dtype == plain.by_dtype


def test_compiled_kernel_is_recognized_as_a_matmul():
    program = parse_program(
        """HloModule jit_f, is_scheduled=true

ENTRY %main (p0: bf16[2304,4096], p1: bf16[4096,1792], p2: bf16[16384,1792]) -> bf16[16384,1792] {
  %p0 = bf16[2304,4096]{1,0} parameter(0)
  %p1 = bf16[4096,1792]{1,0} parameter(1)
  %p2 = bf16[16384,1792]{1,0} parameter(2)
  ROOT %mpmd_map.16 = bf16[16384,1792]{1,0} custom-call(%p0, %p1, %p2), custom_call_target="mosaic_gpu_v2", """
        """output_to_operand_aliasing={{}: (2, {})}, metadata={op_name="jit(f)/shard_map/write_product/mpmd_map"}
}
"""
    )
    (*_, call) = program.computations["main"]
    matmuls = Matmuls(program)
    assert matmuls.count(call) == 1
    assert matmuls.flops("main", call) == 2 * 2304 * 4096 * 1792
