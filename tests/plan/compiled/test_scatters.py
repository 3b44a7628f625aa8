"""Which scatters of gradients libtpu compiles to all-reduces, as arithmetic assumes; the step's form avoids them."""

import json
import sys

import pytest

from meshwright.plan.compiled.topology import can_compile_for
from meshwright.plan.costs.communication import sums_whole_slices
from meshwright.plan.target import parse_target

# The last number is a dim: layers stacked along dim 0, as `sync="once"` scatters them.
CASES = [
    ("v5e:2x4", "fsdp:8", [4, 256, 512], 1),
    ("v5e:2x4", "dp:2,fsdp:4", [4, 256, 512], 1),
    ("v5e:4x4", "fsdp:16", [256, 512], 0),
    ("v5e:4x8", "fsdp:32", [256, 512], 0),
    ("v5p:2x2x2", "fsdp:8", [4, 1024, 2816], 1),
    ("v5p:2x2x2", "fsdp:8", [4, 2816, 1024], 2),
    ("v5p:2x2x2", "dp:2,fsdp:4", [4, 1024, 2816], 1),
]
CODE = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel.fsdp import gather_array
from meshwright.parallel.overlap.forms import overlap_options
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import mesh_on_target

found = []
for target, text, shape, dim in json.loads(sys.argv[1]):
    mesh = mesh_on_target(target, text)
    spec = P(*("fsdp" if place == dim else None for place in range(len(shape))))

    def gradient(x, weight):
        return jax.grad(lambda x: (gather_array(x, dim=dim, axis="fsdp") * weight[0]).sum())(x)

    run = jax.shard_map(gradient, mesh=mesh, in_specs=(spec, P(mesh.axis_names)), out_specs=spec, check_vma=False)
    x, weight = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in ((shape, spec), ((mesh.size, *shape), P(mesh.axis_names)))
    )
    made = jax.jit(run, compiler_options=overlap_options(mesh)).lower(x, weight).compile()
    found.append(read_schedule(made.as_text()).wire_bytes)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists only for Linux")
def test_scatters_that_become_all_reduces(run_compiler):
    if not can_compile_for("v5e:2x4"):
        pytest.skip("libtpu is not installed")
    done = run_compiler(CODE, json.dumps(CASES), timeout=600)
    assert done.returncode == 0, done.stderr
    for (target, mesh, shape, _), sent in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        ways = int(mesh.rpartition(":")[2])
        size = 4 * (ways - 1) / ways
        for dim in shape:
            size *= dim
        machine = parse_target(target)
        whole = machine.kind == "v5e" and ways == machine.num_devices and sums_whole_slices(machine)
        # The compiler sends a few rows to neighbors as well.
        assert sent == pytest.approx((1 + whole) * size, rel=0.08), (target, mesh, shape)
