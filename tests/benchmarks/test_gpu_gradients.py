"""benchmarks/gpu_gradients.py, run on a CPU, and its reading of programs compiled for a GPU."""

import sys
from pathlib import Path

import jax
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CALL = '  %{name} = bf16[8]{{0}} custom-call(%x), custom_call_target="{target}", metadata={{op_name="{scope}"}}, {rest}'

LENGTHS = 'backend_config={"dimensions": ["4", "8", "204", "204"], "mask_type": "PADDING_CAUSAL"}'


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu_gradients
    finally:
        sys.path.remove(str(BENCHMARKS))
    return gpu_gradients


def call(target, scope="jit(step)", rest=""):
    return CALL.format(name="call", target=target, scope=scope, rest=rest)


def test_two_cases_on_a_cpu(script):
    """Packed rows of an odd length in float32, and the same in mixed precision."""
    chosen = [case for case in script.cases() if case.name == "odd length, packed, by lengths"]
    exact, mixed = script.compare(chosen, jax.devices()[0], tiny=True, threads=1)
    assert (exact["precision"], exact["result"]) == ("float32", "ok")
    assert exact["difference"] < 1e-5
    assert (mixed["precision"], mixed["result"]) == ("mixed", "ok")
    assert 1e-4 < mixed["difference"] < mixed["allowed"]  # the size of bfloat16 errors
    assert mixed["paths"]["attention"] == mixed["paths"]["norm"] == "XLA"
    assert script.row(mixed)[-1] == "ok"
    assert script.row(mixed)[6:-1] == [mixed["paths"][part] for part in script.PARTS]
    assert len(script.HEADINGS) == len(script.row(mixed)) == len(script.row(exact | {"error": "no such length"}))


def test_names_of_cases_are_unique(script):
    names = [(case.name, case.precision) for case in script.cases()]
    assert len(set(names)) == len(names)


def test_a_wrong_or_nan_gradient_fails(script):
    case = script.Case("one", precision="float32")
    true = {"loss": 2.0, "grads": {"w": script.np.ones(4), "b": script.np.ones(2)}, "text": ""}
    for factor, expected in ((1.0, "ok"), (1.001, "FAILED"), (float("nan"), "FAILED")):
        found = true | {"grads": {"w": true["grads"]["w"], "b": factor * true["grads"]["b"]}}
        result = script.judge(case, found, true)
        assert result["result"] == expected
        assert factor == 1.0 or result["worst"] == "b"
    refused = script.judge(case, NotImplementedError("no such length\nand more"), true)
    assert (refused["result"], refused["error"]) == ("FAILED", "NotImplementedError: no such length")


@pytest.mark.parametrize(
    ("lines", "part", "expected"),
    [
        ([], "attention", "XLA"),
        ([call("__cudnn$fmhaSoftmax"), call("__cudnn$fmhaSoftmaxBackward")], "attention", "cuDNN causal x2"),
        ([call("__cudnn$fmhaScaleBiasSoftmax")], "attention", "cuDNN mask x1"),
        (
            [call("__cudnn$fmhaSoftmax", rest=LENGTHS)],
            "attention",
            "cuDNN lengths x1, 204 positions",
        ),
        ([call("__gpu$xla.gpu.triton", "jit(step)/residual_norm_gradient/pallas_call")], "norm", "Pallas x1"),
        ([call("__gpu$xla.gpu.triton", "jit(step)/residual_norm_gradient/pallas_call")], "loss", "XLA"),
        ([call("mosaic_gpu_v2", "jit(step)/jit(f)/gated_head_norm_gradient/mpmd_map")], "head norm", "Pallas x1"),
        ([call("__gpu$xla.gpu.triton", "jvp(loss)/softmax_gradient/pallas_call")], "loss", "Pallas x1"),
        ([call("__gpu$xla.gpu.triton", "transpose(jvp(stack))/pallas_call")] * 2, "stack", "Pallas x2"),
        ([call("__cublas$lt$matmul")] * 3, "matmuls", "cublas$lt$matmul x3"),
        (["  %dot.1 = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}"], "matmuls", "XLA x1"),
    ],
)
def test_paths_are_read_from_the_compiled_program(script, lines, part, expected):
    assert script.paths("\n".join(["HloModule step", *lines]))[part] == expected
