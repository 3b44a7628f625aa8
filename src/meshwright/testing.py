"""Assertions for the tests of a project that uses Meshwright.

def test_my_job_is_the_same_on_every_mesh():
    assert_same_function(job, meshes=["dp:8", "fsdp:4,tp:2"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.verify.equivalence import verify
from meshwright.verify.fuzz import fuzz

__all__ = ["assert_same_function"]


def assert_same_function(
    job: Any,
    meshes: str | Sequence[str] | None = None,
    *,
    num_fuzzed: int = 0,
    seconds: float | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Fails with the table and the likely cause if a job's step on a mesh differs from its step on one device.

    Call `meshwright.simulate_cpu_devices()` in `conftest.py`, before JAX starts, to have eight devices.

    Args:
        meshes: meshes to compare, as for `verify`.
        num_fuzzed: number of random cases to compare as well, as for `meshwright.verify.fuzz`.
        seconds: time limit of the random cases.
        seed: seed of the parameters, and of the random cases.
        options: other arguments of `verify`.

    Example:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> def loss(params, batch, rng):
        ...     return jnp.mean((batch["x"] @ params["w"] - 1) ** 2), {}
        >>> shape = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
        >>> job = mw.Job(init=lambda key: {"w": jnp.ones(8)}, rules=[("w", mw.P("fsdp"))], loss=loss, batch=shape)
        >>> assert_same_function(job, meshes="fsdp:8", views="global", num_steps=1)
    """
    __tracebackhide__ = True
    report = verify(job, meshes=meshes, seed=seed, **options)
    if not report.ok:
        raise AssertionError(f"the sharded step differs from the single-device step.\n{report}")
    if num_fuzzed:
        found = fuzz(job, num_fuzzed, seconds=seconds, seed=seed, batch=options.get("batch"))
        if not found.ok:
            raise AssertionError(f"fuzzing found a difference.\n{found}")
