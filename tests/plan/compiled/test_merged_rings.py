"""Rings whose matmuls were merged: in a stored program for H200s, and compiled if the compiler is installed."""

from pathlib import Path

import pytest

from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import can_compile_for
from meshwright.plan.compiled.verdict import judge

TEXTS = Path(__file__).parent / "texts"
PROGRAM = TEXTS / "h200_ring_without_barrier.txt"
MERGED = "8 matmuls of its ring were merged into one, so none is left to overlap with"


def check_merged(schedule):
    verdicts = judge(schedule, "h200:1x8", "tp:8")
    assert [one.kind for one in schedule.collectives] == ["collective-permute"] * 7
    assert {one.merged for one in schedule.collectives} == {8}
    assert {verdict.state for verdict in verdicts} == {"exposed"}
    assert all(MERGED in verdict.why and "optimization_barrier" in verdict.why for verdict in verdicts)
    waits = [one for one, verdict in zip(schedule.collectives, verdicts, strict=True) if "synchronous" in verdict.why]
    assert waits == [one for one in schedule.collectives if not one.is_async]
    assert len(waits) >= 6


def test_the_ring_without_a_barrier_is_merged_and_synchronous():
    schedule = read_schedule(PROGRAM.read_text())
    check_merged(schedule)
    assert schedule.num_matmuls == 1
    assert {one.serves for one in schedule.collectives} == {"x"}


def test_a_ring_of_partial_sums_is_merged_into_a_matmul_before_it():
    schedule = read_schedule((TEXTS / "h200_scatter_ring_without_barrier.txt").read_text())
    check_merged(schedule)


def test_a_concatenation_by_the_user_is_not_merged():
    text = PROGRAM.read_text().replace(
        'dimensions={0}, metadata={op_name="w"}', 'metadata={op_name="jit(f)/concatenate"}'
    )
    assert text != PROGRAM.read_text()
    assert {one.merged for one in read_schedule(text).collectives} == {0}


def test_shards_without_a_matmul_are_not_merged():
    text = PROGRAM.read_text().replace(" dot(%parameter_0, %parameter_1)", " add(%parameter_0, %parameter_1)")
    assert {one.merged for one in read_schedule(text).collectives} == {0}


def test_a_compiled_ring_without_a_barrier_is_merged(run_compiler, tmp_path):
    if not can_compile_for("h200:1x8"):
        pytest.skip("the compiler for h200 is not installed")
    done = run_compiler(
        """
        import sys, jax, jax.numpy as jnp
        from jax import lax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from meshwright.plan.compiled.topology import mesh_on_target

        def ring(x, w):
            place, num_rows = lax.axis_index("tp"), x.shape[0]
            out = lax.pcast(jnp.zeros((num_rows * 8, w.shape[1]), x.dtype), "tp", to="varying")
            for hop in range(8):
                arriving = lax.ppermute(x, "tp", [(j, (j - 1) % 8) for j in range(8)]) if hop < 7 else None
                out = lax.dynamic_update_slice_in_dim(out, x @ w, ((place + hop) % 8) * num_rows, 0)
                x = arriving
            return out

        mesh, specs = mesh_on_target("h200:1x8", "tp:8"), (P("tp"), P(None, "tp"))
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(((2048, 1024), (1024, 4096)), specs)
        ]
        mapped = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=specs, out_specs=P(None, "tp")))
        open(sys.argv[1], "w").write(mapped.lower(*shapes).compile().as_text())
        """,
        str(tmp_path / "program.txt"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    check_merged(read_schedule((tmp_path / "program.txt").read_text()))
