"""Pallas kernels do not change a model's loss or gradients."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import MeshwrightWarning
from meshwright.models import XLSTM, Decoder, Execution, layer_context
from meshwright.parallel.kernels import copy_kernels, gradient_kernels, head_norm_kernel
from meshwright.parallel.kernels import dispatch as kernels
from meshwright.train import language_job
from meshwright.train.gradients import make_gradients
from meshwright.train.state import init_state, state_layout

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 128, "num_heads": 4, "d_ff": 64}
MODELS = {"decoder": Decoder(**SIZES), "xlstm": XLSTM(**SIZES, chunk_size=8)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Lets kernels take small vocabularies and the weights of few layers; traces with stand-ins are not reused."""
    monkeypatch.setattr(gradient_kernels, "_LANES", 16)
    monkeypatch.setattr(copy_kernels, "_FEW", 1)
    gradient_kernels._norm_gradient.clear_cache()
    yield
    gradient_kernels._norm_gradient.clear_cache()


def loss_and_gradients(model, mesh, wanted):
    import optax

    job = language_job(model, batch_size=4, num_tokens=16, run=Execution(kernels=wanted, layers="unroll"), z_loss=1e-3)
    layout = state_layout(job, optax.sgd(0.1), mesh)
    params = init_state(job, optax.sgd(0.1), layout, jax.random.key(0)).params
    gradients = make_gradients(job, layout, view="local")

    def run(params, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return gradients(params, batch, None)[0]

    found = jax.jit(run)(params, job.make_batch(0))
    return jax.tree.map(np.asarray, {"loss": found.loss, "grads": found.grads, "metrics": found.metrics})


def assert_same(found, exact):
    for (path, got), true in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(exact), strict=True):
        assert np.abs(got - true).max() <= 3e-6 * max(np.abs(true).max(), 1e-6), path


def counting(used, call):
    def counted(*args, name, **options):
        used.append(name)
        return call(*args, name=name, **options)

    return counted


@pytest.mark.parametrize("name", ["decoder", "xlstm"])
def test_kernels_do_not_change_loss_or_gradients(name, monkeypatch):
    used = []
    for module in (copy_kernels, gradient_kernels, head_norm_kernel):
        monkeypatch.setattr(module, "call_kernel", counting(used, kernels.call_kernel))
    mesh = mw.create_mesh("dp:1", devices=1)
    # The mLSTM's kernels need larger chunks and heads, and say so.
    falls_back = pytest.warns(MeshwrightWarning, match="kernels=True, but XLA's form runs: chunk_size is 8")
    with falls_back if name == "xlstm" else contextlib.nullcontext():
        found = loss_and_gradients(MODELS[name], mesh, True)
    of_heads = {"gated_head_norm", "gated_head_norm_gradient"} if name == "xlstm" else set()
    assert set(used) == {"residual_norm_gradient", "softmax_gradient", "stack"} | of_heads
    assert_same(found, loss_and_gradients(MODELS[name], mesh, False))


def in_plain_jax(used, kernel, *args, name, outs, **_):
    """Computes the kernels' results, because JAX cannot interpret kernels on several devices."""
    used.append(name)
    if name == "stack":
        return [jnp.stack(args)]
    if name == "softmax_gradient":
        logits, targets, factors, _ = args
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        hit = targets[:, None] == jnp.arange(logits.shape[1])
        of_softmax = factors * (1 + 2 * 1e-3 * log_sum)
        d_logits = of_softmax[:, None] * jnp.exp(logits - log_sum[:, None]) - hit * factors[:, None]
        return [d_logits, log_sum, (logits * hit).sum(axis=1), logits.argmax(axis=1)]
    h, d_kept, d_normed, inverse, scale = args
    unit, d_unit = h * inverse[:, None], d_normed * scale
    d_h = (d_unit - unit * (d_unit * unit).mean(axis=1, keepdims=True)) * inverse[:, None] + d_kept
    return [d_h, (d_normed * unit).sum(axis=0, keepdims=True)]


@pytest.mark.parametrize(("text", "names"), [("dp:2", 3), ("dp:2,tp:2", 2)])
def test_kernels_get_local_arrays_on_meshes(text, names, monkeypatch):
    used, mesh = [], mw.create_mesh(text, devices=4 if "tp" in text else 2)
    exact = loss_and_gradients(MODELS["decoder"], mesh, False)
    monkeypatch.setattr(kernels, "chip_family", lambda mesh: "gpu")
    monkeypatch.setattr(kernels, "is_hopper", lambda mesh: True)
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 11)))
    for module in (copy_kernels, gradient_kernels):
        monkeypatch.setattr(module, "call_kernel", functools.partial(in_plain_jax, used))
    assert_same(loss_and_gradients(MODELS["decoder"], mesh, None), exact)
    # With a split vocabulary, each device has a part of each row of logits, so the loss uses XLA.
    assert len(set(used)) == names


@pytest.mark.parametrize("wanted", [None, False])
def test_overlapped_matmuls_get_the_kernels_option(wanted, monkeypatch):
    """Each layer has two gathering matmuls, for attention and the MLP, and two scattering ones."""
    passed = []
    for name in ("fused_column_dense", "row_dense"):
        call = getattr(layer_context, name)
        monkeypatch.setattr(
            layer_context, name, lambda *args, call=call, **options: passed.append(options) or call(*args, **options)
        )
    model, tokens = MODELS["decoder"], jnp.zeros((2, 16), jnp.int32)
    with jax.set_mesh(mw.create_mesh("tp:2", devices=2)):
        params = jax.eval_shape(model.init, jax.random.key(0))
        jax.eval_shape(functools.partial(model.apply, run=Execution(kernels=wanted, layers="unroll")), params, tokens)
    assert [options["kernels"] for options in passed] == [wanted] * 4 * SIZES["num_layers"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_segments": 0}, r"max_segments must be a whole number of at least 1; got 0.\nhint: pass None"),
        ({"max_segments": "4"}, r"max_segments must be a whole number of at least 1; got '4'"),
        ({"num_microbatches": 2.5}, r"num_microbatches must be a whole number of at least 1; got 2.5"),
        ({"kernels": "yes"}, r"kernels is 'yes'.\nhint: use True, False, or None"),
        ({"attention": "flash"}, r"attention has no implementation 'flash'.\nhint: use xla, cudnn, splash or None"),
    ],
)
def test_invalid_options_are_rejected_at_once(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        Execution(**options)


def test_one_data_axis_may_be_a_string():
    assert Execution(data_axes="dp") == Execution(data_axes=("dp",))
