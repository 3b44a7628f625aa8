"""Decoder and xLSTM on every kind of mesh and in both views match one device: parameters, loss and gradients."""

import numpy as np
import pytest

from meshwright.models import XLSTM, Decoder
from meshwright.train import language_job
from meshwright.verify import verify

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
MODELS = {
    # All devices of a tensor axis share one key/value head.
    "decoder": Decoder(**SIZES, num_kv_heads=1, head_dim=8, dropout=0.1, qk_norm=True),
    "xlstm": XLSTM(**SIZES, dropout=0.1, chunk_size=8, logit_soft_cap=30.0),
}
# Axes of size 1 are left to XLA, also with a pipeline. Pipelines come last, because they disable the compilation cache.
MESHES = ["dp:8", "fsdp:8", "tp:8", "dp:2,fsdp:2,tp:2", "pp:2,tp:2,dp:2"]
ONE_DEVICE_AXES = {"decoder": ["pp:2,dp:4,tp:1"], "xlstm": []}
CUT_MESHES = {"decoder": ["fsdp:4,tp:2", "dp:1,fsdp:4,tp:2"], "xlstm": ["fsdp:4,tp:2"]}


def batch(seed=0):
    """Random tokens in documents of different lengths, some of them with weight 0."""
    rng = np.random.default_rng(seed)
    made = {name: rng.integers(0, 64, (16, 16)).astype(np.int32) for name in ("inputs", "targets")}
    starts = rng.random((16, 16)) < 0.15
    segments = 1 + np.cumsum(starts, axis=1).astype(np.int32)
    return made | {"segment_ids": segments, "weights": (rng.random((16, 16)) < 0.7).astype(np.float32)}


# One verify call for all meshes compiles the reference once.
@pytest.mark.slow  # two views of five or six programs
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_on_every_mesh(name):
    verify(make_job(name), meshes=[*MESHES, *ONE_DEVICE_AXES[name]], num_steps=2, batch=batch()).require()


@pytest.mark.slow  # two views of two programs
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_in_minibatches(name):
    verify(make_job(name), meshes=CUT_MESHES[name], num_minibatches=4, num_steps=2, batch=batch()).require()


def make_job(name):
    return language_job(MODELS[name], batch_size=16, num_tokens=16, z_loss=1e-3)
