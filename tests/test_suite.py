"""The settings of conftest.py: fast compilation, and no compilation cache for pipelines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as cache_of_programs
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.parallel import pipeline


@pytest.mark.parametrize("order", ["once", "again"])
def test_pipelines_stay_out_of_the_compilation_cache(order):
    assert jax.config.jax_enable_compilation_cache  # on again in the next test

    def run(params, x):
        return pipeline(lambda w, h: h * w, params, x, axis="pp", num_microbatches=2, everywhere=True)

    mesh = mw.create_mesh("pp:2", devices=2)
    mapped = mw.parallel.local_map(run, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P())
    assert jax.jit(mapped)(jnp.array([2.0, 3.0]), jnp.ones((2, 1))).tolist() == [[6.0], [6.0]]
    assert not jax.config.jax_enable_compilation_cache


def test_programs_are_kept_in_memory_but_not_with_their_callbacks():
    programs = cache_of_programs.get_executable_and_time.__globals__["programs"]

    def run(number):
        return jax.jit(lambda x: jax.pure_callback(lambda x: np.float32(x + number), x, x))(jnp.float32(1))

    assert [float(run(number)) for number in (1, 2)] == [2, 3]
    before = set(programs)
    first, second = (np.asarray(jax.jit(lambda x: jnp.sin(x) * 7)(np.arange(3.0, dtype=np.float32))) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(set(programs) - before) == 1


@pytest.mark.parametrize(("platform", "level"), [("cpu", None), ("tpu", 3)])
def test_programs_for_other_hardware_are_optimized(platform, level, monkeypatch):
    found = []

    def note(lowered, options, **_):
        found.append(options)

    monkeypatch.setitem(jax.stages.Lowered.compile.__globals__, "_compile", note)
    lowered = jax.jit(jnp.sin).trace(1.0).lower(lowering_platforms=(platform,))
    lowered.compile()
    lowered.compile({"xla_dump_to": "x", "xla_backend_optimization_level": 1})
    assert [options.get("xla_backend_optimization_level") for options in found] == [level, 1]
    assert found[1]["xla_dump_to"] == "x"
    assert jax.config.read("jax_disable_most_optimizations")  # for all other programs
