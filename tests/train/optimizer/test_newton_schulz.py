"""All forms of the Newton-Schulz iterations compute the polynomials of the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.hardware.flops import count_flops
from meshwright.train.optimizer import newton_schulz as module
from meshwright.train.optimizer.newton_schulz import COEFFICIENTS, newton_schulz, sums_of_squares

OTHER = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (2.8769, -3.1427, 1.2046))


def matrices(rows, columns):
    """Two matrices with singular values 1, 1/2, 1/3 and so on."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((2, size, rows)))[0] for size in (rows, columns))
    return left / np.arange(1, rows + 1) @ right.transpose(0, 2, 1)


def by_definition(x, coefficients):
    """The iterations in float64."""
    x = x / np.linalg.norm(x, axis=(1, 2), keepdims=True)
    for a, b, c in coefficients:
        gram = x @ x.transpose(0, 2, 1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("columns", [32, 88], ids=["square", "wide"])
@pytest.mark.parametrize("coefficients", [(COEFFICIENTS,), OTHER], ids=["published", "one each"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_iterations_are_those_of_the_definition(columns, coefficients, dtype):
    x = matrices(32, columns)
    five = [coefficients[min(i, len(coefficients) - 1)] for i in range(5)]
    expected = by_definition(x, five)
    found = newton_schulz(jnp.asarray(x, dtype), num_iterations=5, coefficients=coefficients)
    assert found.dtype == dtype
    apart = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    # Small singular values and their rounding errors grow by `a` in an iteration; Gram matrices of float16 by a^2.
    grows = float(np.prod([a for a, _, _ in five])) / 32
    assert apart < grows * float(jnp.finfo(dtype).eps)


def test_transposed_results_and_known_norms():
    x = jnp.asarray(matrices(8, 16), jnp.float32)
    turned = newton_schulz(x, squares=sums_of_squares(x), turned=True)
    np.testing.assert_allclose(jnp.swapaxes(turned, 1, 2), newton_schulz(x), rtol=1e-5, atol=1e-6)


def test_wide_float16_matrices_iterate_by_their_gram_matrices():
    """Two large products in each of five iterations become four in all, of three and two iterations."""
    shapes = [jax.ShapeDtypeStruct((1, 64, 192), dtype) for dtype in ("bfloat16", "float16")]
    plain, wide = (count_flops(lambda x: newton_schulz(x), shape).matmul for shape in shapes)
    four = count_flops(lambda x: newton_schulz(x, num_iterations=4), shapes[1]).matmul
    unit = 2 * 64**3
    assert plain == 5 * (3 + 1 + 3) * unit
    assert wide == (4 * 3 + 9 + 5) * unit
    assert four == (2 * 3 + 13) * unit


def test_matrices_of_bfloat16_iterate_in_float16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(module, "chip_family", lambda mesh: "gpu")
    x = jax.ShapeDtypeStruct((1, 64, 64), jnp.bfloat16)
    text = str(jax.make_jaxpr(newton_schulz)(x))
    assert text.count("f16[1,64,64] = dot_general") - text.count("bf16[1,64,64] = dot_general") == 15
    assert jax.eval_shape(newton_schulz, x).dtype == jnp.bfloat16


def test_symmetric_products_go_to_the_kernel_where_it_runs(monkeypatch):
    """Of the 19 products of five iterations on wide matrices, all but the last of each round are symmetric."""
    calls = []

    def product(a, b, *, scale, diagonal):
        calls.append(a.shape)
        return scale * jnp.einsum("Nmk,Nnk->Nmn", a, b) + diagonal * jnp.eye(a.shape[1], dtype=a.dtype)

    x = jnp.asarray(matrices(32, 128), "float16")
    expected = newton_schulz(x)
    monkeypatch.setattr(module, "can_mirror", lambda *args, **options: True)
    monkeypatch.setattr(module, "symmetric_product", product)
    np.testing.assert_allclose(newton_schulz(x), expected, atol=5e-3)
    assert calls.count((2, 32, 128)) == 2
    assert calls.count((2, 32, 32)) == 14
