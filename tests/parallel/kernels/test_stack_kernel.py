import jax
import jax.numpy as jnp
import pytest

from meshwright.parallel.kernels import stack_kernel
from meshwright.parallel.kernels.stack_kernel import stack


def arrays(count, shape, dtype):
    return [jax.random.normal(jax.random.key(seed), shape).astype(dtype) for seed in range(count)]


@pytest.mark.parametrize(
    ("count", "shape", "dtype"),
    [(5, (32, 64), jnp.bfloat16), (6, (1024, 3), jnp.float32), (9, (16, 1024), jnp.float32)],
)
def test_the_kernel_stacks_to_the_bit(count, shape, dtype, monkeypatch):
    given, used = arrays(count, shape, dtype), []
    call = stack_kernel.call_kernel
    monkeypatch.setattr(stack_kernel, "call_kernel", lambda *args, **kw: used.append(kw["grid"]) or call(*args, **kw))
    stacked = jax.jit(lambda given: stack(given, kernels=True))(given)
    assert stacked.dtype == dtype
    assert stacked.shape == (count, *shape)
    assert (stacked == jnp.stack(given)).all()
    (grid,) = used
    assert grid[1] == count


@pytest.mark.parametrize(("count", "shape"), [(4, (64, 64)), (8, (30, 7))])
def test_few_arrays_and_odd_sizes_are_left_to_xla(count, shape, monkeypatch):
    monkeypatch.setattr(stack_kernel, "call_kernel", None)
    given = arrays(count, shape, jnp.float32)
    assert (stack(given, kernels=True) == jnp.stack(given)).all()
