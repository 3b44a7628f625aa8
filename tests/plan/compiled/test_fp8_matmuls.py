"""The dtypes of a compiled program's matmuls: read from lines of a step that was compiled for and ran on an H200."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from meshwright.models import Decoder
from meshwright.parallel import Fp8Weight, column_dense
from meshwright.plan.compiled.fp8_matmuls import ROLES, Fp8Check, check_fp8, inspect_fp8, read_matmuls
from meshwright.train import Fp8, Precision, language_job

CONFIG = (
    'backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":'
    '["1"],"rhs_contracting_dimensions":["1"]},"precision_config":{"algorithm":"ALG_UNSET","operand_precision":'
    '["PRECISION","PRECISION"]}}}'
)


def call(name, scope, operands, *, target="__cublas$lt$matmul$f8", precision="DEFAULT", out="bf16[32768,2048]{1,0}"):
    return (
        f"  %{name} = ({out}, s8[33554432]{{0}}) custom-call({operands}), "
        f'custom_call_target="{target}", metadata={{op_name="{scope}" scheduling_name="{name}" stack_frame_id=388}}, '
        + CONFIG.replace("PRECISION", precision)
    )


UP = "layers/mlp/up"
FORWARD = call("gemm.1", f"jit(step)/jvp(mlp)/fp8[{UP}][forward]/dot_general", "%x8, %w8, %s, %s")
DGRAD = call("gemm.2", f"jit(step)/transpose(jvp(mlp))/fp8[{UP}][input gradient]/dot_general", "%g8, %w8, %c, %s, %s")
WGRAD = call(
    "gemm.3",
    f"jit(step)/transpose(jvp(mlp))/fp8[{UP}][weight gradient]/dot_general",
    "%x8, %g8, %s, %s",
    precision="HIGHEST",
)
HEAD = call("gemm.4", "jit(step)/jvp(loss)/while/body/eval_jaxpr/dot_general", "%h, %w", target="__cublas$lt$matmul")
FALLBACK = call(
    "gemm.3",
    f"jit(step)/transpose(jvp(mlp))/fp8[{UP}][weight gradient]/dot_general",
    "%h, %w",
    target="__cublas$lt$matmul",
)


def program(*calls, trips=1):
    """A loop over layers, and the head after it."""
    body, often = "\n".join(calls), f'"known_trip_count":{{"n":"{trips}"}}'
    return f"""HloModule jit_step, is_scheduled=true

%body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {{
  %p = (s32[], bf16[8,8]{{1,0}}) parameter(0)
  %x8 = f8e4m3fn[32768,2048]{{1,0}} get-tuple-element(%p), index=0
  %w8 = f8e4m3fn[2048,2048]{{1,0}} get-tuple-element(%p), index=1
  %g8 = f8e5m2[32768,2048]{{1,0}} get-tuple-element(%p), index=2
  %h = bf16[32768,2048]{{1,0}} get-tuple-element(%p), index=3
  %w = bf16[2048,2048]{{1,0}} get-tuple-element(%p), index=4
  %c = bf16[32768,2048]{{1,0}} get-tuple-element(%p), index=5
  %s = f32[] get-tuple-element(%p), index=6
{body}
  ROOT %t = (s32[], bf16[8,8]{{1,0}}) tuple(%p, %h)
}}

