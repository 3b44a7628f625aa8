"""Weights drawn by the names of their tensors, so that a test case stores only a configuration and some logits."""

import zlib

import numpy as np


def seeded_weights(shapes, *, norm_offset=False):
    """Returns a tensor for each name: norms near one (or zero), matrices that keep the variance, small biases."""
    weights = {}
    for name, shape in shapes.items():
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("norm.weight"):
            drawn = 0.2 * drawn + (0.0 if norm_offset else 1.0)
        elif name.endswith(".bias"):
            drawn *= 0.3
        elif "embed_tokens" in name:
            drawn *= 0.7
        else:
            drawn *= 1.3 / shape[-1] ** 0.5
        weights[name] = drawn.astype(np.float32)
    return weights
