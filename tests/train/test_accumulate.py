"""Gradients accumulated over minibatches and devices equal those of the whole batch on one device."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel.local_map import local_map
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.row_keys import row_key
from meshwright.parallel.vocabulary import own_zeros
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train.accumulate import Accumulated, accumulate

WIDTH, ROWS = 16, 64


def assert_close(got, expected, tolerance=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), (_, b) in zip(jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() / scale < tolerance, jax.tree_util.keystr(path)


# --- On any mesh ---


def make_params(dtype=jnp.float32, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (width, width)) / 4,
        "bias": jax.random.normal(keys[1], (width,)),
        "down": jax.random.normal(keys[2], (width, width)) / 4,
        "scale": jnp.float32(1.5),
    }
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_batch(rows=ROWS):
    """Three tokens per row, some of them valid; one in five rows, and a whole quarter of the rows, have none."""
    x = jax.random.normal(jax.random.key(1), (rows, 3, WIDTH))
    mask = jax.random.bernoulli(jax.random.key(2), 0.6, (rows, 3)) & (jnp.arange(rows) % 5 > 0)[:, None]
    return {"x": x, "y": jnp.roll(x, 1, 0), "mask": mask & (jnp.arange(rows) >= rows // 4)[:, None], "gain": 0.5}


def loss_fn(params, batch, rng, *, tp=None):
    """A squared error over valid tokens, with one tensor-parallel pair of matmuls if there is an axis for it."""
    h = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"] + params["bias"])
    if rng is not None:
        h = jnp.where(jax.random.bernoulli(rng, 0.7, h.shape), h / 0.7, 0)
    out = h @ params["down"]
    out = (lax.psum(out, tp) if tp else out) * params["scale"] * batch["gain"]
    errors = ((out.astype(jnp.float32) - batch["y"]) ** 2).sum(-1)
    total, count = (errors * batch["mask"]).sum(), batch["mask"].sum()
    pair = (total, count)
    return pair, {"loss": pair, "rows": (batch["mask"].any(-1).sum(), batch["mask"].shape[0]), "error": total / count}


@functools.cache
def one_device(seed=None):
    """The batch at once, with the dropout of `seed`."""
    rng = None if seed is None else row_key(jax.random.key(seed))

    def loss(params):
        (total, count), metrics = loss_fn(params, make_batch(), rng)
        return total / count, metrics

    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(make_params())
    return Accumulated(loss, grads, metrics)


MESHES = {
    "dp8": "dp:8",
    "fsdp8": "fsdp:8",
    "dp2 fsdp4": "dp:2,fsdp:4",
    "dp2 fsdp2 tp2": "dp:2,fsdp:2,tp:2",
    "dp1 fsdp8 tp1": "dp:1,fsdp:8,tp:1",
}


def specs_for(mesh):
    fsdp, tp = (axis if axis in mesh.axis_names else None for axis in ("fsdp", "tp"))
    specs = {"up": P(fsdp, tp), "bias": P(tp), "down": P(tp, fsdp), "scale": P()}
    rows = P(tuple(axis for axis in ("dp", "fsdp") if axis in mesh.axis_names))
    return specs, {"x": rows, "y": rows, "mask": rows, "gain": P()}


def distributed(mesh, *, num_minibatches, sync, rng=None, loss=loss_fn):
    mesh = mw.create_mesh(MESHES[mesh])
    specs, batch_specs = specs_for(mesh)
    loss = functools.partial(loss, tp="tp") if mesh.shape.get("tp", 1) > 1 else loss
    return local_map(
        lambda params, batch: accumulate(
            loss, params, batch, rng, num_minibatches=num_minibatches, specs=specs, sync=sync
        ),
        mesh=mesh,
        in_specs=(specs, batch_specs),
        out_specs=Accumulated(loss=P(), grads=specs, metrics=P()),
    )


SYNCS = ("every", "hybrid", "once")
# Two minibatches for all pairs of mesh and sync mode; one and eight for each mesh and for each sync mode.
TABLE = [
    *((mesh, sync, 2) for mesh in list(MESHES)[:4] for sync in SYNCS),
    *((mesh, SYNCS[(place + (count > 1)) % 3], count) for place, mesh in enumerate(MESHES) for count in (1, 8)),
]


@pytest.mark.parametrize(("mesh", "sync", "num_minibatches"), TABLE)
def test_any_mesh_sync_and_number_of_minibatches_equals_one_device(mesh, sync, num_minibatches):
    params, batch = make_params(), make_batch()
    step = jax.jit(distributed(mesh, num_minibatches=num_minibatches, sync=sync))
    got, expected = step(params, batch), one_device()
    # A metric without a count is weighted by the count of the loss, so a masked quarter adds no NaN.
    assert_close(got, expected)


def test_minibatches_with_axes_of_size_one():
    """`local_map` leaves axes of size 1 to XLA."""
    params, batch = make_params(), make_batch()
    step = jax.jit(distributed("dp1 fsdp8 tp1", num_minibatches=2, sync="hybrid"))
    assert_close(step(params, batch), one_device())


def test_outside_of_shard_map():
    params, batch = make_params(), make_batch()
    got = accumulate(loss_fn, params, batch, num_minibatches=4, specs=specs_for(mw.create_mesh("dp:8"))[0])
    assert_close(got, one_device())


@pytest.mark.parametrize(
    ("mesh", "sync", "num_minibatches"),
    [
        ("dp2 fsdp4", "once", 2),
        ("fsdp8", "hybrid", 8),
        ("dp8", "every", 1),
    ],
)
def test_dropout_depends_neither_on_the_mesh_nor_on_minibatches(mesh, sync, num_minibatches):
    params, batch = make_params(), make_batch()
    step = distributed(mesh, num_minibatches=num_minibatches, sync=sync, rng=jax.random.key(3))
    assert_close(jax.jit(step)(params, batch), one_device(seed=3))


def test_a_mean_gives_equal_weights():
    def mean_loss(params, batch, rng):
        return ((batch["x"] * params) ** 2).mean(), {}

    x = jnp.arange(1.0, 17.0)
    step = local_map(
        lambda params, batch: accumulate(mean_loss, params, batch, num_minibatches=2),
        mesh=mw.create_mesh("dp:8"), in_specs=(P(), P("dp")), out_specs=P(),
    )  # fmt: skip
    got = step(jnp.float32(3.0), {"x": x})
    assert_close((got.loss, got.grads), jax.value_and_grad(lambda w: ((x * w) ** 2).mean())(jnp.float32(3.0)))


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("reduced", ["mean", "pair"])
def test_a_loss_that_is_already_averaged(reduced, num_minibatches):
    """Its gradient is the gradient of the average, not an eighth of it."""

    def loss(params, batch, rng):
        errors = (batch["x"] * params) ** 2
        if reduced == "mean":
            return lax.pmean(errors.mean(), "dp"), {}
        return lax.psum((errors.sum(), jnp.float32(errors.size)), "dp"), {}

    x = jnp.arange(1.0, 17.0)
    step = local_map(
        lambda params, batch: accumulate(loss, params, batch, num_minibatches=num_minibatches),
        mesh=mw.create_mesh("dp:8"), in_specs=(P(), P("dp")), out_specs=P(),
    )  # fmt: skip
    got = step(jnp.float32(3.0), {"x": x})
    assert_close((got.loss, got.grads), jax.value_and_grad(lambda w: ((x * w) ** 2).mean())(jnp.float32(3.0)))


@pytest.mark.parametrize("sync", ["every", "hybrid", "once"])
def test_bfloat16_parameters_are_summed_in_float32(sync):
    """Each device's gradient of one weight is 1 + 2**-6; in bfloat16 the sum of eight would be 8."""

    def loss(params, batch, rng):
        return ((batch["x"] * params["w"].astype(jnp.float32)).sum(), 1), {}

    specs = {"w": P("fsdp")}
    step = local_map(
        lambda params, batch: accumulate(loss, params, batch, num_minibatches=2, specs=specs, sync=sync),
        mesh=mw.create_mesh("fsdp:8"), in_specs=(specs, P("fsdp")), out_specs=Accumulated(P(), specs, P()),
    )  # fmt: skip
    x = 1 + 2.0**-7 * jnp.arange(16.0).reshape(16, 1) * jnp.ones((16, 8))
    got = jax.jit(step)({"w": jnp.ones(8, jnp.bfloat16)}, {"x": x})
    assert got.grads["w"].dtype == jnp.float32
    np.testing.assert_allclose(got.grads["w"], x.mean(0), rtol=1e-6)


