"""Overlap of the matmuls in programs compiled for hardware that is not present.

Needs libtpu (the `tpu` extra; `dev.py test` installs it if available) or JAX's CUDA plugin. Each target compiles in its
own subprocess, because a compiler for other hardware may change the state of its process.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

from meshwright.plan.compiled.topology import can_compile_for

ROOT = Path(__file__).parents[3]

# Per target and operation: the largest accepted compute relative to the unsplit form, from results/overlap.md plus 2%.
# Only the libtpu release that estimated compute checks it; hops, bytes and memory are checked with any release.
RECORDED_LIBTPU = "0.0.42."
TPU_FORWARD = {
    "v5e:16x16": {"gather": 1.06, "scatter": 1.13},
    "v5p:4x4x8": {"gather": 1.05, "scatter": 1.05},
    "v6e:16x16": {"gather": 1.06, "scatter": 1.12},
}
TPU_GRADIENTS = {
    "v5p:4x4x8": {"gather grad": 1.05, "scatter grad": 1.03, "two blocks": 1.03},
    "v5e:16x16": {"gather grad": 1.15, "scatter grad": 1.09, "scan of 4": 1.13},
}
# Per target, shape and operation: exposed transfers. Parts expose one: a gather's first, a scatter's last. The gradient
# of a scatter is a ring.
GPU = {
    ("h200:1x8", (16384, 8192, 28672)): {"gather": 1, "scatter": 1, "scatter grad": 0},
    ("h200:1x8", (16384, 4096, 14336)): {"gather": 1, "scatter": 1, "scatter grad": 0},
}


def needs_compiler(target):
    if not can_compile_for(target):
        pytest.skip(f"the compiler for {target} is not installed")


def measured(run_compiler, target, operations, shape=(16384, 8192, 28672)):
    quoted = " ".join(f'"{name}"' for name in operations)
    sizes = " ".join(map(str, shape))
    code = (
        "import runpy, shlex, sys\n"
        f"sys.argv = ['overlap.py', '--json', '--targets', {target!r}, '--only', *shlex.split({quoted!r})]\n"
        f"sys.argv += ['--shape', *{sizes!r}.split()]\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'overlap.py')!r}, run_name='__main__')\n"
    )
    done = run_compiler(code, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    text = done.stdout[done.stdout.index("{") :]
    return {(row["operation"], row["form"]): row for row in json.loads(text)["rows"]}


def check(run_compiler, target, limits, *, less_memory=()):
    needs_compiler(target)
    rows = measured(run_compiler, target, limits)
    is_recorded = version("libtpu").startswith(RECORDED_LIBTPU)
    for operation, limit in limits.items():
        ours, unsplit = rows[operation, "ours"], rows[operation, "unsplit"]
        hidden, total = map(int, ours["hidden"].split("/"))
        assert hidden == total > 1, f"{target} {operation}: {hidden} of {total} hops hidden"
        assert ours["bytes"] <= 1.01, f"{target} {operation}: {ours['bytes']} times the least bytes"
        if limit is not None and is_recorded:
            assert ours["cycles"] <= limit, f"{target} {operation}: compute {ours['cycles']} over unsplit"
        if operation in less_memory:
            assert ours["temp_mib"] < unsplit["temp_mib"], f"{target} {operation}: {ours['temp_mib']} MiB"


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("target", TPU_FORWARD)
def test_forward_hides_every_hop_on_tpus(run_compiler, target):
    check(run_compiler, target, TPU_FORWARD[target], less_memory=("gather", "scatter"))


@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("target", TPU_GRADIENTS)
def test_gradients_hide_every_hop_on_tpus(run_compiler, target):
    """Blocks of a model need less memory than unsplit, because gathered rows are freed before the next ring."""
    check(run_compiler, target, TPU_GRADIENTS[target], less_memory=("two blocks", "scan of 4"))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "shape"), GPU, ids=str)
def test_gpus_hide_every_hop_of_a_ring_and_all_parts_but_one(run_compiler, target, shape):
    needs_compiler(target)
    exposed = GPU[target, shape]
    rows = measured(run_compiler, target, exposed, shape)
    for operation, most in exposed.items():
        ours, unsplit = rows[operation, "ours"], rows[operation, "unsplit"]
        hidden, total = map(int, ours["hidden"].split("/"))
        assert total - hidden == most < total / 3, f"{operation}: {hidden} of {total} transfers hidden"
        assert ours["bytes"] <= 1.01, f"{operation}: {ours['bytes']} times the least bytes"
        if not operation.endswith("grad"):
            assert ours["temp_mib"] < unsplit["temp_mib"], f"{operation}: {ours['temp_mib']} MiB"


TWO_WEIGHTS = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel import gather_matmul
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import target_mesh

mesh = target_mesh("h200:1x8", (8,), ("tp",))
specs = P("tp", None), P(None, "tp"), P(None, "tp")
shapes = (16384, 4096), (4096, 14336), (4096, 14336)
structs = [jax.ShapeDtypeStruct(a, jnp.bfloat16, sharding=NamedSharding(mesh, b)) for a, b in zip(shapes, specs)]
for form in (None, FORM):
    run = jax.shard_map(
        lambda x, *ws: gather_matmul(x, ws, axis="tp", form=form), mesh=mesh, in_specs=specs, out_specs=specs[1]
    )
    schedule = read_schedule(jax.jit(run).lower(*structs).compile().as_text())
    print(schedule.num_matmuls, schedule.num_hidden, schedule.count())
"""


