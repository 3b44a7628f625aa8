"""Training schedules equal one device in loss and every gradient, and their memory does not grow with microbatches."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.mesh.axes import pcast_varying
from meshwright.parallel.local_map import local_map
from meshwright.parallel.pipeline.engine import pipeline
from meshwright.parallel.pipeline.named_schedules import make_schedule
from meshwright.parallel.pipeline.stage_moves import make_moves
from meshwright.parallel.pipeline.training_engine import pipeline_loss
from meshwright.parallel.row_keys import row_key

from .tiny_model import assert_close, embed, head_loss, mesh_of, one_device, stage, value_and_grads


def scheduled_loss(mesh, schedule, *, tied=False, seed=None, remat=True, factor=1.0):
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    tp = "tp" if "tp" in sizes else None
    rows = P("dp" if "dp" in sizes else None)
    layers = {"up": P("pp", None, tp), "down": P("pp", tp), "scale": P("pp"), "number": P("pp")}
    specs = ({"embed": P(), "layers": layers, "head": P()}, rows)

    def local(params, batch):
        key = None
        if seed is not None:
            first = lax.axis_index("dp") * batch["gain"].shape[0] if "dp" in sizes else 0
            key = row_key(jax.random.key(seed), first)

        def last(head, h, batch):
            loss = head_loss(head, h, batch)
            return loss, {"copy": loss, "rows": jnp.int32(h.shape[0])}

        loss, sums = pipeline_loss(
            functools.partial(stage, tp=tp),
            params["layers"],
            batch["tokens"],
            batch["gain"],
            axis="pp",
            schedule=schedule,
            first=embed,
            first_params=params["embed"],
            last=last,
            last_params={"table": params["embed"]} if tied else params["head"],
            targets={"targets": batch["targets"], "mask": batch["mask"]},
            rng=key,
            remat=remat,
        )
        # The other sums have no gradient, whatever happens to them.
        # On the other devices, the cotangent of the loss is zero.
        loss = jnp.where(lax.axis_index("pp") == schedule.num_stages - 1, factor, 0.0) * loss
        loss = loss + 0 * sums["copy"] + (sums["copy"] - lax.stop_gradient(sums["copy"])) + 0.0 * sums["rows"]
        return lax.psum(loss, tuple(axis for axis in sizes if axis != "tp"))

    return local_map(local, mesh=mesh, in_specs=specs, out_specs=P())


# Few microbatches, incomplete groups, and many; both ways to keep activations; dropout and masks everywhere.
CASES = [
    ("pp:4", "1f1b", 3, {"remat": True, "tied": True}),
    ("pp:2,dp:2,tp:2", "1f1b", 4, {"remat": False}),
    ("pp:4,dp:2", "aligned-1f1b", 5, {"remat": True, "tied": True}),
    ("pp:2,tp:2", "aligned-1f1b", 4, {"remat": False}),
    ("pp:2", "interleaved-1f1b", 5, {"remat": False, "rounds": 4, "tied": True}),
    ("pp:4,tp:2", "interleaved-1f1b", 8, {"remat": True}),
    ("pp:4,dp:2", "zb-h1", 8, {"remat": False, "tied": True}),
    ("pp:2,tp:2", "zb-h1", 1, {"remat": True}),
    ("pp:2,dp:2,tp:2", "zb-v", 3, {"remat": True, "tied": True}),
    ("pp:4,dp:2", "zb-v", 8, {"remat": False}),
    ("pp:4", "circular", 6, {"remat": False}),
]


@pytest.mark.parametrize(("mesh", "name", "num_microbatches", "options"), CASES)
def test_loss_and_gradients_equal_one_device(mesh, name, num_microbatches, options):
    options = dict(options)
    mesh, rounds, tied = mesh_of(mesh), options.pop("rounds", None), options.get("tied", False)
    schedule = make_schedule(name, mesh.shape["pp"], num_microbatches, num_rounds=rounds)
    params, batch, expected = one_device(num_microbatches * 4, 5, tied=tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mw.MeshwrightWarning)  # fewer microbatches than stages
        got = value_and_grads(scheduled_loss(mesh, schedule, seed=5, **options), params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    assert_close(got, expected)


def test_a_factor_of_the_loss_scales_gradients_on_all_stages():
    params, batch, (loss, grads) = one_device(16, None)
    got = value_and_grads(
        scheduled_loss(mesh_of("pp:2"), make_schedule("zb-v", 2, 4), factor=3.0, remat=False), params, batch
    )
    assert_close(got, (3 * loss, jax.tree.map(lambda grad: 3 * grad, grads)))


@pytest.mark.parametrize("num_layers", [5, 6, 7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_own_stages_that_ignore_layers(name, num_layers):
    """Layers whose gradient is NaN on the zeros of padding; loss with gradients, and loss alone."""

    def layer(h, w):
        h = jnp.tanh(h @ w) + h
        return h / jnp.sqrt(jnp.square(w @ h.T).sum())

    def stage(layers, h, num_layers=None):
        def one(h, row):
            w, place = row
            made = layer(h, w)
            return (made if num_layers is None else jnp.where(place < num_layers, made, h)), None

        return lax.scan(one, h, (layers, jnp.arange(layers.shape[0])))[0]

    def local(layers, x):
        schedule = make_schedule(name, 4, 4)
        last = lambda _, h: ((h**2).sum(), {})  # noqa: E731
        if name == "gpipe":
            options = {"num_microbatches": 4, "last": lambda _, h: last(_, h)[0], "combine": "sum"}
            loss = pipeline(stage, layers, x, axis="pp", num_layers=num_layers, **options)
        else:
            loss, _ = pipeline_loss(stage, layers, x, axis="pp", schedule=schedule, last=last, num_layers=num_layers)
        return lax.psum(loss, "pp")

    layers = jax.random.normal(jax.random.key(0), (num_layers, 4, 4))
    x = jax.random.normal(jax.random.key(1), (4, 4))
    rows = lambda layers: sum((stage(layers, row[None]) ** 2).sum() for row in x)  # noqa: E731
    expected = jax.value_and_grad(rows)(layers)
    run = local_map(local, mesh=mesh_of("pp:4"), in_specs=(P("pp"), P()), out_specs=P())
    padded = jnp.concatenate([layers, jnp.zeros((8 - num_layers, 4, 4))])
    loss, grads = jax.jit(jax.value_and_grad(run))(padded, x)
    assert not np.any(grads[num_layers:])
    assert_close((loss, grads[:num_layers]), expected)
    assert_close(jax.jit(run)(padded, x), expected[0])


# --- What runs ---


def stages_only(mesh, schedule, *, remat):
    """A pipeline of matrices `[16, 16]`, with the loss as a sum."""

    def run(layers, h):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]

    def local(layers, x):
        loss, _ = pipeline_loss(
            run, layers, x, axis="pp", schedule=schedule, last=lambda _, h: (h.sum(), {}), remat=remat
        )
        return lax.psum(loss, "pp")

    mapped = local_map(local, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P())
    x = jax.ShapeDtypeStruct((4 * schedule.num_microbatches, 16), jnp.float32)
    return jax.jit(jax.grad(mapped)), jax.ShapeDtypeStruct((8, 16, 16), jnp.float32), x


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scans(inner)


@pytest.mark.parametrize("name", ["1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_the_loop_runs_the_ticks_of_the_schedule(name):
    """One loop of as many steps as ticks; each sends one message in each direction that the schedule needs."""
    schedule = make_schedule(name, 4, 8)
    step, layers, x = stages_only(mesh_of("pp:4"), schedule, remat=True)
    found = []
    for scan in scans(jax.make_jaxpr(step)(layers, x).jaxpr):
        body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
        sends = [eqn.params["perm"] for eqn in body.eqns if eqn.primitive.name == "ppermute"]
        found += [(scan.params["length"], sends)] if sends else []
    ((length, sends),) = found
    formula = {
        "1f1b": 2 * (8 + 3),
        "aligned-1f1b": 2 * (8 + 3),
        "interleaved-1f1b": 2 * (16 + 3),
        "zb-h1": 3 * 8 + 3,
        "zb-v": 6 * 8 + 3,
    }
    assert length == schedule.num_ticks == formula[name]
    assert len(sends) == 2
    wraps = any((3, 0) in perm for perm in sends)
    assert wraps == (name == "interleaved-1f1b")


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("name", ["1f1b", "aligned-1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_compiled_memory_does_not_grow_with_microbatches(name, remat):
    """GPipe, which keeps the input of every microbatch, needs at least 24 x 256 bytes more."""

    def temp_bytes(name, num_microbatches):
        step, *arguments = stages_only(mesh_of("pp:4"), make_schedule(name, 4, num_microbatches), remat=remat)
        return step.lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(name, 32) - temp_bytes(name, 8) < 256  # one activation of a microbatch
    if name == "1f1b":
        assert temp_bytes("gpipe", 32) - temp_bytes("gpipe", 8) >= 24 * 256


@pytest.mark.parametrize(
    ("name", "num_stages", "num_layers", "num_exchanges"),
    [("interleaved-1f1b", 4, 24, 3), ("zb-v", 8, 16, 2), ("zb-v", 4, 30, 8), ("zb-v", 4, 12, 3), ("zb-h1", 4, 30, 0),
     ("1f1b", 4, 6, 2), ("zb-h1", 64, 126, 2), ("1f1b", 8, 9, 2)],
)  # fmt: skip
def test_every_layer_moves_once_to_its_stage(name, num_stages, num_layers, num_exchanges):
    schedule = make_schedule(name, num_stages, 8, num_rounds=3 if name == "interleaved-1f1b" else None)
    moves, devices = make_moves(schedule.devices, num_stages, num_layers), schedule.devices
    assert len(moves.rounds) == num_exchanges
    assert sum(map(sum, moves.counts)) == num_layers
    for one in moves.rounds:
        assert max(len({move.source for move in one}), len({move.target for move in one})) == len(one)
    where = {}
    for move in (move for one in moves.rounds for move in one):
        stored = -(-num_layers // num_stages)
        for layer in range(moves.size):
            where[move.source * stored + move.piece * moves.size + layer] = (
                move.target,
                move.slot * moves.size + layer,
            )
    expected, layer = {}, 0
    for number, device in enumerate(devices):
        turn = devices[:number].count(device)
        for place in range(moves.counts[device][turn]):
            expected[layer] = (device, turn * moves.num_slots + place)
            layer += 1
    assert not where or where == expected


# --- Bad inputs ---


def run_bad(*, mesh="pp:2", layers=None, x=None, grad_of=0, **options):
    options = {
        "schedule": make_schedule("1f1b", 2, 2),
        "last": lambda _, h: (h.sum(), {}),
        "stage": lambda layers, h: h * layers["w"][0],
        **options,
    }
    stage_fn = options.pop("stage")
    layers = {"w": jnp.ones(4)} if layers is None else layers
    run = local_map(
        lambda layers, x: lax.psum(pipeline_loss(stage_fn, layers, x, axis="pp", **options)[0], "pp"),
        mesh=mesh_of(mesh), in_specs=(P("pp"), P()), out_specs=P(),
    )  # fmt: skip
    return jax.eval_shape(jax.grad(run, argnums=grad_of), layers, jnp.ones((4, 1)) if x is None else x)


def test_few_microbatches_warn():
    with pytest.warns(mw.MeshwrightWarning, match="1 microbatches on 2 stages leave the devices idle 50% of the time"):
        run_bad(schedule=make_schedule("1f1b", 2, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": make_schedule("1f1b", 4, 2)}, "is for 4 stages; the pipeline has 2"),
        (
            {"schedule": make_schedule("zb-v", 2, 2), "layers": {"w": jnp.ones(6)}},
            r"6 layers cannot be cut evenly into 2 x 2 pipeline stages(.|\n)*takes no num_layers(.|\n)*multiple of 4",
        ),
        (
            {"num_layers": 9},
            r"2 devices hold 2 layers each, which does not fit num_layers=9\.\nhint: store 5 layers on each device",
        ),
        ({"layers": {"w": jnp.ones(4), "b": jnp.ones(2)}}, r"different leading dims: \[1, 2\]"),
        ({"schedule": make_schedule("1f1b", 2, 3)}, "cannot cut a batch of 4 rows into 3 microbatches"),
        ({"grad_of": 1}, r"computes gradients of parameters only(.|\n)*stop_gradient"),
        ({"last": lambda _, h: (h, {})}, "must return a scalar loss"),
        ({"last": lambda _, h: h.sum()}, "must return a scalar loss"),
        (
            {"first": lambda _, x: (x, jnp.int32(1)), "stage": lambda _, h: h, "last": lambda _, h: (h[0].sum(), {})},
            r"a stage passes int32\[\] on, which has no gradient",
        ),
    ],
)
def test_bad_inputs(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        run_bad(**options)


@pytest.mark.parametrize("of", ["first", "stage_fn", "last"])
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_collectives_over_the_axis_of_the_stages_are_an_error(name, of):
    """Devices take the branches of these functions at different ticks, so they would wait forever."""

    def mean(x, *, by):
        whole = jax.jit(lambda x: pcast_varying(lax.psum(x, "pp"), "pp"))  # an inner jaxpr
        return whole(x) if by == of else x

    def loss(layers, x):
        options = {
            "axis": "pp",
            "first": lambda _, x: mean(pcast_varying(x, "pp"), by="first"),
            "last": lambda _, h: (mean(h, by="last").sum(), {}),
        }
        run = lambda layers, h: mean(h * layers[0], by="stage_fn")  # noqa: E731
        if name == "gpipe":
            return lax.psum(pipeline(run, layers, x, num_microbatches=2, combine="sum", **options)[0], "pp")
        return lax.psum(pipeline_loss(run, layers, x, schedule=make_schedule(name, 2, 2), **options)[0], "pp")

    mapped = local_map(loss, mesh=mesh_of("pp:2"), in_specs=(P("pp"), P()), out_specs=P())
    with pytest.raises(mw.PlacementError, match=rf"{of} communicates over 'pp' \(psum_invariant\)"):
        jax.eval_shape(jax.grad(mapped), jnp.ones(2), jnp.ones((4, 1)))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_one_stage_runs_without_a_schedule(name):
    def loss(layers, x):
        def layer(h, w):
            return h * w, None

        schedule = make_schedule(name, 1, 4)
        run = functools.partial(pipeline_loss, lambda layers, h: lax.scan(layer, h, layers)[0], layers, x)
        return run(axis="pp", schedule=schedule, last=lambda _, h: (h.sum(), {"rows": jnp.int32(h.shape[0])}))[0]

    mesh = mw.create_mesh("pp:1", devices=1)
    both = local_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P("pp"), P()), out_specs=(P(), P("pp")))
    value, grads = jax.jit(both)(jnp.full(4, 2.0), jnp.ones((8, 1)))
    assert (float(value), grads.tolist()) == (128.0, [64.0] * 4)
