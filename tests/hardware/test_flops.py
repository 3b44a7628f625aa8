"""FLOP counts against formulas: loops, checkpoints, meshes, and uncountable operations."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.hardware.flops import count_flops, count_jaxpr
from meshwright.models import Decoder, Execution
from meshwright.train.gradients import make_gradients
from meshwright.train.jobs.language_job import language_job
from meshwright.train.state import state_layout

ROWS, TOKENS = 16, 16
MODEL = Decoder.named("tiny", num_kv_heads=4)
ATTENTION = 64 * 8 * (8 + 8 + 4 + 4)  # queries and outputs have 8 heads of 8 features, keys and values 4
MLP = 3 * 64 * 128
WEIGHTS = 2 * (ATTENTION + MLP) + 64 * 256  # weights that multiply each token: two layers and the head
SQUARE = 2 * TOKENS * 64  # one attention product per token and layer, masked or not
MASKED = ROWS * TOKENS * 6 * SQUARE  # half of six products in two layers
TRAINING = ROWS * TOKENS * (6 * WEIGHTS + 2 * 6 * SQUARE) - MASKED
# "full" skips the last matmul of a layer, whose result no gradient needs; "dots" recomputes the attention logits.
AGAIN = {
    "none": 0,
    "full": ROWS * TOKENS * 2 * (2 * (ATTENTION + MLP * 2 // 3) + 2 * SQUARE),
    "dots": ROWS * TOKENS * 2 * SQUARE,
}


def gradient_flops(mesh, *, view="global", remat="none", layers="scan", precision="float32", num_minibatches=1):
    job = language_job(MODEL, batch_size=ROWS, num_tokens=TOKENS, run=Execution(layers=layers))
    layout = state_layout(job, optax.sgd(0.1), mesh)
    gradients = make_gradients(
        job, layout, view=view, remat=remat, precision=precision, num_minibatches=num_minibatches
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        return count_flops(gradients, layout.abstract.params, job.batch, key)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_a_decoder_on_one_device(remat, layers):
    found = gradient_flops(mw.create_mesh("dp:1", devices=1), remat=remat, layers=layers)
    assert (found.model, found.recomputed, found.notes) == (TRAINING, AGAIN[remat], ())
    assert (found.matmul, found.masked) == (TRAINING + MASKED + AGAIN[remat], MASKED)
    # The rest is norms, activations, softmax: little, and all of it grows with the tokens.
    assert found.matmul < found.total < 1.1 * found.matmul


@pytest.mark.parametrize(
    ("mesh", "remat", "num_minibatches"),
    [
        ("dp:8", "none", 2),
        ("fsdp:8", "full", 1),
        ("fsdp:8", "none", 2),
        ("fsdp:4,tp:2", "full", 1),
        ("fsdp:2,tp:4", "dots", 2),
        ("dp:2,fsdp:2,tp:2", "none", 1),
    ],
)
def test_all_devices_of_the_local_view_together_match_one_device(mesh, remat, num_minibatches):
    found = gradient_flops(mw.create_mesh(mesh), view="local", remat=remat, num_minibatches=num_minibatches)
    assert (found.model, found.recomputed, found.notes) == (TRAINING, AGAIN[remat], ())


def test_the_global_view_counts_whole_arrays_on_any_mesh():
    found = gradient_flops(mw.create_mesh("fsdp:4,tp:2"), remat="full")
    assert (found.model, found.recomputed) == (TRAINING, AGAIN["full"])


def test_no_device_is_needed():
    found = gradient_flops(mw.create_abstract_mesh("dp:1"), precision="mixed")
    assert found.model == TRAINING
    # The gradient of attention's logits, which are float32, is multiplied as such.
    assert found.by_dtype == {
        "bfloat16": TRAINING + MASKED - 2 * ROWS * TOKENS * 2 * SQUARE,
        "float32": 2 * ROWS * TOKENS * 2 * SQUARE,
    }


def test_a_pipeline_notes_the_choice_of_branches():
    found = gradient_flops(mw.create_mesh("dp:2,pp:2,tp:2"), view="local")
    assert found.model > TRAINING
    assert "only the branch of a `cond` with the most matmuls is counted" in found.notes[0]


# --- Recomputation ---

W = jnp.ones((8, 8))


def _gated(ws, x):
    return (jnp.tanh(x @ ws[0]) * (x @ ws[1])) @ ws[2]


def _two_results(ws, x):
    hidden = jnp.sin(x @ ws[0])
    return hidden @ ws[1], jnp.sum(jnp.exp(hidden @ ws[2]))


def _looped(ws, x):
    return lax.scan(lambda h, w: (jnp.sin(h @ w), h), x, jnp.stack(ws))[0]


def _branched(ws, x):
    return lax.cond(x[0, 0] > 0, lambda h: jnp.sin(h @ ws[0]), lambda h: jnp.cos(h @ ws[1]), x) @ ws[2]


def _nested(ws, x):
    return jax.checkpoint(lambda h: jnp.sin(jnp.sin(h @ ws[0]) @ ws[1]))(x) @ ws[2]


def test_a_weight_that_only_multiplies_a_gradient_is_not_a_gradient():
    def block(x, gate, weight):  # the weight is the last input before the gradient that comes in
        return jnp.sin(x @ gate) * (x @ weight)

    found = count_flops(jax.grad(lambda *args: jnp.sum(jax.checkpoint(block)(*args) ** 2), (0, 1, 2)), W, W, W)
    assert found.recomputed == 2 * 2 * 8**3


# Matmuls that the checkpoint adds to the gradient.
@pytest.mark.parametrize(("block", "again"), [(_gated, 2), (_two_results, 2), (_looped, 3), (_branched, 1)])
def test_recomputation_of_a_checkpoint_is_counted_separately(block, again):
    def loss(block, ws, x):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(block(ws, x)))

    args = ([W, W, W], jnp.ones((4, 8)))
    plain = count_flops(jax.grad(lambda ws, x: loss(block, ws, x)), *args)
    found = count_flops(jax.grad(lambda ws, x: loss(jax.checkpoint(block), ws, x)), *args)
    one = 2 * 4 * 8 * 8
    assert (found.model, found.recomputed) == (plain.matmul, again * one)
    assert plain.recomputed == 0


def test_a_nested_checkpoint_is_recomputed_twice():
    found = count_flops(jax.grad(lambda ws, x: jnp.sum(jax.checkpoint(_nested)(ws, x) ** 2)), [W, W, W], W)
    plain = count_flops(jax.grad(lambda ws, x: jnp.sum(_nested(ws, x) ** 2)), [W, W, W], W)
    assert found.recomputed > plain.recomputed > 0
    assert (found.model, found.notes) == (plain.model, ())


def test_a_checkpoint_without_gradients_recomputes_nothing():
    found = count_flops(jax.checkpoint(_gated), [W, W, W], W)
    assert (found.matmul, found.recomputed) == (3 * 2 * 8**3, 0)


# --- Operations ---


def test_matmuls_with_batch_dims_and_dtypes():
    a, b = jax.ShapeDtypeStruct((3, 5, 7), "bfloat16"), jax.ShapeDtypeStruct((3, 7, 11), "bfloat16")
    found = count_flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), a, b)
    assert found.by_dtype == {"bfloat16": 2 * 3 * 5 * 7 * 11}
    assert found.moved == 2 * 3 * (5 * 7 + 7 * 11 + 5 * 11)
    assert found.total == found.matmul


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(groups):
    x, w = jax.ShapeDtypeStruct((2, 8, 16, 16), "float32"), jax.ShapeDtypeStruct((12, 8 // groups, 3, 3), "float32")
    found = count_flops(lambda x, w: lax.conv(x, w, (1, 1), "VALID") if groups == 1 else _grouped(x, w, groups), x, w)
    assert found.matmul == 2 * (2 * 12 * 14 * 14) * (8 // groups * 3 * 3)


def _grouped(x, w, groups):
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", feature_group_count=groups)


def test_dead_code_is_not_counted():
    # The gradient of a sum does not need the product, though it is in the jaxpr.
    assert count_flops(jax.grad(lambda w, x: jnp.sum(x @ w)), W, jnp.ones((4, 8))).matmul == 2 * 4 * 8 * 8


def test_elementwise_operations_and_reductions():
    found = count_flops(lambda x: jnp.sum(x * x + 1), jnp.ones(100))
    assert (found.matmul, found.total) == (0, 300)


def test_functions_with_their_own_gradients_are_counted():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))
    x = jnp.ones((4, 8))
    assert count_flops(product, x, W).matmul == 2 * 4 * 8 * 8
    both = jax.value_and_grad(lambda x, w: jnp.sum(product(x, w)), (0, 1))
    assert count_flops(both, x, W).matmul == 3 * 2 * 4 * 8 * 8


def test_devices_of_a_shard_map_are_added_up_also_when_some_axes_are_left_to_xla():
    mesh = mw.create_mesh("a:4,b:2")
    rows = jax.ShapeDtypeStruct((16, 8), "float32")
    for axes in (("a",), ("a", "b")):
        split = jax.shard_map(
            lambda x, w: x @ w, mesh=mesh, in_specs=(P(axes), P()), out_specs=P(axes), axis_names=set(axes)
        )
        assert count_flops(jax.jit(split), rows, W).matmul == 2 * 16 * 8 * 8
    copied = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    assert count_flops(jax.jit(copied), rows, W).matmul == 8 * 2 * 16 * 8 * 8  # each device computes all of it


def test_loops_within_loops():
    def inner(h, _):
        return h @ W, None

    def outer(h, _):
        return lax.scan(inner, h, length=3)[0], None

    assert count_flops(lambda h: lax.scan(outer, h, length=5)[0], W).matmul == 15 * 2 * 8**3
    assert count_flops(lambda h: lax.fori_loop(0, 7, lambda _, h: h @ W, h), W).matmul == 7 * 2 * 8**3


def test_loops_of_unknown_length_are_counted_once_and_noted():
    found = count_flops(lambda h: lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h @ W, h), W)
    assert found.matmul == 2 * 8**3
    assert found.notes == ("a `while` loop of unknown length is counted once",)


def test_a_cond_counts_as_its_largest_branch():
    found = count_flops(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ W @ W, lambda x: x @ W, x), W)
    assert found.matmul == 2 * 2 * 8**3
    assert found.notes == ("only the branch of a `cond` with the most matmuls is counted",)


def test_custom_kernels_are_noted_but_not_counted():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] @ x_ref[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32), interpret=True, name="square")
    found = count_flops(lambda x: call(x) + call(x), W)
    assert found.matmul == 0
    (note,) = found.notes
    assert "square` is not counted" in note
    assert note.endswith("(2 times)")


def test_attention_of_cudnn_does_half_the_work_under_a_causal_mask(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    b, s, heads, dim = 2, 64, 4, 16
    q = jax.ShapeDtypeStruct((b, s, heads, dim), "bfloat16")

    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn") ** 2)

    one = 2 * b * heads * s * s * dim // 2
    found = count_flops(jax.value_and_grad(loss, (0, 1, 2)), q, q, q)
    assert (found.model, found.recomputed, found.attention) == ((2 + 4) * one, one, 7 * one)
    assert count_flops(loss, q, q, q).matmul == 2 * one
    again = count_flops(jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)), q, q, q)
    assert (again.model, again.recomputed, again.notes) == (found.model, 3 * one, ())


def test_a_traced_program():
    traced = jax.jit(lambda x: x @ x).trace(W)
    assert count_jaxpr(traced.jaxpr).matmul == 2 * 8**3
