"""The denominator max(|n q|, exp(-m)) has a kink; 16-bit inputs must not move a token across it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.models import mlstm_chunkwise


@pytest.mark.parametrize("below", [True, False])
def test_the_size_is_compared_in_float32(below):
    """The second token reads |n q| = 0.99997 or 1.00003; with n rounded to bfloat16, it would be 1.0026 or 0.9977."""
    q = np.full((1, 2, 1, 16), 0.3359375)  # bfloat16 numbers
    if not below:
        q[..., -1] += 2**-9
    weight = (1 - 3e-5 if below else 1 + 3e-5) / (q[0, 0].sum() / 4)
    rounded = float(jnp.bfloat16(weight)) * q[0, 0].sum() / 4
    assert (rounded > 1.002) if below else (rounded < 0.998)
    rng = np.random.default_rng(0)
    v, d_h = (jnp.asarray(rng.standard_normal((1, 2, 1, 8)), jnp.bfloat16) for _ in range(2))
    q = jnp.asarray(q, jnp.bfloat16)
    k = jnp.ones((1, 2, 1, 16), jnp.bfloat16)
    i, f = jnp.array([[[np.log(weight)], [-30.0]]], jnp.float32), jnp.full((1, 2, 1), 30.0)

    def gradients(*inputs):
        h, pull = jax.vjp(functools.partial(mlstm_chunkwise, chunk_size=1, kernels=False), *inputs)
        return pull(d_h.astype(h.dtype))

    found = gradients(q, k, v, i, f)
    true = gradients(*(x.astype(jnp.float32) for x in (q, k, v)), i, f)
    for one, exact in zip(found, true, strict=True):
        # Values and their gradients are about 1; the wrong side is about 1 off.
        np.testing.assert_allclose(np.asarray(one, np.float32), exact, atol=2e-2)
