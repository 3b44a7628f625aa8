"""Gradients accumulated over minibatches and devices are those of the whole batch on one device."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.linen import accumulate_gradients, accumulate_gradients_loop, accumulate_gradients_scan
from meshwright.parallel.local_map import local_map
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.rows import row_key
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.train.accumulate import (
    Accumulated,
    accumulate,
)

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
    """Three tokens per row, of which some are valid: one in five rows has none, nor has a whole quarter of the rows."""
    x = jax.random.normal(jax.random.key(1), (rows, 3, WIDTH))
    mask = jax.random.bernoulli(jax.random.key(2), 0.6, (rows, 3)) & (jnp.arange(rows) % 5 > 0)[:, None]
    return {"x": x, "y": jnp.roll(x, 1, 0), "mask": mask & (jnp.arange(rows) >= rows // 4)[:, None], "gain": 0.5}


def loss_fn(params, batch, rng, *, tp=None):
    """A squared error over valid tokens, with one tensor-parallel pair of matmuls where there is an axis for it."""
    h = jnp.tanh(batch["x"].astype(params["up"].dtype) @ params["up"] + params["bias"])
    if rng is not None:
        h = jnp.where(jax.random.bernoulli(rng, 0.7, h.shape), h / 0.7, 0)
    out = h @ params["down"]
    out = (lax.psum(out, tp) if tp else out) * params["scale"] * batch["gain"]
    errors = ((out.astype(jnp.float32) - batch["y"]) ** 2).sum(-1)
    total, count = (errors * batch["mask"]).sum(), batch["mask"].sum()
    pair = (total, count)
    return pair, {"loss": pair, "rows": (batch["mask"].any(-1).sum(), batch["mask"].shape[0]), "error": total / count}


def one_device(params, batch, rng=None):
    def loss(params):
        (total, count), metrics = loss_fn(params, batch, rng)
        return total / count, metrics

    (loss, metrics), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
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


TABLE = [(mesh, sync) for mesh in MESHES for sync in ("every", "hybrid", "once")]


@pytest.mark.parametrize(("mesh", "sync"), TABLE)
@pytest.mark.parametrize("num_minibatches", [1, 2, 8])
def test_any_mesh_sync_and_number_of_minibatches_equals_one_device(mesh, sync, num_minibatches):
    params, batch = make_params(), make_batch()
    step = jax.jit(distributed(mesh, num_minibatches=num_minibatches, sync=sync))
    got, expected = step(params, batch), one_device(params, batch)
    # A number without a count is weighted by the loss's: where a quarter is masked, it is not NaN, and averages out.
    assert_close(got, expected)


def test_minibatches_beside_axes_of_one_device():
    """Which `local_map` leaves to XLA."""
    params, batch = make_params(), make_batch()
    step = jax.jit(distributed("dp1 fsdp8 tp1", num_minibatches=2, sync="hybrid"))
    assert_close(step(params, batch), one_device(params, batch))


def test_outside_of_shard_map_it_is_the_function_of_one_device():
    params, batch = make_params(), make_batch()
    got = accumulate(loss_fn, params, batch, num_minibatches=4, specs=specs_for(mw.create_mesh("dp:8"))[0])
    assert_close(got, one_device(params, batch))


@pytest.mark.parametrize(
    ("mesh", "sync", "num_minibatches"),
    [
        ("dp2 fsdp4", "once", 2),
        ("fsdp8", "hybrid", 8),
        ("dp8", "every", 1),
    ],
)
def test_dropout_depends_neither_on_the_mesh_nor_on_minibatches(mesh, sync, num_minibatches):
    params, batch, rng = make_params(), make_batch(), jax.random.key(3)
    step = distributed(mesh, num_minibatches=num_minibatches, sync=sync, rng=rng)
    assert_close(jax.jit(step)(params, batch), one_device(params, batch, row_key(rng)))


def test_a_mean_weighs_minibatches_and_devices_alike():
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
def test_a_loss_that_devices_have_averaged_already(reduced, num_minibatches):
    """Its gradient is that of the average, and not an eighth of it."""

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
    """Every device's gradient is 1 + 2**-6 for one weight; in bfloat16 the sum of eight would be 8."""

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


