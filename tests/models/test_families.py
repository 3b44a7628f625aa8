"""Decoders of published families compute one function on one device and in both views of a mesh."""

import jax
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.models import Decoder
from meshwright.models.rope import format_scaling, parse_scaling, scaled_rates
from meshwright.train import language_job, make_gradients, state_layout

from .families import FAMILIES, SIZES

MESH = "dp:2,fsdp:2,tp:2"
# Key/value heads that devices share, and a pipeline, whose stages must know the numbers of their layers.
OTHER_MESHES = {"olmo3": ["tp:4,dp:2"], "gemma3": ["pp:2,tp:2,dp:2"]}


def batch():
    """Random tokens in documents of different lengths, some of them with weight 0."""
    rng = np.random.default_rng(0)
    made = {name: rng.integers(0, 64, (8, 16)).astype(np.int32) for name in ("inputs", "targets")}
    segments = 1 + np.cumsum(rng.random((8, 16)) < 0.1, axis=1).astype(np.int32)
    return made | {"segment_ids": segments, "weights": (rng.random((8, 16)) < 0.7).astype(np.float32)}


def loss_and_grads(job, params, mesh, view):
    layout = state_layout(job, optax.sgd(0.1), mw.create_mesh(mesh, devices=1 if mesh == "dp:1" else None))
    with jax.set_mesh(layout.mesh):
        found, _ = jax.jit(make_gradients(job, layout, view=view))(params, batch(), None)
    return found.loss, found.grads


@pytest.mark.slow  # three programs for each family
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_the_same_on_a_mesh(name):
    job = language_job(FAMILIES[name], batch_size=8, num_tokens=16)
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)),
        jax.jit(job.init)(jax.random.key(0)),
    )
    loss, grads = loss_and_grads(job, params, "dp:1", "global")
    cases = [(MESH, "local"), (MESH, "global"), *((mesh, "local") for mesh in OTHER_MESHES.get(name, []))]
    for case in cases:
        other_loss, other_grads = loss_and_grads(job, params, *case)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-5, err_msg=str(case))
        for (path, ours), theirs in zip(
            jax.tree_util.tree_leaves_with_path(other_grads), jax.tree.leaves(grads), strict=True
        ):
            theirs = np.asarray(theirs)
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0, err_msg=f"{case} {path}")


def test_scalings_survive_their_text():
    values = {"short_factor": (1.0, 1.25), "long_factor": (2.0, 3.0), "original": 8.0, "attention_factor": 1.1}
    assert parse_scaling(format_scaling("longrope", values)) == ("longrope", values)


def test_a_single_pair_of_features_has_no_rate_to_scale():
    rates, factor = scaled_rates("dynamic:factor=2,original=8", dim=2, theta=100.0, num_tokens=32)
    assert (rates.tolist(), factor) == ([1.0], 1.0)


@pytest.mark.parametrize(("changes", "text"), [
    ({"rope_scaling": "liner:factor=2"}, "no kind 'liner'.\nhint: did you mean 'linear'"),
    ({"rope_scaling": "linear:factor=two"}, "'factor=two' is not NAME=NUMBER"),
    ({"rope_scaling": "linear:factors=2"}, "'linear' has no 'factors'"),
    ({"rope_scaling": "dynamic:factor=2"}, "lacks original"),
    ({"rope_scaling": "linear:factor=0"}, "factor is out of range"),
    ({"rope_scaling": "linear:factor=nan"}, "factor is out of range"),
    ({"rope_scaling": "llama3:factor=8,low_freq_factor=4,high_freq_factor=4,original=16"}, "must be above low_freq"),
    ({"query_scalar": 0.0}, "query_scalar of Decoder is 0.0"),
    ({"layer_pattern": "gx"}, "layer_pattern of Decoder is 'gx'"),
    ({"layer_pattern": "lg"}, "local layers need a window"),
    ({"sliding_window": 4, "layer_pattern": "g"}, "a window needs local layers"),
    ({"local_rope_theta": 1e4}, "no effect without local layers"),
    ({"whole_qk_norm": True}, "no effect without qk_norm"),
    ({"norms": "sandwich"}, "norms of Decoder is 'sandwich'.\nhint: use one of: pre, post, both"),
    ({"activation": "relu"}, "activation of Decoder is 'relu'"),
    ({"rotary_fraction": 0.7}, "of which 5 are rotated"),
])  # fmt: skip
def test_switches_that_make_no_model_are_rejected(changes, text):
    with pytest.raises(mw.MeshwrightError, match=text):
        Decoder(**SIZES, **changes)