def test_a_batch_without_valid_targets_gives_zeros():
    batch = {**make_batch(), "mask": jnp.zeros((ROWS, 3), bool)}
    got = jax.jit(distributed("fsdp8", num_minibatches=2, sync="once"))(make_params(), batch)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves((got.loss, got.grads)))
    assert got.metrics["loss"][1] == 0


def test_zeros_of_means_on_gpus_are_not_those_of_a_table(monkeypatch):
    # XLA merges barriers with equal operands. A table that shares its zeros is copied before it is updated.
    module = importlib.import_module("meshwright.train.accumulate")
    monkeypatch.setattr(module, "chip_family", lambda mesh: "gpu")
    program = jax.make_jaxpr(lambda grad, count: (module._mean(grad, count), own_zeros(3)))(jnp.ones(3), jnp.int32(1))
    barriers = [eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    assert len(barriers) == len({str(eqn.invars) for eqn in barriers}) == 2


def test_a_pipeline_whose_loss_is_on_the_last_stage():
    params = {"layers": jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)) / 4, "gain": jnp.ones(WIDTH)}
    batch = make_batch(16)
    batch.pop("gain")
    specs, rows = {"layers": P("pp"), "gain": P()}, {name: P("dp") for name in batch}

    def run_layers(layers, h):
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, layers)[0]

    def token_loss(gain, h, batch):
        return (((h * gain - batch["y"]) ** 2).sum(-1) * batch["mask"]).sum()

    def piped(params, batch, rng):
        total = pipeline(
            run_layers, params["layers"], batch["x"], axis="pp", num_microbatches=2, combine="sum",
            last=token_loss, last_params=params["gain"], targets=batch,
        )  # fmt: skip
        count = batch["mask"].sum() * (lax.axis_index("pp") == 1)  # like the loss, only on the last stage
        return (total, count), {}

    step = local_map(
        lambda params, batch: accumulate(
            piped, params, batch, num_minibatches=2, specs=specs, axes=("dp", "pp"), row_axes=("dp",)
        ),
        mesh=mw.create_mesh("dp:2,pp:2", devices=4), in_specs=(specs, rows), out_specs=Accumulated(P(), specs, P()),
    )  # fmt: skip
    got = jax.jit(step)(params, batch)

    def loss(params):
        return token_loss(params["gain"], run_layers(params["layers"], batch["x"]), batch) / batch["mask"].sum()

    assert_close((got.loss, got.grads), jax.value_and_grad(loss)(params))


