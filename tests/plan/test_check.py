"""Limits that users' tests put on plans: what passes, and what a failure says."""

import functools
import sys

import pytest

from meshwright.errors import MeshwrightError
from meshwright.models import Decoder
from meshwright.plan.check import PlanError, assert_plan
from meshwright.plan.compiled.compile import Compiled, compile_step
from meshwright.plan.compiled.verdict import CompiledCollective
from meshwright.plan.step_setup import Setup
from meshwright.train import language_job

MIB = 2**20
SPLIT = Setup(mesh="fsdp:8", precision="float32", optimizer="sgd")


@functools.cache
def job():
    return language_job(Decoder.named("tiny"), batch_size=8, num_tokens=16)


SOURCE = """
import jax
import jax.numpy as jnp
import meshwright as mw
from meshwright import P

def init(key):
    return {"up": jnp.ones((128, 512)), "down": jnp.ones((512, 128))}

def loss(params, batch, rng):
    return ((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2).mean(), {}

job = mw.Job(init=init, loss=loss, rules=[(".*", P("fsdp"))], batch=jax.ShapeDtypeStruct((64, 128), "float32"))
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """A job by its file, and what this machine's own compiler makes of it for eight simulated devices."""
    path = tmp_path_factory.mktemp("plan") / "split_job.py"
    path.write_text(SOURCE)
    reference = f"{path}:job"
    yield reference, compile_step(reference, "cpu:8", SPLIT)
    sys.modules.pop("split_job", None)


def test_a_plan_within_its_limits_is_returned():
    plan = assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=8 * MIB, max_wire_bytes=4 * MIB, max_seconds=1)
    assert plan.setup == Setup(mesh="fsdp:4")
    need = plan.memory.total
    assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=need)
    with pytest.raises(PlanError, match="1 B more than"):
        assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=need - 1)
    assert assert_plan(job(), "v5p:2x2x1", setup=plan.setup, rows=16).rows == 16


def test_memory_beyond_its_limit_is_said_with_its_largest_parts():
    with pytest.raises(PlanError, match=r"memory: .* more than 100.0 KiB, on each device \(computed\)") as caught:
        assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=100 * 1024)
    assert isinstance(caught.value, AssertionError)  # so that pytest shows it as a failed test
    assert "the largest parts are " in str(caught.value)
    assert str(caught.value).startswith("the plan of fsdp:4 on 4 x TPU v5p (torus 2x2x1) goes beyond its limits:\n- ")
    assert caught.value.plan.memory.total > 100 * 1024


def test_all_problems_are_said_at_once():
    with pytest.raises(PlanError) as caught:
        assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=1, max_wire_bytes=1, max_seconds=1e-9, min_mfu=0.99)
    kinds = [problem.partition(":")[0] for problem in caught.value.problems]
    assert kinds == ["memory", "sent", "time", "MFU"]
    assert "all-gather over fsdp" in caught.value.problems[1]


def test_what_does_not_fit_the_machine_fails_without_a_limit():
    big = language_job(Decoder.named("7b"), batch_size=4, num_tokens=2048)
    with pytest.raises(PlanError, match=r"memory: it does not fit: .* of 15.8 GiB"):
        assert_plan(big, "v5e:2x2", mesh="fsdp:4")


def test_a_step_keeps_its_memory_and_traffic_on_eight_simulated_devices(on_cpu):
    job, compiled = on_cpu
    # Two float32 matrices of 256 KiB: an eighth of each lies here. Both are gathered and scattered once, and of each
    # seven eighths travel; then there are four numbers, of the loss and of the norm of the gradients.
    matrices, wire = 2 * 128 * 512 * 4, (2 * 2 * 128 * 512 * 4 + 4 * 2 * 4) * 7 / 8
    plan = assert_plan(job, "cpu:8", setup=SPLIT, compile=compiled, max_bytes=1.5 * MIB, max_wire_bytes=wire, exposed=0)
    assert plan.memory.basis == "compiled"
    assert next(part.bytes for part in plan.memory.parts if part.name == "parameters") == matrices / 8
    with pytest.raises(PlanError, match=r"sent: 896.0 KiB, 1 B more than .* in a step \(compiled\)"):
        assert_plan(job, "cpu:8", setup=SPLIT, compile=compiled, max_wire_bytes=wire - 1)


def test_exposed_collectives_are_named(on_cpu):
    job, compiled = on_cpu
    with pytest.raises(PlanError, match="exposed: ") as caught:
        assert_plan(job, "cpu:8", setup=SPLIT, compile=compiled, exposed=0, ignore_bytes=1024)
    assert "all-gather over fsdp, " in str(caught.value)
    assert "exposed: synchronous, the device waits for it (gradient of params/up)" in str(caught.value)


def test_hidden_and_small_collectives_are_not_counted():
    def collective(**changes):
        values = {"kind": "all-gather", "axes": ("fsdp",), "bytes_moved": 4 * MIB, "wire_bytes": 3.0 * MIB}
        values |= {"group_size": 4, "is_async": True, "matmuls_between": 2, "trips": 4, "source": "gather"}
        return CompiledCollective(**(values | changes))

    def check(*collectives, most=0):
        setup = Setup(mesh="fsdp:4")
        made = Compiled("v5p:2x2x1", setup, peak_bytes=MIB, collectives=collectives)
        return assert_plan(job(), "v5p:2x2x1", setup=setup, compile=made, exposed=most)

    check(collective(), collective(is_async=False, wire_bytes=4.0))
    waits = collective(matmuls_between=0)
    check(waits, most=1)
    with pytest.raises(PlanError, match=r"exposed: 1 of the .*allowed: 0\n.*no matmul between its start"):
        check(collective(), waits)
    # Of 12 MiB a step, an eighth is more than is ignored, and a twentieth is not.
    check(collective(share=0.95))
    with pytest.raises(PlanError, match=r"partly hidden \(87.5%\): the compute beside it is shorter"):
        check(collective(share=0.875))
    # Small ones add up over the trips of their loop.
    with pytest.raises(PlanError, match=r"4.0 MiB a step"):
        check(collective(is_async=False, wire_bytes=4096.0, trips=1024))


def test_what_cannot_be_asked():
    with pytest.raises(MeshwrightError, match="a setup, or a mesh"):
        assert_plan(job(), "cpu:8")
    with pytest.raises(MeshwrightError, match="a setup, or a mesh"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", setup=Setup(mesh="fsdp:8"))
    with pytest.raises(MeshwrightError, match="nothing was compiled"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", exposed=0)
    with pytest.raises(MeshwrightError, match="no figures for the speed of cpu:8"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", min_mfu=0.1)
