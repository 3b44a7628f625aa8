"""Profiles of jobs against formulas."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.models import Decoder, Execution
from meshwright.plan.costs.job_costs import profile_job
from meshwright.plan.plan import make_plan
from meshwright.plan.step_setup import Setup
from meshwright.train.jobs.language_job import language_job

TOKENS, WIDTH, HIDDEN, VOCAB = 32, 64, 128, 256


@functools.cache
def profile(num_layers=2, platform="tpu", remats=("none", "dots", "full"), num_tokens=TOKENS, layers="scan"):
    model = Decoder.named("tiny", num_layers=num_layers)
    job = language_job(model, batch_size=8, num_tokens=num_tokens, run=Execution(layers=layers))
    return profile_job(job, platform=platform, remats=remats)


def test_sizes():
    found = profile()
    assert found.num_params == Decoder.named("tiny").num_params
    assert (found.num_layers, found.tokens_per_row, found.d_model, found.vocab_size) == (2, TOKENS, WIDTH, VOCAB)
    assert (found.heads, found.kv_heads, found.head_dim) == (8, None, 8)
    assert (found.by_layer, found.notes) == (True, ())
    assert found.widths["layers/attn/q"] == 2
    assert found.widths["layers/attn_norm"] == 4  # norms are kept in float32


def test_flops_per_row():
    layer = 4 * WIDTH**2 + 3 * WIDTH * HIDDEN
    expected = TOKENS * (6 * (2 * layer + WIDTH * VOCAB) + 12 * TOKENS * WIDTH)  # half of attention is masked
    for remat, needs in profile().needs.items():
        assert needs.flops.model == expected, remat
    again = [profile().needs[remat].flops.recomputed for remat in ("none", "dots", "full")]
    assert again[0] == 0 < again[1] < again[2]


def test_pallas_kernels_change_no_count():
    for layers in ("scan", "unroll"):
        plain, ours = (
            profile_job(
                language_job(
                    Decoder.named("tiny", num_layers=6),
                    batch_size=8,
                    num_tokens=TOKENS,
                    run=Execution(layers=layers, kernels=on),
                ),
                platform="gpu",
            )
            for on in (False, None)
        )
        for remat, needs in ours.needs.items():
            flops, others = needs.flops, plain.needs[remat].flops
            assert (flops.model, flops.recomputed, flops.notes) == (others.model, others.recomputed, ()), (
                layers,
                remat,
            )
            assert needs.kept_per_row == pytest.approx(plain.needs[remat].kept_per_row, rel=0.02), (layers, remat)
        assert ours.needs["full"].flops.recomputed > ours.needs["dots"].flops.recomputed


def test_full_remat_saves_the_inputs_of_layers():
    few, many = profile(2), profile(4)
    each = TOKENS * WIDTH * 2
    assert many.needs["full"].kept_per_row - few.needs["full"].kept_per_row == 2 * each
    # Matmul results: four in attention, the attended values, two in the MLP, and the input; the last matmul's result is
    # the input of the next layer.
    dots = TOKENS * 2 * (4 * WIDTH + WIDTH + 2 * HIDDEN + WIDTH + WIDTH)
    found = (many.needs["dots"].kept_per_row - few.needs["dots"].kept_per_row) / 2
    assert found == pytest.approx(dots, rel=0.15)
    assert few.needs["none"].kept_per_row > few.needs["dots"].kept_per_row > few.needs["full"].kept_per_row


def test_unrolled_layers_save_only_residuals_that_are_costly_to_recompute():
    few, many = (profile(count, platform="gpu", remats=("none",), layers="unroll") for count in (2, 4))
    # Inputs and results of both norms, queries, keys, values and attended values, and three arrays of the MLP, each in
    # its original dtype; not float32 copies, intermediates of norms or reshaped arrays.
    wide = 2 * (2 * WIDTH + 2 * WIDTH + 4 * WIDTH + 3 * HIDDEN)
    numbers = 4 * (8 + 2)  # one float32 per head for the softmax, and one per norm
    found = (many.needs["none"].kept_per_row - few.needs["none"].kept_per_row) / 2
    assert found == pytest.approx(TOKENS * (wide + numbers), rel=0.02)
    assert (few.written_out, profile().written_out) == (True, False)


def test_residuals_are_attributed_to_kinds_of_layers():
    few, many = (profile(count, platform="gpu", remats=("none",), layers="unroll").needs["none"] for count in (2, 4))
    each = {kind: (many.kept[kind] - few.kept[kind]) / 2 / TOKENS for kind in many.kept}
    assert each == {
        "attention": 2 * 4 * WIDTH + 4 * 8,  # queries, keys, values, attended values; a float32 per head
        "feed-forward": 2 * 3 * HIDDEN,  # gate, up and their product
        "norms": 2 * 2 * WIDTH + 4 * 2,  # results of both; a float32 each
        "residual stream": 2 * 2 * WIDTH,  # inputs of both norms
        "embedding": 0,
        "loss": 0,
    }
    assert few.fixed == {"loss": VOCAB * WIDTH * 2}


def test_kinds_are_the_same_in_loops_and_under_policies():
    scanned = [profile(count).needs for count in (2, 4)]
    dots = {kind: (scanned[1]["dots"].kept[kind] - size) / 2 / TOKENS for kind, size in scanned[0]["dots"].kept.items()}
    # Matmul results: q, k, v, o and the attended values; gate and up. The last one is the next layer's input.
    assert (dots["attention"], dots["feed-forward"]) == (2 * 5 * WIDTH, 2 * 2 * HIDDEN)
    assert dots["residual stream"] == 2 * WIDTH
    offload = profile(remats=("offload",)).needs["offload"]
    assert offload.hosted == {kind: scanned[0]["dots"].kept[kind] for kind in ("attention", "feed-forward")}


def test_a_loop_over_layers_stores_no_float32_copies_for_norms():
    few, many = (profile(count).needs["none"].looped for count in (2, 4))
    each = {kind: (many[kind] - few[kind]) / 2 / TOKENS for kind in ("norms", "residual stream")}
    assert each == {"norms": 2 * 2 * WIDTH + 4 * 2, "residual stream": 2 * 2 * WIDTH}


def test_the_fixed_part_does_not_grow_with_the_rows():
    # The loss passes the head's gradient to the backward pass, whatever the batch size.
    short, long = (profile(num_tokens=count).needs["full"] for count in (TOKENS, 2 * TOKENS))
    assert sum(short.fixed.values()) >= VOCAB * WIDTH * 2
    assert long.fixed == short.fixed
    assert long.kept_per_row == pytest.approx(2 * short.kept_per_row, rel=0.01)


def test_costs_of_a_policy_do_not_depend_on_the_others():
    alone, beside = profile(remats=("none", "dots")), profile()
    assert alone.needs["dots"] == beside.needs["dots"]
    assert alone.needs["none"] == beside.needs["none"]


def test_gpus_use_cudnn_attention():
    tpu, gpu = profile(remats=("none",)), profile(platform="gpu", remats=("none",))
    assert tpu.needs["none"].flops.attention == 0
    one = 2 * TOKENS * TOKENS * WIDTH // 2  # half is masked
    assert gpu.needs["none"].flops.attention == 2 * one * (2 + 5)
    # cuDNN never stores the logits.
    assert gpu.needs["none"].kept_per_row < tpu.needs["none"].kept_per_row


def test_custom_jobs():
    def loss(params, batch, rng):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2), {}

    shapes = {name: jax.ShapeDtypeStruct((4, 16), "float32") for name in ("x", "y")}
    job = mw.Job(
        init=lambda key: {"a": jnp.zeros((16, 32)), "b": jnp.zeros((32, 16))},
        rules=[("a|b", P("fsdp"))],
        loss=loss,
        batch=shapes,
    )
    found = profile_job(job, precision="float32", optimizer="sgd")
    assert (found.d_model, found.num_layers, found.by_layer, found.tokens_per_row) == (None, 1, False, 1)
    assert found.needs["none"].flops.model == 5 * 2 * 16 * 32  # two forward, three backward: x needs no gradient
    assert found.needs["full"].flops.recomputed == 2 * 2 * 16 * 32
    # Compilers hid 0% (gathers on H200s) to 72% of its communication, so none is assumed hidden.
    plan = make_plan(job, "h200:1x4", Setup(mesh="fsdp:4"))
    (note,) = (note for note in plan.notes if note.startswith("custom model"))
    assert note.endswith("no communication hides behind compute; compile to read both")
    assert {(item.axis, item.kind, item.hidden) for item in plan.sent} == {
        ("fsdp", "all-gather", 0.0),
        ("fsdp", "reduce-scatter", 0.0),
    }
    assert plan.time.exposed.value == plan.time.communication.value > 0