# --- Communication and memory ---


def compiled_step(mesh, sync, num_minibatches):
    step = distributed(mesh, num_minibatches=num_minibatches, sync=sync)
    return jax.jit(step).lower(make_params(width=WIDTH), make_batch()).compile()


def exchanged(compiled, *kinds):
    """Bytes of large collectives, times their loop trips; sums of vectors, loss and metrics are small."""
    found = read_schedule(compiled.as_text()).collectives
    return sum(c.trips * c.bytes_moved for c in found if c.kind in kinds and c.bytes_moved > 8 * WIDTH)


@pytest.mark.parametrize("mesh", ["fsdp8", "dp8"])
def test_bytes_exchanged_do_not_grow_with_minibatches_when_synced_once(mesh):
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    once = [exchanged(compiled_step(mesh, "once", k), *kinds) for k in (1, 2, 8)]
    matrices = 2 * WIDTH * WIDTH * 4
    assert once[0] == once[1] == once[2]
    # One reduction and one gather; XLA may merge the sums of vectors and scalars into the same operation.
    assert once[0] == pytest.approx(matrices * (2 if mesh == "fsdp8" else 1), rel=0.05)
    assert exchanged(compiled_step(mesh, "every", 8), *kinds) == pytest.approx(8 * once[0], rel=0.05)


