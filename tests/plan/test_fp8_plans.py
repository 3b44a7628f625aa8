"""Plans of steps in fp8: against steps measured on one H200 or compiled for it, and their parts by hand."""

import json
from pathlib import Path

import jax
import pytest

from meshwright.hardware.flops import Flops
from meshwright.models import Decoder, Execution
from meshwright.plan.costs.fp8.fp8_work import CAST_SHARE, fp8_matrices, fp8_work
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train import Fp8, Precision
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
    assert plans["fp8"].memory.total == pytest.approx(case["peak_bytes"], rel=0.03)
    # By the measurements, 1.382x and 1.530x as fast as in bfloat16.
    faster = {0.2401: 1.382, 0.4424: 1.530}[case["seconds"]]
    assert plans["mixed"].time.step.value / plans["fp8"].time.step.value == pytest.approx(faster, rel=0.05)
    assert "of the matmuls in fp8, at 66% of its peak" in plans["fp8"].time.matmul.note
    assert any("the rate of matmuls is measured on one H200" in note for note in plans["fp8"].notes)


@pytest.mark.parametrize(
    ("remat", "layers", "gib"),
    [("none", "auto", 13.01), ("dots", "auto", 11.71), ("full", "auto", 8.06), ("none", "scan", 14.20)],
)
def test_peaks_of_compiled_fp8_steps(remat, layers, gib):
    """Four layers of the 956M decoder with 16 rows of 2048 tokens, compiled for h200:1x1 with jax 0.11.2."""
    model = Decoder.named("956m", num_layers=4)
    job = language_job(model, batch_size=16, num_tokens=2048, run=Execution(layers=layers))
    plan = make_plan(job, "h200:1x1", Setup(mesh="dp:1", remat=remat, precision="fp8"))
    assert plan.memory.total / 2**30 == pytest.approx(gib, rel=0.05)


def test_activations_in_fp8_by_hand():
    width, hidden, tokens = 64, 128, 32

    def kept(num_layers, precision):
        model = Decoder.named("tiny", num_layers=num_layers, d_model=width, d_ff=hidden, num_heads=4)
        job = language_job(model, batch_size=8, num_tokens=tokens)
        profile = profile_job(job, precision=precision, platform="gpu", remats=("none",)).in_fp8()
        return profile.saved["none"].kept

    precision = Precision(compute="bfloat16", fp8=Fp8(least_dim=16))
    few, many = (kept(count, precision) for count in (2, 4))
    assert {kind: (many[kind] - few[kind]) / 2 / tokens for kind in many} == {
        # Inputs of q, k, v and of o in fp8; queries, keys, values and attended values; a float32 per head.
        "attention": 2 * width + 2 * 4 * width + 4 * 4,
        # Inputs of gate, up and of down in fp8; gate and up.
        "feed-forward": width + hidden + 2 * 2 * hidden,
        "norms": 4 * 2,
        "residual stream": 2 * 2 * width,
        "embedding": 0,
        "loss": 0,
    }
    only_down = Precision(compute="bfloat16", fp8=Fp8(matmuls="mlp/down", least_dim=16))
    wide, narrow = (sum(kept(4, chosen).values()) for chosen in ("mixed", only_down))
    assert wide - narrow == 4 * hidden * tokens


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
        assert (fp8.memory.total < mixed.memory.total) is is_faster, target
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
