"""The training loss of each source of a mixture: sums by row inside the step, on every mesh."""

import functools

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.loop.fit import _by_source
from meshwright.models import Decoder
from meshwright.train import init_state, language_job, make_train_step, state_layout

MODEL = Decoder(vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=64)
JOB = language_job(MODEL, batch_size=16, num_tokens=8, packed=True, num_sources=3)


@functools.cache
def batch():
    batch = JOB.make_batch(1)
    batch["sources"][:] = False
    batch["sources"][np.arange(16), [0, 2] * 8] = True  # no row of source 1
    return batch


def trained(mesh, batch, **options):
    layout = state_layout(JOB, optax.sgd(0.1), mw.create_mesh(mesh, devices=8 if mesh != "dp:1" else 1))
    state = init_state(JOB, optax.sgd(0.1), layout, jax.random.key(0))
    step = make_train_step(JOB, optax.sgd(0.1), layout, donate=False, **options)
    return state, step, jax.device_get(step(state, batch)[1])


@functools.cache
def by_hand():
    """Sums over the tokens of each row in float64, from the logits of the model."""
    params = trained("dp:1", batch())[0].params
    rows = batch()
    logits = np.asarray(MODEL.apply(params, rows["inputs"], segment_ids=rows["segment_ids"]), np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(logs, rows["targets"][..., None], axis=-1)[..., 0] * rows["weights"]
    return np.stack([losses.sum(1) @ rows["sources"], rows["weights"].sum(1) @ rows["sources"]])


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp:1", {}),
        ("dp:2,fsdp:2,tp:2", {"view": "local", "num_minibatches": 2}),
        pytest.param("dp:4,tp:2", {"view": "global"}, marks=pytest.mark.slow),
        ("pp:2,dp:2,tp:2", {}),
    ],
)
def test_the_loss_of_each_source_is_that_of_its_rows(mesh, options):
    _, _, metrics = trained(mesh, batch(), **options)
    found, wanted = metrics["by_source"], by_hand()
    assert found[0, 1] == found[1, 1] == 0
    np.testing.assert_array_equal(found[1], wanted[1])
    # Float32 logits of 32 products, and sums of some 60 losses of about 4.
    np.testing.assert_allclose(found[0], wanted[0], rtol=64 * np.finfo(np.float32).eps)
    np.testing.assert_allclose(found[0].sum() / found[1].sum(), metrics["loss"], rtol=1e-6)


@pytest.mark.slow
def test_the_sums_need_no_collective_of_their_own():
    counts = []
    for name in ("sources", "none"):
        given = {key: value for key, value in batch().items() if key != "sources" or name == "sources"}
        layout = state_layout(JOB, optax.sgd(0.1), mw.create_mesh("dp:4,fsdp:2"))
        text = make_train_step(JOB, optax.sgd(0.1), layout, view="local").compile(given).as_text()
        counts.append([text.count(f" {kind}(") for kind in ("all-reduce", "all-gather", "reduce-scatter")])
    assert counts[0] == counts[1]


def test_the_log_has_the_loss_of_sources_with_tokens():
    found = _by_source([[6.0, 0.0], [3.0, 0.0]], {"code": 3, "web": 0})
    assert found == {"tokens/code": 3, "tokens/web": 0, "loss/code": 2.0}
    assert _by_source(None, {"code": 3}) == {"tokens/code": 3}
    assert _by_source(None, None) == {}
