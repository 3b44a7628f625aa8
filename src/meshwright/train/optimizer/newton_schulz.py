"""Newton-Schulz iterations: matrices with the same singular vectors and singular values near 1, by matmuls alone.

One iteration is `X <- P X` with `P = a I + b G + c G G` and the Gram matrix `G = X X^T`. Three things make it cheap:

- With `S = G + b / 2c I`, `P = c S S + (a - b^2 / 4c) I`: both are a symmetric product and a multiple of the identity,
  which `symmetric_product` computes in one pass, and half of it, on Hopper GPUs.
- Wide matrices stay as they are while their Gram matrices iterate, `Q <- Q P`, `G <- P G P`, and are multiplied with Q
  once. This is less work from 1.5 times as many columns as rows. Rounding errors of G grow by up to a^2 in every
  iteration instead of a, so at most four iterations run on one Gram matrix (of five, three and two), and only in
  float16, which rounds to three bits more than bfloat16: errors stay below those of the plain form in bfloat16. (In
  float32, results would differ too much from the plain form's.)
- On GPUs, bfloat16 matrices become float16 after they are scaled: it costs the same, and the errors are an eighth.

Shapes: N matrices of a stack, m rows, n columns, m <= n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from meshwright.hardware.chips import chip_family
from meshwright.mesh.current import current_mesh
from meshwright.parallel.kernels.symmetric_kernel import can_mirror, symmetric_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of an iteration, as published with Muon: steep at zero."""
DION_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
)
"""a, b and c of four iterations, as published with Dion: steeper than Muon's at first, closer to 1 in the end."""
WIDE = 1.5  # columns per row from which iterating on the Gram matrix is less work
_TOGETHER = 4  # most iterations on one Gram matrix


def newton_schulz(
    x: Any,
    *,
    num_iterations: int = 5,
    coefficients: Sequence[Sequence[float]] = (COEFFICIENTS,),
    squares: Any = None,
    turned: bool = False,
) -> Any:
    """Returns stacked matrices `[N, m, n]`, m <= n, with singular values near 1.

    Args:
        coefficients: a, b and c of each iteration; the last are used again if there are more iterations.
        squares: the sum of squares of each matrix, `[N]`, if known.
        turned: return the matrices transposed, `[N, n, m]`.

    Example:
        >>> newton_schulz(jnp.eye(2)[None], num_iterations=5).shape
        (1, 2, 2)
    """
    given = x.dtype
    if squares is None:
        squares = sums_of_squares(x)
    x = x / (jnp.sqrt(squares)[..., None, None] + 1e-8)
    half = given == jnp.bfloat16 and chip_family(current_mesh()) == "gpu"
    x = x.astype(jnp.float16 if half else given)
    num_rows, num_columns = x.shape[-2:]
    rest = [tuple(coefficients[min(i, len(coefficients) - 1)]) for i in range(num_iterations)]
    most = _TOGETHER if x.dtype == jnp.float16 and num_columns >= WIDE * num_rows else 1
    mirror = can_mirror(num_rows, num_rows, x.dtype) and num_columns % 64 == 0
    while rest:
        together = min(len(rest), most) if len(rest) <= most else max(most - 1, 1)
        factor, rest = _polynomial(x, rest[:together], mirror), rest[together:]
        x = jnp.einsum("Nmk,Nkn->Nnm" if turned and not rest else "Nmk,Nkn->Nmn", factor, x)
    return x.astype(given)


def sums_of_squares(x: Any) -> Any:
    """Returns the sum of squares of each matrix, in float32, because squares of small bfloat16 numbers lose too much.

    Example:
        >>> sums_of_squares(jnp.ones((2, 3, 4))).tolist()
        [12.0, 12.0]
    """
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1))


def _polynomial(x: Any, coefficients: Sequence[tuple[float, ...]], mirror: bool) -> Any:
    """Returns the matrix `[N, m, m]` that multiplies x in some iterations."""
    total, pair = None, (x, x)  # the Gram matrix is the product of the pair
    for number, (a, b, c) in enumerate(coefficients):
        shift, rest = b / (2 * c), a - b * b / (4 * c)
        if number + 1 == len(coefficients):  # Nothing else needs the Gram matrix, so the shift is part of its product.
            shifted = _symmetric(*pair, mirror, diagonal=shift)
        else:
            gram = _symmetric(*pair, mirror)
            shifted = gram + shift * _identity(gram)
        factor = _symmetric(shifted, shifted, mirror, scale=c, diagonal=rest)
        total = factor if total is None else _symmetric(total, factor, mirror)
        if number + 1 < len(coefficients):
            pair = _symmetric(factor, gram, mirror), factor
    return total


def _symmetric(a: Any, b: Any, mirror: bool, *, scale: float = 1.0, diagonal: float = 0.0) -> Any:
    """Returns `scale * a b^T + diagonal * I`, which must be symmetric."""
    if mirror:
        return symmetric_product(a, b, scale=scale, diagonal=diagonal)
    found = jnp.einsum("Nmk,Nnk->Nmn", a, b)
    found = found * scale if scale != 1.0 else found
    return found + diagonal * _identity(found) if diagonal else found


def _identity(x: Any) -> Any:
    return jnp.eye(x.shape[-1], dtype=x.dtype)
