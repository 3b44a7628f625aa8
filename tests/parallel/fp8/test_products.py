"""fp8 matmuls: against float64 on the same fp8 values, and on meshes against one device.

On meshes, inputs are small multiples of 1/4, so that every sum of products is exact in float32 and the order of the
sum does not matter: results must be equal bit for bit. Other inputs would differ in their last bit, which now and then
flips a rounding to fp8.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.errors import MeshwrightError
from meshwright.parallel import Fp8Weight, column_dense, fused_column_dense, local_map, row_dense, varying_axes
from meshwright.parallel.fp8.casting import E4M3, E5M2, scale_of
from meshwright.parallel.pipeline.stage_backward import split_stage

ROWS, D, F = 32, 32, 64
EPS = float(jnp.finfo(jnp.float32).eps)
WEIGHTS = {"up": (D, F), "gate": (D, F), "narrow": (D, 8), "down": (F, D)}
IN_FP8 = ("up", "gate", "down")
SPECS = {"up": P(None, "tp"), "gate": P(None, "tp"), "narrow": P(None, "tp"), "down": P("tp", None)}


@functools.cache
def arrays():
    rng = np.random.default_rng(0)
    shapes = {"x": D, "z": F, "g_up": F, "g_gate": F, "g_narrow": 8, "g_down": D}
    inputs = {name: rng.integers(-16, 17, (2, ROWS, width)) / 4 for name, width in shapes.items()}
    params = {name: rng.integers(-8, 9, shape) / 4 for name, shape in WEIGHTS.items()}
    # Amaxes of inputs and gradients are too small on purpose, so that some values saturate.
    scales = {name: jnp.array([2.0, 2.0, 1.0 + 2 * place]) for place, name in enumerate(IN_FP8)}
    to_float = functools.partial(jax.tree.map, lambda a: jnp.asarray(a, jnp.float32))
    return to_float(params), scales, to_float(inputs)


def products(params, scales, x, z, *, axis=None, scaling="delayed", sequence_parallel=True, kernels=None):
    """A block's start and end; nothing between them, so that all stays exact."""
    weights = {name: Fp8Weight(params[name], scales[name], scaling=scaling, kernels=kernels) for name in IN_FP8}
    options = {"axis": axis, "sequence_parallel": sequence_parallel}
    up, gate, narrow = fused_column_dense(x, (weights["up"], weights["gate"], params["narrow"]), **options)
    return {"up": up, "gate": gate, "narrow": narrow, "down": row_dense(z, weights["down"], **options)}


def both(params, scales, inputs, **options):
    """Returns the products and all gradients."""
    ys, pull = jax.vjp(
        lambda params, scales, x, z: products(params, scales, x, z, **options),
        params, scales, inputs["x"], inputs["z"],
    )  # fmt: skip
    d_params, found, dx, dz = pull({name: inputs[f"g_{name}"] for name in ys})
    return {"ys": ys, "grads": d_params, "amaxes": found, "dx": dx, "dz": dz}


@functools.cache
def on_one_device(scaling="delayed", kernels=None):
    return jax.jit(functools.partial(both, scaling=scaling, kernels=kernels))(*arrays())


def same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


# --- One product against float64 ---


def rounded(x, amax, dtype):
    name, top = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}[dtype], float(jnp.finfo(dtype).max)
    scale = float(scale_of(jnp.float32(amax), dtype))
    return np.clip(np.asarray(x, np.float32) / scale, -top, top).astype(name).astype(np.float64) * scale


@pytest.mark.parametrize("kernels", [None, True])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_products_are_those_of_the_fp8_values(scaling, kernels):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, [(ROWS, D), (D, F), (ROWS, F)], strict=True))
    g = g * 1e-3
    known = jnp.array([2.0, jnp.abs(w).max(), 1e-3])

    def product(x, w, known):
        return column_dense(x, Fp8Weight(w, known, scaling=scaling, kernels=kernels), axis=None)

    def run(x, w, known, g):
        y, pull = jax.vjp(product, x, w, known)
        return y, *pull(g)

    y, dx, dw, found = jax.jit(run)(x, w, known, g)
    own = [float(jnp.abs(a).max()) for a in (x, w, g)]
    used = [float(k) for k in known] if scaling == "delayed" else own
    x8, w8, g8 = (rounded(a, amax, kind) for a, amax, kind in zip((x, w, g), used, (E4M3, E4M3, E5M2), strict=True))
    for got, a, b in ((y, x8, w8), (dx, g8, w8.T), (dw, x8.T, g8)):
        bound = a.shape[1] * EPS * (np.abs(a) @ np.abs(b))
        assert (np.abs(np.asarray(got, np.float64) - a @ b) <= bound + 1e-30).all()
    assert found.tolist() == [own[0], 0.0, own[2]]
    # It is fp8: away from the exact product by more than any rounding of float32.
    assert np.abs(np.asarray(y) - np.asarray(x) @ np.asarray(w)).max() > 1e-2


# --- Meshes against one device ---

