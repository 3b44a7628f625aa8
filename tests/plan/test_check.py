"""`assert_plan`: plans within limits, and the errors of those beyond."""

import functools
import re
import sys

import pytest

from meshwright.errors import MeshwrightError, MeshwrightWarning
from meshwright.models import Decoder
from meshwright.plan.check import PlanError, assert_plan
from meshwright.plan.compiled.compile import WIDENED, Compiled, compile_step
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
    """A job reference, and its step compiled for eight simulated CPU devices."""
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


def test_a_memory_error_names_the_largest_parts():
    with pytest.raises(PlanError, match=r"memory: .* more than 100.0 KiB, per device \(computed\)") as caught:
        assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=100 * 1024)
    assert isinstance(caught.value, AssertionError)  # pytest reports it as a failed assertion
    assert "the largest parts are " in str(caught.value)
    assert str(caught.value).startswith("the plan fsdp:4 on 4 x TPU v5p (torus 2x2x1) exceeds its limits:\n- ")
    assert caught.value.plan.memory.total > 100 * 1024


def test_all_problems_are_reported_at_once():
    with pytest.raises(PlanError) as caught:
        assert_plan(job(), "v5p:2x2x1", mesh="fsdp:4", max_bytes=1, max_wire_bytes=1, max_seconds=1e-9, min_mfu=0.99)
    kinds = [problem.partition(":")[0] for problem in caught.value.problems]
    assert kinds == ["memory", "sent", "time", "MFU"]
    assert "all-gather over fsdp" in caught.value.problems[1]
    assert re.search(r"\(assumed, within 12%\); allowed: 1e-09 s", caught.value.problems[2])


def test_a_plan_that_does_not_fit_fails_without_a_limit():
    big = language_job(Decoder.named("7b"), batch_size=4, num_tokens=2048)
    with pytest.raises(PlanError, match=r"memory: it does not fit: .* of 15.8 GiB"):
        assert_plan(big, "v5e:2x2", mesh="fsdp:4")


def test_a_step_keeps_its_memory_and_traffic_on_eight_simulated_devices(on_cpu):
    job, compiled = on_cpu
    # Each device holds an eighth of two 256 KiB float32 matrices. Both are gathered and scattered once, sending 7/8 of
    # each; four more scalars belong to the loss and the gradient norm.
    matrices, wire = 2 * 128 * 512 * 4, (2 * 2 * 128 * 512 * 4 + 4 * 2 * 4) * 7 / 8
    plan = assert_plan(job, "cpu:8", setup=SPLIT, compile=compiled, max_bytes=1.5 * MIB, max_wire_bytes=wire, exposed=0)
    assert plan.memory.basis == "compiled"
    assert next(part.bytes for part in plan.memory.parts if part.name == "parameters") == matrices / 8
    with pytest.raises(PlanError, match=r"sent: 896.0 KiB, 1 B more than .* per device and step \(compiled\)"):
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
    with pytest.raises(PlanError, match=r"exposed: 1 of 2 .*allowed: 0\n.*no matmul between its start"):
        check(collective(), waits)
    # An eighth of 12 MiB per step is above ignore_bytes, a twentieth is not.
    check(collective(share=0.95))
    with pytest.raises(PlanError, match=r"partly hidden \(87.5%\): the transfer takes longer"):
        check(collective(share=0.875))
    # Small collectives add up over the trips of their loop.
    with pytest.raises(PlanError, match=r"4.0 MiB per step"):
        check(collective(is_async=False, wire_bytes=4096.0, trips=1024))


def test_invalid_arguments():
    with pytest.raises(MeshwrightError, match="got neither setup nor mesh"):
        assert_plan(job(), "cpu:8")
    with pytest.raises(MeshwrightError, match="got both setup and mesh"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", setup=Setup(mesh="fsdp:8"))
    with pytest.raises(MeshwrightError, match="needs a compiled program"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", exposed=0)
    with pytest.raises(MeshwrightError, match="step time is unknown for cpu:8"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", min_mfu=0.1)


def test_bytes_of_a_cpu_program_are_not_those_of_the_target():
    wide = Compiled("cpu:8", Setup(mesh="fsdp:8"), notes=(WIDENED,))
    with pytest.warns(MeshwrightWarning, match=r"sends 16-bit values as float32[\s\S]*hint: name that machine"):
        assert_plan(job(), "cpu:8", mesh="fsdp:8", compile=wide, max_wire_bytes=MIB)
    assert_plan(job(), "cpu:8", mesh="fsdp:8", compile=wide, max_bytes=MIB)