%cond (p: (s32[], bf16[8,8])) -> pred[] {{
  %p = (s32[], bf16[8,8]{{1,0}}) parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (a: bf16[32768,2048], b: bf16[2048,2048]) -> bf16[32768,2048] {{
  %h = bf16[32768,2048]{{1,0}} parameter(0), metadata={{op_name="batch"}}
  %w = bf16[2048,2048]{{1,0}} parameter(1), metadata={{op_name="state.params['head']['kernel']"}}
  %loop = (s32[], bf16[8,8]{{1,0}}) while(%h), condition=%cond, body=%body, backend_config={{{often}}}
{HEAD}
  ROOT %out = bf16[32768,2048]{{1,0}} get-tuple-element(%gemm.4), index=0
}}
"""


def test_every_matmul_is_listed_with_its_dtypes():
    uses = read_matmuls(program(FORWARD, DGRAD, WGRAD, trips=16))
    assert [(use.name, use.role, use.kind, use.runs, use.is_precise) for use in uses] == [
        (UP, "forward", "f8e4m3fn*f8e4m3fn->bf16", 16, False),
        (UP, "input gradient", "f8e5m2*f8e4m3fn->bf16", 16, False),
        (UP, "weight gradient", "f8e4m3fn*f8e5m2->bf16", 16, True),
        ("params/head/kernel", "", "bf16*bf16->bf16", 1, False),
    ]
    assert {use.how for use in uses} == {"__cublas$lt$matmul$f8", "__cublas$lt$matmul"}


def test_a_program_in_fp8_passes():
    line, warnings, matmuls = inspect_fp8(program(FORWARD, DGRAD, WGRAD, trips=16), [UP], False)
    fp8 = {"name": UP, "dtypes": "f8e4m3fn*f8e4m3fn->bf16", "runs": 16}
    assert {**matmuls[0], "how": ""} == {**fp8, "pass": "forward", "how": ""}
    assert [row["pass"] for row in matmuls if row["name"] == UP] == list(ROLES)
    assert line == "fp8: 48 of 48 projection matmuls run in fp8; 1 others: 1 bf16*bf16->bf16"
    assert warnings == []


def test_an_injected_fallback_is_reported_with_its_parameter():
    check = check_fp8(program(FORWARD, DGRAD, FALLBACK, trips=16), [UP])
    assert not check.is_fp8
    assert check.line().startswith("fp8: 32 of 48 projection matmuls run in fp8")
    (warning,) = check.warnings()
    assert warning.startswith(
        f"`{UP}` does not run in fp8: weight gradient runs 16 times as bf16*bf16->bf16 (__cublas$lt$matmul).\nhint: "
    )


def test_a_merged_matmul_is_reported_with_its_parameter():
    """XLA merges matmuls that share an operand, and keeps the name of one of them."""
    check = check_fp8(program(FORWARD, DGRAD, WGRAD), [UP, "layers/mlp/gate"])
    assert check.missing == tuple(("layers/mlp/gate", role) for role in ROLES)
    (warning,) = check.warnings()
    assert "`layers/mlp/gate` does not run in fp8: forward is in no matmul of its own" in warning


def test_gradients_that_nothing_needs_are_not_missed():
    """Frozen parameters have no weight gradient, and an input such as the batch has no gradient."""
    assert check_fp8(program(FORWARD, DGRAD), [UP]).missing == ((UP, "weight gradient"),)
    assert check_fp8(program(FORWARD, DGRAD), [UP], frozen=[UP]).is_fp8
    assert check_fp8(program(FORWARD, WGRAD), [UP]).is_fp8
    assert inspect_fp8(program(FORWARD), [UP], False, [UP])[1] == []


def test_devices_without_fp8_say_that_they_emulate_it():
    w = Fp8Weight(jnp.ones((16, 16)), jnp.ones(3), name="w")

    def loss(value, x):
        return (column_dense(x, dataclasses.replace(w, value=value), axis=None) ** 2).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(w.value, jnp.ones((32, 16))).compile().as_text()
    check = check_fp8(text, ["w"], emulates=True)
    assert check.missing == ()
    assert check.warnings() == []
    assert check.line() == "fp8 is emulated on this device: 3 projection matmuls of fp8 values run as 3 f32*f32->f32"


@pytest.mark.slow  # compiles a step in another process
def test_a_plan_lists_the_matmuls_of_the_compiled_step():
    from meshwright.plan.compiled.compile import Compiled, compile_step
    from meshwright.plan.step_setup import Setup

    model = Decoder(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=64)
    job = language_job(model, batch_size=4, num_tokens=16)
    setup = Setup(mesh="dp:2", precision={"compute": "bfloat16", "fp8": {"least_dim": 16}})
    assert setup.dtypes == Precision(compute="bfloat16", fp8=Fp8(least_dim=16))
    compiled = compile_step(job, "cpu:2", setup)
    names = {use.name for use in compiled.matmuls if use.role}
    assert names == set(Fp8(least_dim=16).names(jax.eval_shape(model.init, jax.random.key(0))))
    assert all(use.runs == 2 for use in compiled.matmuls if use.role)
    assert any(note.startswith("fp8 is emulated on this device: 42 projection matmuls") for note in compiled.notes)
    assert Compiled.from_json(compiled.to_json()).matmuls == compiled.matmuls


def test_an_empty_check_has_nothing_to_say():
    assert Fp8Check((), ()).line() == "fp8: 0 of 0 projection matmuls run in fp8"
