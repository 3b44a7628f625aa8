"""Frozen parameters in a plan: no gradients, no optimizer state, and no exchange of gradients.

Counted by hand, and against the compiled program.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import P
from meshwright.mesh.string import parse_mesh
from meshwright.models import Decoder
from meshwright.plan import Setup, make_plan
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.step_setup import build_step
from meshwright.train import language_job, lora

ROWS, TOKENS, WIDTH, LAYERS, VOCAB, HIDDEN, FLOAT = 16, 64, 64, 2, 256, 128, 4
ATTENTION, FEED_FORWARD, TABLE = 4 * WIDTH * WIDTH, 3 * WIDTH * HIDDEN, VOCAB * WIDTH
NORMS = (2 * LAYERS + 1) * WIDTH
ALL = LAYERS * (ATTENTION + FEED_FORWARD) + 2 * TABLE + NORMS


@functools.cache
def decoder(frozen):
    job = language_job(Decoder.named("tiny"), batch_size=ROWS, num_tokens=TOKENS)
    return dataclasses.replace(job, frozen=frozen)


def custom(**fields):
    """Three dense layers of 32 features; a matrix has 1024 elements, the head 256."""

    def init(key):
        return {name: jax.random.normal(key, (32, 8 if name == "head" else 32)) for name in ("up", "mid", "head")}

    def loss(params, batch, rng):
        h = jnp.tanh(jnp.tanh(batch["x"] @ params["up"]) @ params["mid"])
        return jnp.mean((h @ params["head"]) ** 2), {}

    rules = mw.Rules([("up|mid|head", P("fsdp"))], optional_axes=("fsdp",))
    batch = {"x": jax.ShapeDtypeStruct((ROWS, 32), "float32")}
    return mw.Job(init=init, rules=rules, loss=loss, batch=batch, **fields)


def plan_of(job, mesh, **options):
    devices = math.prod(parse_mesh(mesh).sizes)
    return make_plan(job, f"cpu:{devices}", Setup(mesh=mesh, precision="float32", **options))


def part(plan, name):
    return sum(part.bytes for part in plan.memory.parts if part.name == name)


def sent(plan):
    return sum(item.wire_bytes for item in plan.sent)


@pytest.mark.parametrize(
    ("frozen", "left"),
    # A block's norm belongs to it, and the final norm to none.
    [((), ALL), (("layers/attn",), ALL - LAYERS * (ATTENTION + WIDTH)), (("layers", "embed"), TABLE + WIDTH)],
)
def test_gradients_and_statistics_of_trained_parameters_only(frozen, left):
    plan = plan_of(decoder(frozen), "dp:8")
    assert part(plan, "parameters") == FLOAT * ALL
    assert part(plan, "gradients") == FLOAT * left
    assert part(plan, "optimizer") == 2 * FLOAT * left + 4  # Adam's two moments and its counter
    assert sent(plan) == pytest.approx(2 * FLOAT * left * 7 / 8)


def test_fsdp_gathers_frozen_parameters_but_scatters_no_gradients_of_them():
    whole, without_up = (plan_of(custom(frozen=frozen), "fsdp:8") for frozen in ((), "up"))
    by_kind = [{item.kind: item.wire_bytes for item in plan.sent} for plan in (whole, without_up)]
    gathers = FLOAT * (2 * 1024 + 256) * 7 / 8
    assert by_kind == [
        {"all-gather": gathers, "reduce-scatter": gathers},
        {"all-gather": gathers, "reduce-scatter": FLOAT * (1024 + 256) * 7 / 8},
    ]
    assert part(whole, "gradients") - part(without_up, "gradients") == FLOAT * 1024 / 8
    assert part(whole, "gathered weights") == part(without_up, "gathered weights")


def test_matmuls_for_gradients_of_frozen_parameters_are_not_counted():
    def matmul(**fields):
        return profile_job(custom(**fields), precision="float32", platform="cpu").needs["none"].flops.matmul

    wide, narrow = 2 * 32 * 32, 2 * 32 * 8  # per row
    assert matmul() == 3 * (2 * wide + narrow) - wide  # no gradient of the input
    assert matmul(frozen="mid") == matmul() - wide
    assert matmul(trained="head") == 2 * wide + 2 * narrow


def test_activations_are_kept_only_for_the_backward_pass_that_is_left():
    whole, head_only = (plan_of(custom(trained=trained), "dp:8") for trained in ((), "head"))
    assert part(head_only, "activations") < part(whole, "activations")


CASES = [
    (decoder(("layers", "embed")), "fsdp:4,tp:2", {}),
    (decoder(("layers/attn",)), "dp:2,fsdp:4", {"num_minibatches": 2}),
    (custom(frozen=("up", "head")), "dp:2,fsdp:4", {}),
]


@pytest.mark.parametrize(("job", "mesh", "options"), CASES)
def test_computed_bytes_match_the_compiled_program(job, mesh, options):
    setup = Setup(mesh=mesh, precision="float32", **options)
    step, batch = build_step(job, mw.create_mesh(mesh), setup)
    program = step.lower(batch).compile()
    compiled = sum(c.trips * c.wire_bytes for c in read_schedule(program.as_text()).collectives)
    plan = plan_of(job, mesh, **options)
    assert abs(compiled - sent(plan)) < 1024  # sums of scalars
    state = part(plan, "parameters") + part(plan, "optimizer")
    assert program.memory_analysis().argument_size_in_bytes == pytest.approx(state, rel=0.1, abs=40_000)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_loss_that_gets_merged_matrices_needs_memory_for_them(stacked):
    width, layers = 128, 4

    def init(key):
        return {"w": jax.random.normal(key, (layers, width, width))} if stacked else {
            f"w{layer}": jax.random.normal(key, (width, width)) for layer in range(layers)
        }  # fmt: skip

    def loss(params, batch, rng):
        h = batch["x"]
        if stacked:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["w"])
        for name in () if stacked else sorted(params):
            h = jnp.tanh(h @ params[name])
        return jnp.mean(h**2), {}

    batch = {"x": jax.ShapeDtypeStruct((ROWS, width), "float32")}
    job = lora(mw.Job(init=init, rules=[("w", P())], loss=loss, batch=batch), rank=2, targets="w", base="int8")
    step, given = build_step(job, mw.create_mesh("dp:8"), Setup(mesh="dp:8", precision="float32"))
    compiled = step.lower(given).compile().memory_analysis()
    plan = plan_of(job, "dp:8")
    peak = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
    assert plan.memory.total == pytest.approx(peak, rel=0.2)
    assert part(plan, "merged matrices") == (2 if stacked else 1) * layers * width**2 * FLOAT
