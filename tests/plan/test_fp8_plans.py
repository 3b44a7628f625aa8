"""Plans of steps in fp8: against two steps measured on one H200, and their matmuls and casts by hand."""

import json
from pathlib import Path

import jax
import pytest

from meshwright.hardware.flops import Flops
from meshwright.models import Decoder
from meshwright.plan.costs.fp8_work import CAST_SHARE, fp8_matrices, fp8_work
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import Fp8
from meshwright.train.jobs.language_job import language_job

STORED = json.loads((Path(__file__).parents[2] / "benchmarks" / "h200_measured.json").read_text())
MEASURED = [case for case in STORED if case.get("precision") == "fp8"]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: str(case["seconds"]))
def test_measured_fp8_steps(case):
    job = language_job(Decoder(**case["model"]), batch_size=case["rows"], num_tokens=case["tokens"])
    plans = {
        precision: make_plan(job, "h200:1x1", Setup(mesh="dp:1", remat=case["remat"], precision=precision))
        for precision in ("mixed", "fp8")
    }
    assert plans["fp8"].time.step.value == pytest.approx(case["seconds"], rel=0.2)
    # By the measurements, 1.382x and 1.530x as fast as in bfloat16.
    faster = {0.2401: 1.382, 0.4424: 1.530}[case["seconds"]]
    assert plans["mixed"].time.step.value / plans["fp8"].time.step.value == pytest.approx(faster, rel=0.05)
    assert "of the matmuls in fp8, at 66% of its peak" in plans["fp8"].time.matmul.note
    assert any("the rate of matmuls is measured on one H200" in note for note in plans["fp8"].notes)


def test_chips_that_widen_fp8_and_chips_without_a_measurement():
    model = Decoder.named("tiny", d_model=512, d_ff=1024)
    job = language_job(model, batch_size=64, num_tokens=64)
    plans = {
        (target, precision): make_plan(job, target, Setup(mesh="fsdp:8", precision=precision))
        for target in ("a100:1x8", "h100:1x8", "v5p:2x2x2")
        for precision in ("mixed", "fp8")
    }
    piped = [
        make_plan(job, "h100:1x8", Setup(mesh="pp:2,dp:4", precision=precision, num_microbatches=4)).time.matmul.value
        for precision in ("mixed", "fp8")
    ]
    assert piped[1] < piped[0]
    for target, is_faster in (("a100:1x8", False), ("h100:1x8", True), ("v5p:2x2x2", False)):
        fp8, mixed = plans[target, "fp8"], plans[target, "mixed"]
        assert (fp8.time.matmul.value < mixed.time.matmul.value) is is_faster, target
        assert (fp8.time.memory.value > mixed.time.memory.value) is is_faster, target
    assert any("the rate of matmuls is assumed: as on H200" in note for note in plans["h100:1x8", "fp8"].notes)


def shapes():
    matrix = jax.ShapeDtypeStruct((4, 512, 256), "float32")
    layers = {"attn": {"q": matrix, "k": matrix}, "mlp": {"down": matrix}}
    return {"layers": layers, "head": {"w": jax.ShapeDtypeStruct((512, 1024), "float32")}}


def test_matmuls_and_casts_by_hand():
    found = fp8_matrices(shapes(), Fp8(), frozen=("layers/mlp/down",))
    assert [(one.count, one.rows, one.columns, one.shares_input, one.learns) for one in found] == [
        (4, 512, 256, True, True),  # k is multiplied by the input of q
        (4, 512, 256, False, True),
        (4, 512, 256, False, False),
    ]
    size, tokens = 4 * 512 * 256, 1000
    flops = Flops(total=10**15, matmul=10**15, recomputed=100)
    work = fp8_work(found, Fp8(), flops, tokens=tokens, devices=8, tp=2, stages=4, parts=3)
    # q and k: forward, input's and weight's gradient; down is frozen, without a weight's gradient.
    assert work.flops == (6 + 6 + 4) * size * tokens + 100
    # Inputs of q and down, gradients of all three; weights in each of three parts, split over tp and stages.
    rows = (2 * 4 * 512 + 3 * 4 * 256) * tokens / 8
    assert work.cast_bytes == 4 * (rows + 3 * 3 * size / (2 * 4))
    assert work.casts == 3 * 4 * (2 + 3 + 3) / 4
    current = fp8_work(found, Fp8(scaling="current"), flops, tokens=tokens, devices=8, tp=2, stages=4, parts=3)
    assert current.cast_bytes == work.cast_bytes + 2 * rows
    seconds = 32768 * 2048 * 4 / (4814e9 * CAST_SHARE)
    assert seconds == pytest.approx(0.102e-3, rel=0.02)  # as measured
    assert fp8_matrices(shapes(), None, frozen=()) == ()
