"""Pipelines equal one device in loss and gradients, for any mesh, schedule and number of microbatches."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel.local_map import local_map
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.pipeline.schedule import (
    Schedule,
    circular_schedule,
    gpipe_schedule,
    stage_layers,
    unstage_layers,
)
from meshwright.parallel.row_keys import row_key

from .tiny_model import assert_close, embed, head_loss, mesh_of, one_device, stage, value_and_grads


def piped_loss(mesh, *, num_microbatches, schedule="gpipe", num_rounds=1, rng=None, **options):
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1 or axis == "pp"}
    tp = "tp" if "tp" in sizes else None
    rows = P("dp" if "dp" in sizes else None)
    ahead = (None,) if schedule != "gpipe" else ()
    layers = {"up": P(*ahead, "pp", None, tp), "down": P(*ahead, "pp", tp), "scale": P(*ahead, "pp")}
    specs = ({"embed": P(), "layers": {**layers, "number": P(*ahead, "pp")}, "head": P()}, rows)

    def local(params, batch):
        key = None
        if rng is not None:
            first = lax.axis_index("dp") * batch["gain"].shape[0] if "dp" in sizes else 0
            key = row_key(rng, first)
        loss = pipeline(
            functools.partial(stage, tp=tp),
            params["layers"],
            batch["tokens"],
            batch["gain"],
            axis="pp",
            num_microbatches=num_microbatches,
            schedule=schedule,
            first=embed,
            first_params=params["embed"],
            last=head_loss,
            last_params=params["head"],
            targets={"targets": batch["targets"], "mask": batch["mask"]},
            rng=key,
            combine="sum",
            everywhere=True,
            **options,
        )
        return lax.psum(loss, "dp") if "dp" in sizes else loss

    mapped = local_map(local, mesh=mesh, in_specs=specs, out_specs=P())

    def loss(params, batch):
        layers = stage_layers(params["layers"], num_stages=sizes["pp"], num_rounds=num_rounds)
        if schedule == "circular" and num_rounds == 1:
            layers = jax.tree.map(lambda leaf: leaf[None], layers)
        return mapped({**params, "layers": layers}, batch)

    return loss


def check_against_one_device(mesh, *, rows, seed=None, **options):
    params, batch, expected = one_device(rows, seed)
    rng = None if seed is None else jax.random.key(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mw.MeshwrightWarning)  # the table has cases with fewer microbatches than stages
        got = value_and_grads(piped_loss(mesh, rng=rng, **options), params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    assert_close(got, expected)


GPIPE = {1: (1, 3), 2: (1, 2, 3, 4), 4: (1, 3, 4, 5, 8), 8: (2, 7, 8)}
CIRCULAR = {1: (1, 3), 2: (1, 2, 3), 4: (2, 3, 5, 8), 8: (1, 8)}
TABLE = [
    ("pp:2,dp:2,tp:2", "circular", 2, 2),
    # As many microbatches as stages, one less, one more, and twice as many; test_schedule.py has every number.
    *((f"pp:{pp}", "gpipe", 1, m) for pp, ms in GPIPE.items() for m in ms),
    *((f"pp:{pp}", "circular", 8 // pp, m) for pp, ms in CIRCULAR.items() for m in ms),
    *(("dp:2,pp:2,tp:2", schedule, rounds, 4) for schedule, rounds in (("gpipe", 1), ("circular", 4))),
    ("pp:2,tp:4", "gpipe", 1, 2),
    ("dp:4,pp:2", "circular", 2, 2),
    ("dp:1,pp:2,tp:1", "gpipe", 1, 2),  # local_map drops axes of size 1
]


@pytest.mark.parametrize(
    ("mesh", "schedule", "num_rounds", "num_microbatches"),
    TABLE,
)
def test_loss_and_gradients_equal_one_device(mesh, schedule, num_rounds, num_microbatches):
    check_against_one_device(
        mesh_of(mesh), rows=num_microbatches * 4, schedule=schedule, num_rounds=num_rounds,
        num_microbatches=num_microbatches,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "schedule", "num_rounds", "num_microbatches"),
    [
        ("pp:2,dp:2", "gpipe", 1, 4),
        ("pp:4", "circular", 2, 2),
        ("pp:1", "gpipe", 1, 8),
    ],
)
def test_dropout_equals_one_device_for_any_mesh_and_microbatches(mesh, schedule, num_rounds, num_microbatches):
    check_against_one_device(
        mesh_of(mesh), rows=16, schedule=schedule, num_rounds=num_rounds, num_microbatches=num_microbatches,
        seed=5,
    )  # fmt: skip


def test_without_remat_the_gradients_are_the_same():
    check_against_one_device(mesh_of("pp:4"), rows=8, num_microbatches=4, remat=False)


# --- Results ---


def double(params, h, *extras):
    for extra in extras:
        h = h + extra
    return h * params


@pytest.mark.parametrize("check_vma", [True, False])
def test_output_is_on_the_last_stage_and_zero_elsewhere(check_vma):
    x, shift = jnp.arange(1.0, 7.0).reshape(6, 1), jnp.arange(6.0).reshape(6, 1)

    def local(params, x, shift):
        return pipeline(double, params, x, shift, axis="pp", num_microbatches=3)[None]

    run = local_map(local, mesh=mesh_of("pp:2"), in_specs=(P("pp"), P(), P()), out_specs=P("pp"), check_vma=check_vma)
    out = jax.jit(run)(jnp.array([2.0, 3.0]), x, shift)
    assert out[0].tolist() == [[0.0]] * 6
    np.testing.assert_array_equal(out[1], ((x + shift) * 2 + shift) * 3)


@pytest.mark.parametrize("combine", ["concatenate", "stack", "sum"])
def test_ways_to_combine_microbatches(combine):
    x = jnp.arange(8.0).reshape(8, 1)
    run = local_map(
        lambda params, x: pipeline(
            double, params, x, axis="pp", num_microbatches=4, combine=combine, everywhere=True
        ),
        mesh=mesh_of("pp:2"), in_specs=(P("pp"), P()), out_specs=P(),
    )  # fmt: skip
    parts = (x * 6).reshape(4, 2, 1)
    expected = {"concatenate": x * 6, "stack": parts, "sum": parts.sum(0)}[combine]
    np.testing.assert_array_equal(jax.jit(run)(jnp.array([2.0, 3.0]), x), expected)


def test_trees_keep_their_varying_axes():
    """One of two values varies along tp, the other does not, and the result keeps that."""

    def stage(params, h):
        return {"split": h["split"] * params, "whole": h["whole"] + lax.psum(h["split"].sum(-1, keepdims=True), "tp")}

    def first(_, x):
        mine = lax.axis_index("tp") + 1.0
        return {"split": x * mine, "whole": x}

    run = local_map(
        lambda params, x: pipeline(
            stage, params, x, axis="pp", num_microbatches=2, first=first, last=lambda _, h: h["whole"], everywhere=True
        ),
        mesh=mesh_of("pp:2,tp:2"), in_specs=(P("pp"), P()), out_specs=P(),
    )  # fmt: skip
    # Stage one adds (1 + 2)x, stage two 2 * (1 + 2)x.
    np.testing.assert_array_equal(jax.jit(run)(jnp.array([2.0, 5.0]), jnp.ones((2, 1))), jnp.full((2, 1), 10.0))


def test_circular_layers_are_a_reshape():
    params = {"w": jnp.arange(24).reshape(12, 2)}
    staged = stage_layers(params, num_stages=2, num_rounds=3)
    shards = jax.device_put(staged["w"], jax.NamedSharding(mesh_of("pp:2"), P(None, "pp"))).addressable_shards
    # Virtual stages 0, 2, 4 are on device 0: layers 0-1, 4-5, 8-9.
    assert shards[0].data[..., 0].tolist() == [[0, 2], [8, 10], [16, 18]]
    np.testing.assert_array_equal(unstage_layers(staged, num_rounds=3)["w"], params["w"])
    assert stage_layers(params, num_stages=4) is params


# --- Memory ---


def backward_temp_bytes(*, num_microbatches, schedule, num_rounds, remat=True):
    """Temporary memory of a backward pass with weights much larger than activations (64 KiB and 64 B)."""
    mesh, rows = mesh_of("pp:2"), num_microbatches * 2
    ahead = (num_rounds, 1) if schedule == "circular" else (1,)
    weights = jax.ShapeDtypeStruct((*ahead[:-1], 2 * ahead[-1], 128, 128), jnp.float32)

    def stage(params, h):
        return jnp.tanh(h @ params[0, :, :] / 128)

    def loss(params, x):
        return pipeline(
            stage, params, x, axis="pp", num_microbatches=num_microbatches, schedule=schedule, combine="sum",
            everywhere=True, remat=remat,
        ).sum()  # fmt: skip

    spec = P(None, "pp") if schedule == "circular" else P("pp")
    mapped = local_map(loss, mesh=mesh, in_specs=(spec, P()), out_specs=P())
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32)
    compiled = jax.jit(jax.grad(mapped)).lower(weights, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("schedule", "num_rounds"), [("gpipe", 1), ("circular", 2)])
def test_weights_are_not_retained_per_microbatch(schedule, num_rounds):
    few, many = (backward_temp_bytes(num_microbatches=m, schedule=schedule, num_rounds=num_rounds) for m in (4, 20))
    per_microbatch = (many - few) / 16
    activations = 2 * 128 * 4  # of one microbatch
    assert per_microbatch < 4 * activations  # one stage's weights are 64 times the activations


# --- Custom schedules ---


def test_custom_schedule():
    # GPipe with a pause between the two microbatches.
    table = Schedule(np.array([[0, -1], [-1, 1], [0, -1], [-1, 1]]), np.array([[0, -1], [-1, 0], [1, -1], [-1, 1]]))
    run = local_map(
        lambda params, x: pipeline(
            double, params, x, axis="pp", num_microbatches=2, schedule=table, everywhere=True
        ),
        mesh=mesh_of("pp:2"), in_specs=(P("pp"), P()), out_specs=P(),
    )  # fmt: skip
    np.testing.assert_array_equal(run(jnp.array([2.0, 3.0]), jnp.ones((2, 1))), jnp.full((2, 1), 6.0))


# --- Bad inputs ---


def run_bad(x=None, mesh="pp:2", stage_fn=double, **options):
    x = jnp.ones((4, 1)) if x is None else x
    options = {"axis": "pp", "num_microbatches": 2, **options}
    run = local_map(
        lambda params, x: pipeline(stage_fn, params, x, **options),
        mesh=mesh_of(mesh), in_specs=(P("pp"), P()), out_specs=P("pp"),
    )  # fmt: skip
    return jax.eval_shape(run, jnp.ones(mesh_of(mesh).shape["pp"]), x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_microbatches": 3},
            r"cannot cut a batch of 4 rows into 3 microbatches: 4 % 3 = 1(.|\n)*3 or 6 rows, or 2 or 4",
        ),
        ({"num_microbatches": 8}, "cannot make 8 microbatches of a batch of 4 rows"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"axis": "ppp"}, "did you mean 'pp'"),
        ({"schedule": "gpip"}, "unknown schedule 'gpip'(.|\n)*did you mean 'gpipe'"),
        ({"schedule": gpipe_schedule(4, 2)}, "is for 4 stages; the pipeline has 2"),
        ({"schedule": gpipe_schedule(2, 4)}, "is for 4 microbatches; the pipeline has 2"),
        ({"schedule": circular_schedule(2, 2, 2)}, "needs the rounds \\(2\\) as its leading dim"),
        (
            {"stage_fn": lambda p, h: (h * p).astype(jnp.int32)},
            "takes float32\\[2, 1\\] but returns int32(.|\n)*first=",
        ),
        ({"last": lambda p, h: h.sum(), "last_params": ()}, "they are scalars(.|\n)*combine="),
        ({"combine": "mean"}, "unknown combine='mean'(.|\n)*concatenate, stack, sum"),
        (
            {"mesh": "pp:1", "schedule": "circular", "num_layers": 1},
            "takes num_layers only if each device has one stage, and not with(.|\n)*use pipeline_loss",
        ),
        ({"num_layers": 5}, "2 devices hold 1 layers each, which does not fit num_layers=5"),
        (
            {"mesh": "pp:4", "num_layers": 3},
            r"3 layers cannot be cut evenly into 4 x 1(.|\n)*stage_fn takes no num_layers",
        ),
        (
            {"mesh": "pp:4", "num_microbatches": 4, "num_layers": 3, "stage_fn": lambda p, h, num_layers: h * p},
            "3 layers cannot be cut into 4 x 1 pipeline stages of at least one layer(.|\n)*use fewer devices",
        ),
    ],
)
def test_bad_inputs(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        run_bad(**options)


def test_26_layers_that_do_not_divide():
    with pytest.raises(
        mw.LayoutError, match=r"`w` has 10 layers; 4 stages do not divide them: 10 % 4 = 2.\nhint: use 8 or 12"
    ):
        stage_layers({"w": jnp.zeros((10, 2))}, num_stages=4)
    with pytest.raises(mw.LayoutError, match=r"4 stages x 2 rounds do not divide them: 12 % 8 = 4.\nhint: use 8 or 16"):
        stage_layers({"w": jnp.zeros((12, 2))}, num_stages=4, num_rounds=2)


def test_27_fewer_microbatches_than_stages():
    with pytest.warns(mw.MeshwrightWarning, match="2 microbatches on 4 stages leave the devices idle 60% of the time"):
        run_bad(mesh="pp:4")


def test_closures_that_would_deadlock_raise():
    """A replicated array's gradient would be a sum in one stage's branch, which the other stages never join."""

    def local(params, shared, x):
        def stage(params, h):
            return h * params * shared

        return pipeline(stage, params, x, axis="pp", num_microbatches=2, combine="sum", everywhere=True).sum()

    run = local_map(local, mesh=mesh_of("pp:2"), in_specs=(P("pp"), P(), P()), out_specs=P())
    with pytest.raises(mw.PlacementError, match=r"stage_fn closes over a float32 array of shape \(1,\)(.|\n)*vary"):
        jax.grad(run, argnums=1)(jnp.ones(2), jnp.ones(1), jnp.ones((2, 1)))
