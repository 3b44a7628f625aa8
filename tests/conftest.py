"""Eight simulated CPU devices, also when this folder is run without the conftest.py above it, and what tests share."""

import contextlib
import os
import subprocess
import sys
import textwrap

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Derandomized, so that a run either always passes or always fails; no deadline, because compilation takes time.
hypothesis.settings.register_profile(
    "meshwright",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("meshwright")

_compilations: list[float] = []


def _listen(event, duration, **_):
    # Fires also when the program comes from the persistent cache: it counts programs, not work.
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations.append(duration)


jax.monitoring.register_event_duration_secs_listener(_listen)


@pytest.fixture(autouse=True)
def _pipelines_are_compiled_anew(request):
    """Keeps programs of pipelines out of the cache: read from there, XLA:CPU runs them in another order, and hangs."""
    if "pp:" not in request.node.name:
        yield
        return
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def count_programs():
    """A context manager whose value is a list that grows by one entry per program compiled inside."""

    @contextlib.contextmanager
    def counting():
        found, before = [], len(_compilations)
        try:
            yield found
        finally:
            found.extend(_compilations[before:])

    return counting


@pytest.fixture
def assert_placed():
    """Checks, shard by shard, that an array is split as a spec says and holds the given value."""

    def check(array, mesh, spec, value):
        value = np.asarray(value)
        assert array.shape == value.shape
        expected = NamedSharding(mesh, spec).devices_indices_map(value.shape)
        assert {shard.device for shard in array.addressable_shards} == set(expected)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[expected[shard.device]], strict=True)

    return check


@pytest.fixture
def run_python():
    """Runs a program in a fresh interpreter on the CPU; returns the finished process with its text output."""

    def run(code, *args, cwd=None, timeout=180, **env):
        return subprocess.run(
            [sys.executable, "-W", "error::UserWarning:meshwright", "-c", textwrap.dedent(code), *args],
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        )

    return run