def test_no_valid_target_at_all_gives_zeros_not_nan():
    batch = {**make_batch(), "mask": jnp.zeros((ROWS, 3), bool)}
    got = jax.jit(distributed("fsdp8", num_minibatches=2, sync="once"))(make_params(), batch)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves((got.loss, got.grads)))
    assert got.metrics["loss"][1] == 0


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
        count = batch["mask"].sum() * (lax.axis_index("pp") == 1)  # as the loss: on the last stage only
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


# --- What is exchanged, and what it takes to hold it ---


def compiled_step(mesh, sync, num_minibatches):
    step = distributed(mesh, num_minibatches=num_minibatches, sync=sync)
    return jax.jit(step).lower(make_params(width=WIDTH), make_batch()).compile()


def exchanged(compiled, *kinds):
    """Bytes of large collectives, loops counted with their trips; sums of vectors, loss and metrics are small."""
    found = read_schedule(compiled.as_text()).collectives
    return sum(c.trips * c.bytes_moved for c in found if c.kind in kinds and c.bytes_moved > 8 * WIDTH)


@pytest.mark.parametrize("mesh", ["fsdp8", "dp8"])
def test_bytes_exchanged_do_not_grow_with_minibatches_when_synced_once(mesh):
    kinds = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
    once = [exchanged(compiled_step(mesh, "once", k), *kinds) for k in (1, 2, 8)]
    matrices = 2 * WIDTH * WIDTH * 4
    assert once[0] == once[1] == once[2]
    # Reduced once, and gathered once; XLA may put the sums of vectors and scalars into the same operation.
    assert once[0] == pytest.approx(matrices * (2 if mesh == "fsdp8" else 1), rel=0.05)
    assert exchanged(compiled_step(mesh, "every", 8), *kinds) == pytest.approx(8 * once[0], rel=0.05)


def test_hybrid_scatters_every_time_and_sums_slices_once():
    for k in (1, 2, 8):
        compiled = compiled_step("dp2 fsdp4", "hybrid", k)
        matrices = 2 * WIDTH * WIDTH * 4
        assert exchanged(compiled, "reduce-scatter") == k * matrices
        assert exchanged(compiled, "all-reduce") == pytest.approx(matrices / 4, rel=0.2)  # over dp: slices, not wholes


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
    accumulator = 8 * layer if sync == "once" else layer  # eight layers, whole or in eight slices
    growth = temporary_bytes(8, sync=sync, rows=rows) - temporary_bytes(1, sync=sync, rows=rows)
    # With next to no rows per device (8), nothing but weights counts: then the gradient of the layer that is being
    # added comes on top, since one batch can let go of weights on its way back, and many minibatches cannot.
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
        ({"sync": "onc"}, "no sync mode 'onc'(.|\n)*did you mean 'once'"),
        ({"num_minibatches": 4}, "cannot make 4 minibatches of a batch of 2 rows"),
        ({"specs": {"w": P()}}, r"`w` varies along 'fsdp', but its spec is P\(\)"),
        ({"specs": {"v": P()}}, "params and specs differ in structure"),
        ({"specs": {"w": ("fsdp",)}}, "not a PartitionSpec"),
        ({"gather_axes": ("fdsp",)}, "gather_axes names axis 'fdsp'(.|\n)*did you mean 'fsdp'"),
        ({"axes": ()}, "the loss differs along 'fsdp', but is summed over no axis only"),
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