MESHES = ["dp:8", "tp:8", "dp:2,tp:4", "dp:4,tp:2"]


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_global_view_equals_one_device(mesh, scaling):
    mesh = mw.create_mesh(mesh)
    axis = "tp" if "tp" in mesh.axis_names else None
    with jax.set_mesh(mesh):
        got = jax.jit(functools.partial(both, axis=axis, scaling=scaling))(*arrays())
    same(got, on_one_device(scaling))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_local_view_equals_one_device(mesh, scaling, sequence_parallel):
    """The rows of x are split over all axes, or all but tp; amaxes come back as maxima over all devices."""
    mesh = mw.create_mesh(mesh)
    axis = "tp" if "tp" in mesh.axis_names else None
    data = "dp" if "dp" in mesh.axis_names else None
    lines = P(None, tuple(a for a in (data, axis if sequence_parallel else None) if a) or None)
    columns = P(None, data, axis)
    inputs = dict.fromkeys(("z", "g_up", "g_gate", "g_narrow"), columns) | {"x": lines, "g_down": lines}
    specs = {name: P(*(a if a in mesh.axis_names else None for a in spec)) for name, spec in SPECS.items()}
    ys = {"up": columns, "gate": columns, "narrow": columns, "down": lines}
    mapped = local_map(
        functools.partial(both, axis=axis, scaling=scaling, sequence_parallel=sequence_parallel),
        mesh=mesh,
        in_specs=(specs, P(), inputs),
        out_specs={"ys": ys, "grads": specs, "amaxes": P(), "dx": lines, "dz": columns},
    )
    same(jax.jit(mapped)(*arrays()), on_one_device(scaling))


def test_amaxes_of_devices_are_combined_by_maximum():
    """Each device has its own largest value; a sum would be 36, and any other device's value is below 8."""
    w = Fp8Weight(jnp.ones((16, 16)), jnp.ones(3))

    def found(x):
        def total(amaxes):
            y = column_dense(x, Fp8Weight(w.value, amaxes), axis=None)
            return jax.lax.psum((y * x).sum(), "dp")

        amaxes = jax.grad(total)(w.amaxes)
        assert not varying_axes(amaxes)
        return amaxes

    x = jnp.repeat(jnp.arange(1.0, 9.0), 16).reshape(8, 16)
    amaxes = local_map(found, mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P())(x)
    assert amaxes.tolist() == [8.0, 0.0, 8.0]


def test_rows_travel_in_fp8():
    params, scales, inputs = arrays()

    def forward(w, amaxes, x):
        return column_dense(x, Fp8Weight(w, amaxes), axis="tp")

    with jax.set_mesh(mw.create_mesh("tp:8")):
        text = jax.jit(forward).lower(params["up"], scales["up"], inputs["x"]).compile().as_text()
    hops = [line.split(" = ")[1].split("[")[0] for line in text.splitlines() if " collective-permute(" in line]
    assert hops == 7 * ["u8"]


def test_kernels_change_nothing():
    same(on_one_device("delayed", True), on_one_device("delayed"))


def test_gathered_weights_are_cast_again_in_the_backward_pass():
    params, scales, inputs = arrays()

    def run(value, x, *, is_gathered):
        return column_dense(x, Fp8Weight(value, scales["up"], is_gathered=is_gathered), axis=None)

    pulls = [
        jax.vjp(functools.partial(run, is_gathered=again), params["up"], inputs["x"])[1] for again in (True, False)
    ]
    same(*(pull(inputs["g_up"]) for pull in pulls))
    kinds = [{leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == (D, F)} for pull in pulls]
    assert kinds == [{"float32"}, {"float8_e4m3fn"}]


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ({}, False),
        ({"is_gathered": True}, False),
        ({"is_gathered": True, "kernels": True}, True),
        ({"stages": "pp"}, True),
    ],
    ids=str,
)
def test_kept_inputs_may_be_slices(options, taken):
    """Loops over layers and pipelines keep stacks. Without a barrier, XLA:GPU widens these before it slices them."""
    params, scales, inputs = arrays()

    def run(value, x):
        return column_dense(x, Fp8Weight(value, scales["up"], **options), axis=None)

    eqns = jax.make_jaxpr(jax.vjp(run, params["up"], inputs["x"])[1])(inputs["g_up"]).eqns
    barriers = [var.aval for eqn in eqns if eqn.primitive.name == "optimization_barrier" for var in eqn.invars]
    assert ((2 * ROWS, D) in [aval.shape for aval in barriers if aval.dtype == E4M3]) is taken


@pytest.mark.parametrize("stages", [None, "pp"])
def test_a_stage_of_a_pipeline_keeps_its_inputs_in_fp8(stages):
    params, scales, inputs = arrays()

    def both(free, x, dy):
        def run(value, x):
            return column_dense(x, Fp8Weight(value, scales["up"], stages=stages), axis=None)

        y, pull = jax.vjp(run, *free, *x)
        return [y, *reversed(pull(*dy))]

    stage = split_stage(both, [params["up"]], [inputs["x"]], [inputs["g_up"]], splits=False, saves=True)
    kinds = [var.aval.dtype for var in stage.saved if var.aval.size == inputs["x"].size]
    assert kinds == [E4M3 if stages else jnp.float32]


def test_overlap_options_without_effect_are_refused():
    w = Fp8Weight(jnp.ones((16, 16)), jnp.ones(3), name="layers/mlp/up")
    with pytest.raises(MeshwrightError, match=r"`layers/mlp/up` is multiplied in fp8, which has no form="):
        column_dense(jnp.ones((4, 16)), w, axis=None, form="ring")
