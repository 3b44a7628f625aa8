"""The loop over ticks as libtpu compiles it: sums in place, and memory that does not grow with microbatches."""

import json

import pytest

from meshwright.plan.compiled.topology import can_compile_for

ROWS = 64
"""Rows of a microbatch, which take 64 KiB."""

CODE = """
import json, re, sys
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel import local_map, make_schedule, pipeline_loss
from meshwright.plan.compiled.topology import mesh_on_target

ROWS = int(sys.argv[2])
SUMS = re.compile(r"= f32\\[(?:1,2|2,1),256,256[]]\\S* copy[(]")

def run_layers(layers, h):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0]

def compiled(mesh, name, num_microbatches, remat):
    def loss(layers, x):
        schedule, last = make_schedule(name, 4, num_microbatches), lambda _, h: (h.sum(), {})
        widen = lambda _, x: jnp.broadcast_to(x, (ROWS, 256))
        run = dict(axis="pp", schedule=schedule, first=widen, last=last, remat=remat)
        return lax.psum(pipeline_loss(run_layers, layers, x, **run)[0], "pp")

    step = jax.jit(jax.grad(local_map(loss, mesh=mesh, in_specs=(P("pp"), P()), out_specs=P())))
    shapes = (((8, 256, 256), P("pp")), ((ROWS * num_microbatches, 1), P()))
    arrays = [jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec)) for size, spec in shapes]
    return step.lower(*arrays).compile()

mesh, found = mesh_on_target("v5p:2x2x1", "pp:4"), {}
for name, remat in (("1f1b", True), ("zb-v", False)):
    few, many = (compiled(mesh, name, count, remat) for count in (8, 32))
    inner = few.as_text().split("ENTRY ")[0]
    fewer, more = (one.memory_analysis().temp_size_in_bytes for one in (few, many))
    found[name] = {"copies": len(SUMS.findall(inner)), "loops": inner.count(" conditional("), "grown": more - fewer}
json.dump(found, open(sys.argv[1], "w"))
"""


def test_sums_are_in_place_and_memory_does_not_grow(run_compiler, tmp_path):
    """A copy of the weight gradients in each tick would take longer than a small stage."""
    if not can_compile_for("v5p:2x2x1"):
        pytest.skip("libtpu is not installed")
    done = run_compiler(CODE, str(tmp_path / "found.json"), str(ROWS))
    assert done.returncode == 0, done.stderr
    for found in json.loads((tmp_path / "found.json").read_text()).values():
        assert found["loops"] >= 1
        assert found["copies"] == 0
        assert found["grown"] < ROWS * 256 * 4  # GPipe keeps that for each of 24 more microbatches
