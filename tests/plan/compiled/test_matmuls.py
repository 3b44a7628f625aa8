# ruff: noqa: E501 (HLO lines are long)
"""FLOPs of matmuls in compiled programs: every form that compilers write, and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright.plan.compiled.hlo import parse_program
from meshwright.plan.compiled.matmuls import Matmuls

FORMS = {
    "dot": ("bf16[8,16]", "bf16[16,4]", "bf16[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 4),
    "batched dot": (
        "bf16[3,8,16]",
        "bf16[3,4,16]",
        "bf16[3,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}",
        2 * 3 * 8 * 16 * 4,
    ),
    "TPU's dot": ("bf16[8,16]", "bf16[16,4]", "bf16[8,4]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 4),
    # A batched dot: each output uses one of the 8 positions of its window, the others are holes.
    "TPU's batched dot": (
        "bf16[8,32,16]",
        "bf16[8,16,4]",
        "bf16[8,32,4]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
        2 * 8 * 32 * 16 * 4,
    ),
    # A convolution: 3 positions for each of 10 outputs, without two positions of padding.
    "convolution": (
        "f32[2,10,16]",
        "f32[3,16,4]",
        "f32[2,10,4]{2,1,0} convolution(%a, %b), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
        2 * 2 * (3 * 10 - 2) * 16 * 4,
    ),
    "library call": (
        "bf16[16,8]",
        "bf16[16,4]",
        '(bf16[8,4]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}',
        2 * 8 * 16 * 4,
    ),
    "no matmul": ("bf16[8,16]", "bf16[8,16]", "bf16[8,16]{1,0} add(%a, %b)", 0),
}  # fmt: skip


def flops_of(text):
    program = parse_program(text)
    matmuls = Matmuls(program)
    instructions = program.computations[program.entry]
    return sum(matmuls.flops(program.entry, one) for one in instructions), sum(map(matmuls.count, instructions))


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_a_matmul(form):
    left, right, instruction, flops = FORMS[form]
    text = f"""HloModule m

%fused (a: {left}, b: {right}) -> f32[] {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %out = {instruction}
}}

ENTRY %main (x: {left}, y: {right}) -> f32[] {{
  %x = {left} parameter(0)
  %y = {right} parameter(1)
  ROOT %fusion = f32[] fusion(%x, %y), kind=kOutput, calls=%fused
}}
"""
    assert flops_of(text) == (flops, int(flops > 0))


def test_a_compiled_program_with_a_loop_and_its_gradient():
    def loss(weights, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0].sum()

    weights, x = jnp.ones((5, 32, 32)), jnp.ones((8, 32))
    forwards = jax.jit(loss).lower(weights, x).compile().as_text()
    both = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile().as_text()
    one = 2 * 8 * 32 * 32
    assert flops_of(forwards)[0] == 5 * one
    assert flops_of(both)[0] == 3 * 5 * one