@pytest.mark.parametrize(
    ("batch", "num_minibatches", "message"),
    [
        (
            {"x": np.ones((10, 2))}, 4,
            r"a batch of 10 rows into 4 minibatches: 10 % 4 = 2\.\nhint: use a batch of 8 or 12 rows, or 2 or 5 minib",
        ),
        ({"x": np.ones((3, 2))}, 4, r"cannot make 4 minibatches of a batch of 3 rows(.|\n)*4 rows, or 3 minibatches"),
        ({"x": np.ones((4, 2)), "y": np.ones(3)}, 2, "leading dim: `x` has 4 rows, `y` has 3"),
        ({"x": 1.0}, 2, "without any array that has rows"),
        ({"x": np.ones((4, 2))}, 0, "num_minibatches=0"),
        ({"x": np.ones((4, 2))}, 2.0, "not a whole number"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use_scan", [False, True])
def test_29_and_30_batches_that_cannot_be_cut(batch, num_minibatches, message, use_scan):
    with pytest.raises(mw.PlacementError, match=message):
        accumulate_gradients(None, batch, None, num_minibatches, lambda *_: None, use_scan=use_scan)


# --- The seed's form ---


def make_state(params, apply_fn=None):
    return mw.TrainState.create(apply_fn=apply_fn, params=params, tx=optax.sgd(0.1))


def seed_loss(params, apply_fn, batch, rng):
    (total, count), metrics = loss_fn(params, batch, rng)
    return total / count, (metrics, {"seen": batch["x"].shape[0] + 0 * total, "where": batch["x"][0, 0, 0]})


@pytest.mark.parametrize(("num_minibatches", "with_rng"), [(1, False), (4, True), (8, False)])
def test_loop_scan_and_full_batch_agree(num_minibatches, with_rng):
    """Masked tokens and rows are in the batch, as is an all-masked minibatch, whose loss and gradients are NaN."""
    state, batch = make_state(make_params()), make_batch(16)
    rng = jax.random.key(4) if with_rng else None
    expected = one_device(state.params, batch, row_key(rng) if with_rng else None)
    step = functools.partial(accumulate_gradients, num_minibatches=num_minibatches, loss_fn=seed_loss)
    results = [jax.jit(functools.partial(step, use_scan=use_scan))(state, batch, rng) for use_scan in (False, True)]
    for grads, metrics, mutable in results:
        assert_close((grads, metrics), (expected.grads, expected.metrics))
        assert mutable["seen"].shape == (num_minibatches,)
        np.testing.assert_array_equal(mutable["where"], batch["x"][:: 16 // num_minibatches, 0, 0])
    assert_close(*results, tolerance=1e-6)


def test_the_accumulator_is_float32_whatever_the_parameters_are():
    batch = {"x": jnp.where(jnp.arange(512) == 0, 256.0, 1.0)}
    state = make_state(jnp.ones((), jnp.bfloat16))

    def loss_fn(params, apply_fn, batch, rng):
        return (params * batch["x"].astype(jnp.bfloat16)).sum(), ({"total": (params, 1)}, None)

    for form in (accumulate_gradients_loop, accumulate_gradients_scan):
        state_step = functools.partial(form, num_minibatches=512, loss_fn=loss_fn)
        if form is accumulate_gradients_loop:  # written out 512 times, it would take minutes to compile
            state_step = functools.partial(form, num_minibatches=64, loss_fn=loss_fn)
            small = {"x": jnp.where(jnp.arange(64) == 0, 256.0, 1.0)}
            grads, metrics, _ = jax.jit(state_step)(state, small, None)
            assert float(grads) * 64 == 256 + 63
        else:
            grads, metrics, _ = jax.jit(state_step)(state, batch, None)
            assert float(grads) * 512 == 256 + 511
            assert [float(part) for part in metrics["total"]] == [512, 512]
        assert grads.dtype == jnp.float32


def test_metrics_are_averaged_not_summed_and_weighted_by_the_loss():
    def loss_fn(params, apply_fn, batch, rng):
        count = batch["mask"].sum()
        return params * 1.0, ({"loss": (count * 3.0, count), "plain": batch["x"].mean(), "nested": {"a": (2, 1)}}, None)

    batch = {"x": jnp.array([1.0, 1.0, 5.0, 5.0]), "mask": jnp.array([1.0, 1.0, 1.0, 0.0])}
    for form in (accumulate_gradients_loop, accumulate_gradients_scan):
        grads, metrics, mutable = form(make_state(jnp.float32(2.0)), batch, None, 2, loss_fn)
        assert float(grads) == 1.0
        assert float(metrics["plain"]) == pytest.approx((2 * 1 + 1 * 5) / 3)
        assert [float(part) for part in metrics["loss"]] == [9.0, 3.0]
        assert [int(part) for part in metrics["nested"]["a"]] == [4, 2]
        assert mutable is None


def test_a_loss_without_a_count_weighs_minibatches_alike_and_may_name_another():
    def loss_fn(params, apply_fn, batch, rng):
        return (params * batch["x"]).mean(), ({"loss": params, "tokens": (0.0, batch["x"].sum())}, None)

    batch = {"x": jnp.array([1.0, 3.0])}
    state = make_state(jnp.float32(2.0))
    assert float(accumulate_gradients(state, batch, None, 2, loss_fn)[0]) == 2.0
    weighted = accumulate_gradients(state, batch, None, 2, loss_fn, weight_key="tokens")[0]
    assert float(weighted) == (1 * 1 + 3 * 3) / 4


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(0.5, deterministic=False)(nn.Dense(8)(x))
        return nn.Dropout(0.3, deterministic=False)(nn.Dense(4)(h))


def test_flax_dropout_does_not_depend_on_the_number_of_minibatches():
    module, x = Dropping(), jax.random.normal(jax.random.key(0), (8, 5))
    params = jax.jit(module.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)

    def loss_fn(params, apply_fn, batch, rng):
        out = apply_fn(params, batch.inputs, rngs={"dropout": rng})
        return ((out - batch.targets) ** 2).mean(), ({"kept": (out != 0).mean()}, None)

    state = make_state(params, module.apply)
    batch = mw.Batch(inputs=x, targets=jnp.ones((8, 4)))

    @functools.partial(jax.jit, static_argnums=1)
    def step(rng, num_minibatches):
        return accumulate_gradients(state, batch, rng, num_minibatches, loss_fn, use_scan=num_minibatches > 2)[:2]

    whole = step(jax.random.key(3), 1)
    for rng, num_minibatches in ((jax.random.key(3), 2), (jax.random.key(3), 8), (jax.random.PRNGKey(3), 1)):
        assert_close(step(rng, num_minibatches), whole)
    assert not np.allclose(jax.tree.leaves(step(jax.random.key(4), 1)[0])[0], jax.tree.leaves(whole[0])[0])


LARGE = 256  # so that weights outweigh all else


@pytest.mark.parametrize("form", [accumulate_gradients_loop, accumulate_gradients_scan])
def test_one_float32_accumulator_and_nothing_more(form):
    def loss_fn(params, apply_fn, batch, rng):
        return (jnp.tanh(batch @ params[0]) @ params[1]).sum(), ({}, None)

    def temp(num_minibatches):
        def step(params, batch):
            return form(SimpleNamespace(params=params, apply_fn=None), batch, None, num_minibatches, loss_fn)[0]

        params = [jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)] * 2
        batch = jax.ShapeDtypeStruct((8, LARGE), jnp.float32)
        return jax.jit(step).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    accumulator = 2 * LARGE * LARGE * 4
    assert temp(8) - temp(1) <= accumulator * 1.05


@pytest.mark.parametrize("use_scan", [False, True])
def test_the_seed_form_works_in_the_local_view(use_scan):
    batch = make_batch()
    batch.pop("gain")

    def loss_fn(params, apply_fn, batch, rng):
        return ((batch["x"] @ params) ** 2).mean(), ({"loss": (params.sum(), 1)}, None)

    def local(params, batch):
        mine = lax.pcast(params, ("dp",), to="varying")
        grads, metrics, _ = accumulate_gradients(make_state(mine), batch, None, 2, loss_fn, use_scan=use_scan)
        return lax.pmean(grads, "dp"), jax.tree.map(lambda part: lax.psum(part, "dp"), metrics)

    run = local_map(local, mesh=mw.create_mesh("dp:8"), in_specs=(P(), P("dp")), out_specs=P())
    params = jnp.ones(WIDTH)
    grads, metrics = jax.jit(run)(params, batch)
    assert_close(grads, jax.grad(lambda params: loss_fn(params, None, batch, None)[0])(params))
    assert [float(part) for part in metrics["loss"]] == [16.0 * WIDTH, 16.0]
