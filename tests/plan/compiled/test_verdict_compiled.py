"""Verdicts on small programs compiled for TPUs.

A matmul waits for a gather before it, but not for the hops of a ring; a reduce-scatter over a slice becomes an
all-reduce; the options that verdicts suggest work.
"""

import functools
import json
import os
import subprocess
import sys

import pytest

from meshwright.plan.compiled.topology import can_compile_for

TARGETS = ["v5p:2x2x4", "v5e:4x4", "v6e:4x4"]
MESH = "tp:16"
OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"
# The options that verdicts suggest, with their forms.
GATHERS = {f"{OFFLOAD}{form}all_gather": "true" for form in ("", "2d_", "3d_")}
SCATTERS = {f"{OFFLOAD}{form}reduce_scatter": "true" for form in ("", "nd_")}
CODE = """
import functools, json, sys
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from meshwright.parallel import gather_matmul
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import mesh_on_target
from meshwright.plan.compiled.verdict import judge

target, mesh_string = sys.argv[1:3]
gathers, scatters = map(json.loads, sys.argv[3:])
ROWS, COLUMNS = P("tp"), P(None, "tp")

def naive(x, w):
    return lax.all_gather(x, "tp", axis=0, tiled=True) @ w

def scatter(x, w):
    return lax.psum_scatter(x @ w, "tp", scatter_dimension=0, tiled=True)

def beside(x, w):  # the gathered weight is not needed for the first matmul
    return jnp.tanh(x @ x.T) @ lax.all_gather(w, "tp", axis=0, tiled=True)

PROGRAMS = {
    "naive": (naive, (ROWS, COLUMNS), COLUMNS, ((4096, 512), (512, 655360)), None),
    "ours": (functools.partial(gather_matmul, axis="tp"), (ROWS, COLUMNS), COLUMNS, ((4096, 512), (512, 655360)), None),
    "scatter": (scatter, (COLUMNS, ROWS), ROWS, ((4096, 1024), (1024, 1024)), None),
    "scatter with the option": (scatter, (COLUMNS, ROWS), ROWS, ((4096, 1024), (1024, 1024)), scatters),
    "beside": (beside, (P(), ROWS), P(), ((1024, 1024), (1024, 1024)), None),
    "beside with the option": (beside, (P(), ROWS), P(), ((1024, 1024), (1024, 1024)), gathers),
}
found, mesh = {}, mesh_on_target(target, mesh_string)
for name, (f, specs, out, shapes, options) in PROGRAMS.items():
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))
    made = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    schedule = read_schedule(mapped.lower(*made).compile(options).as_text())
    verdicts = judge(schedule, target, mesh_string, options=options)
    found[name] = [
        {"kind": one.kind, "is_async": one.is_async, "serves": one.serves, "state": verdict.state,
         "share": verdict.share, "verdict": str(verdict)}
        for one, verdict in zip(schedule.collectives, verdicts)
    ]
print(json.dumps(found))
"""


@functools.cache
def programs(target):
    if sys.platform != "linux" or not can_compile_for(target):
        pytest.skip(f"the compiler for {target} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", CODE, target, MESH, json.dumps(GATHERS), json.dumps(SCATTERS)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("target", TARGETS)
def test_a_gather_before_its_matmul_is_exposed(target):
    (gather,) = programs(target)["naive"]
    assert (gather["kind"], gather["state"], gather["serves"]) == ("all-gather", "exposed", "x")
    assert "synchronous" in gather["verdict"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_ring_of_gather_matmul_is_hidden(target):
    hops = programs(target)["ours"]
    assert len(hops) >= 15
    assert {(hop["kind"], hop["state"], hop["serves"]) for hop in hops} == {("collective-permute", "hidden", "x")}


@pytest.mark.parametrize("target", TARGETS)
def test_a_scatter_over_a_slice_becomes_an_all_reduce_without_the_option(target):
    (scatter,) = programs(target)["scatter"]
    assert (scatter["kind"], scatter["state"]) == ("all-reduce", "exposed")
    assert "a reduce-scatter was compiled to an all-reduce, which sends twice the bytes" in scatter["verdict"]
    assert f"the option {OFFLOAD}reduce_scatter (with its nd_ form) keeps it a reduce-scatter" in scatter["verdict"]
    (kept,) = programs(target)["scatter with the option"]
    assert kept["kind"] == "reduce-scatter"


@pytest.mark.parametrize("target", ["v5p:2x2x4", "v6e:4x4"])
def test_the_suggested_option_makes_a_gather_asynchronous(target):
    (waits,) = programs(target)["beside"]
    chip = target.partition(":")[0]
    assert not waits["is_async"]
    assert f"synchronous, the default on {chip}; the option {OFFLOAD}all_gather" in waits["verdict"]
    (starts,) = programs(target)["beside with the option"]
    assert starts["is_async"]


def test_v5e_makes_a_gather_asynchronous_by_default():
    (gather,) = programs("v5e:4x4")["beside"]
    assert gather["is_async"]
    assert gather["share"] > 0
