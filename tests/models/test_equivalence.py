"""Decoder and xLSTM on every kind of mesh, in both views: parameters, loss, every gradient, and steps of one device."""

import numpy as np
import pytest

from meshwright.models import XLSTM, Decoder
from meshwright.train import language_job
from meshwright.verify import verify

SIZES = {"vocab_size": 64, "num_layers": 2, "d_model": 32, "num_heads": 8, "d_ff": 64}
MODELS = {
    # All devices of a tensor axis share the one head of keys and values.
    "decoder": Decoder(**SIZES, num_kv_heads=1, head_dim=8, dropout=0.1, qk_norm=True),
    "xlstm": XLSTM(**SIZES, dropout=0.1, chunk_size=8, logit_soft_cap=30.0),
}
MESHES = {"dp:8": 1, "fsdp:8": 1, "tp:8": 1, "dp:2,fsdp:2,tp:2": 1, "fsdp:4,tp:2": (1, 4), "pp:2,tp:2,dp:2": 1}
# Axes of one device are left to XLA, also beside a pipeline.
MESHES |= {"pp:2,dp:4,tp:1": 1, "dp:1,fsdp:4,tp:2": 2}
# One mesh that has everything is part of every run; the others take minutes.
QUICK = {("decoder", "dp:2,fsdp:2,tp:2")}


def batch(seed=0):
    """Random tokens in documents of different lengths, of which some do not count."""
    rng = np.random.default_rng(seed)
    made = {name: rng.integers(0, 64, (16, 16)).astype(np.int32) for name in ("inputs", "targets")}
    starts = rng.random((16, 16)) < 0.15
    segments = 1 + np.cumsum(starts, axis=1).astype(np.int32)
    return made | {"segment_ids": segments, "weights": (rng.random((16, 16)) < 0.7).astype(np.float32)}


@pytest.mark.parametrize(("name", "mesh"), [
    pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow)
    for mesh in MESHES
    for name in MODELS
])  # fmt: skip
def test_a_model_is_the_same_on_every_mesh(name, mesh):
    job = language_job(MODELS[name], batch_size=16, num_tokens=16, z_loss=1e-3)
    verify(job, meshes=mesh, num_minibatches=MESHES[mesh], num_steps=2, batch=batch()).require()