@pytest.mark.slow
def test_weights_that_share_a_gather_stay_separate_on_gpus(run_compiler):
    """Concatenated, they would be copied for each piece. By width they use parts, so the ring is requested too."""
    needs_compiler("h200:1x8")
    ring = "from meshwright.parallel.overlap.forms import FORMS\nFORM = FORMS['gpu']['gather_matmul']\n"
    done = run_compiler(ring + TWO_WEIGHTS, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["6", "2", "3", "16", "7", "7"]  # two matmuls for each of 3 parts, of 8 shards


WRITTEN_IN_A_LOOP = """
import re
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel import gather_matmul, matmul_scatter
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import target_mesh
from meshwright.train.step_options import xla_options

mesh = target_mesh("h200:1x8", (8,), ("tp",))
rows, up, down = P(None, "tp", None), P(None, None, "tp"), P(None, "tp", None)
shapes, specs = ((4, 4096, 4096), (3, 4096, 28672), (3, 28672, 4096)), (rows, up, down)
structs = [jax.ShapeDtypeStruct(a, jnp.bfloat16, sharding=NamedSharding(mesh, b)) for a, b in zip(shapes, specs)]

@jax.checkpoint
def layer(h, weights):
    up, down = weights
    return h + matmul_scatter(jnp.tanh(gather_matmul(h, up, axis="tp")), down, axis="tp"), None

def loss(x, *weights):
    return lax.psum(jnp.sum(lax.scan(layer, x, weights)[0].astype(jnp.float32)), "tp")

run = jax.shard_map(jax.grad(loss, argnums=(0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
text = jax.jit(run).lower(*structs).compile(xla_options(mesh, None)).as_text()
written = re.findall(r"= bf16\\[16384,3584\\]\\S* custom-call\\(.*mosaic_gpu", text)
copied = re.findall(r"= bf16\\[(?:16384|4,4096),3584\\]\\S* (?:copy|concatenate)\\(", text)
print(len(written), len(copied))
"""


@pytest.mark.slow
def test_products_of_a_gather_are_written_once_and_not_copied_in_loops_on_gpus(run_compiler):
    """Four parts forward, and four when remat recomputes a layer."""
    needs_compiler("h200:1x8")
    if jax.__version_info__ < (0, 11):
        pytest.skip("kernels take Refs since jax 0.11")
    done = run_compiler(WRITTEN_IN_A_LOOP, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["8", "0"]


CUT_EARLY = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel import gather_matmul
from meshwright.plan.compiled.topology import target_mesh

mesh = target_mesh("h200:1x8", (8,), ("tp",))
specs = P("tp", None), P(None, "tp")
structs = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    for shape, spec in zip(((16384, 4096), (4096, 28672)), specs)
]
run = jax.shard_map(lambda x, w: gather_matmul(x, w, axis="tp"), mesh=mesh, in_specs=specs, out_specs=specs[1])
text = jax.jit(run).lower(*structs).compile().as_text()
entry = text[text.index("ENTRY") :]
first = entry[entry.index(" all-gather-start(") : entry.index(" all-gather-done(")]
print(first.count("calls=%wrapped_slice"), entry.count("calls=%wrapped_slice"))
"""


@pytest.mark.slow
def test_rows_are_cut_during_the_first_transfer_on_gpus(run_compiler):
    """It overlaps with no matmul; later, each cut would run between two matmuls. The first part is cut before it."""
    needs_compiler("h200:1x8")
    done = run_compiler(CUT_EARLY, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["3", "4"]
