"""The settings of conftest.py: fast compilation, and no compilation cache for pipelines."""

import jax
import jax.numpy as jnp
import pytest
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