def test_hybrid_scatters_every_time_and_sums_slices_once():
    for k in (1, 2, 8):
        compiled = compiled_step("dp2 fsdp4", "hybrid", k)
        matrices = 2 * WIDTH * WIDTH * 4
        assert exchanged(compiled, "reduce-scatter") == k * matrices
        assert exchanged(compiled, "all-reduce") == pytest.approx(
            matrices / 4, rel=0.2
        )  # over dp: shards, not whole gradients


def temporary_bytes(num_minibatches, *, sync, rows, num_layers=8, width=64):
    specs = {f"layer{i}": P("fsdp") for i in range(num_layers)}

    def loss(params, batch, rng):
        for kernel in params.values():
            batch = jnp.tanh(batch @ kernel)
        return (batch.sum(), 1), {}

    step = local_map(
        lambda params, batch: accumulate(loss, params, batch, num_minibatches=num_minibatches, specs=specs, sync=sync),
        mesh=mw.create_mesh("fsdp:8"), in_specs=(specs, P("fsdp")), out_specs=Accumulated(P(), specs, P()),
    )  # fmt: skip
    params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in specs}
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return jax.jit(step).lower(params, batch).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("sync", ["once", "hybrid", "every"])
@pytest.mark.parametrize("rows", [64, 512])
def test_memory_grows_by_at_most_one_float32_accumulator(sync, rows):
    layer = 64 * 64 * 4
    accumulator = 8 * layer if sync == "once" else layer  # eight layers, whole or split into eight
    growth = temporary_bytes(8, sync=sync, rows=rows) - temporary_bytes(1, sync=sync, rows=rows)
    # With only 8 rows per device, weights dominate: one batch can free weights in its backward pass, many minibatches
    # cannot, so the gradient of the current layer is extra.
    in_flight = 1.25 * layer if rows == 64 and sync == "once" else 0
    assert growth <= accumulator + in_flight, (growth, accumulator)


# --- Bad inputs ---


def run_bad(loss=loss_fn, params=None, batch=None, check_vma=True, mesh="fsdp:8", in_specs=None, **options):
    specs = {"w": P("fsdp")}
    params = {"w": jnp.ones(8)} if params is None else params
    batch = {"x": jnp.ones((16, 8))} if batch is None else batch
    options = {"num_minibatches": 1, "specs": specs, **options}

    def total(params, batch, rng):
        return ((batch["x"] @ params["w"]).sum(), 1), {}

    step = local_map(
        lambda params, batch: accumulate(total, params, batch, **options),
        mesh=mw.create_mesh(mesh), in_specs=in_specs or (specs, P("fsdp")), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    return jax.eval_shape(step, params, batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "onc"}, "unknown sync mode 'onc'(.|\n)*did you mean 'once'"),
        ({"num_minibatches": 4}, "cannot make 4 minibatches of a batch of 2 rows"),
        ({"specs": {"w": P()}}, r"`w` varies along 'fsdp', but its spec is P\(\)"),
        ({"specs": {"v": P()}}, "params and specs differ in structure"),
        ({"specs": {"w": ("fsdp",)}}, "not a PartitionSpec"),
        ({"gather_axes": ("fdsp",)}, "gather_axes names axis 'fdsp'(.|\n)*did you mean 'fsdp'"),
        ({"axes": ()}, "the loss varies along 'fsdp', but is summed only over no axis"),
        ({"check_vma": False}, "check_vma=False"),
        ({"params": {"w": jnp.ones(8, jnp.int32)}}, "`w` is int32, which has no gradient"),
        (
            {
                "mesh": "fsdp:4,tp:2",
                "specs": {"w": P(("fsdp", "tp"))},
                "in_specs": ({"w": P(("fsdp", "tp"))}, P("fsdp")),
            },
            r"split over \('fsdp', 'tp'\)(.|\n)*put the gathered axes last",
        ),
    ],
)
def test_bad_inputs(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        run_bad(**options)
