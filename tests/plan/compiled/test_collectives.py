# ruff: noqa: E501 (HLO lines are long)
"""`read_schedule` on compiled programs, and on the HLO forms of TPUs and GPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.hlo import partners

ASYNC = """HloModule m, is_scheduled=true

%fused (p: bf16[8,16], q: bf16[16,4]) -> bf16[8,4] {
  %p = bf16[8,16]{1,0} parameter(0)
  %q = bf16[16,4]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[8,4]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
}

%body (t: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %t = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%t), index=1
  %collective-permute-start.1 = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %fusion.7 = bf16[8,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"100"}
  %collective-permute-done.1 = bf16[8,16]{1,0} collective-permute-done(%collective-permute-start.1)
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %out = (s32[], bf16[8,16]{1,0}) tuple(%i, %collective-permute-done.1)
}

%condition (t.1: (s32[], bf16[8,16])) -> pred[] {
  %t.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %bound = s32[] constant(5)
  %count = s32[] get-tuple-element(%t.1), index=0
  ROOT %lt = pred[] compare(%count, %bound), direction=LT
}

%wrapped (w: f32[8]) -> f32[2] {
  %w = f32[8]{0} parameter(0)
  ROOT %reduce-scatter.2 = f32[2]{0} reduce-scatter(%w), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (a: bf16[8,16], b: f32[8]) -> bf16[8,16] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %async-start.1 = ((f32[8]{0}), f32[2]{0}, u32[]) async-start(%b), calls=%wrapped
  %async-done.1 = f32[2]{0} async-done(%async-start.1)
  %all-gather-start.3 = (bf16[8,16]{1,0}, bf16[16,16]{1,0}) all-gather-start(%a), replica_groups=mesh['dp'=2,'tp'=4] {'dp'}, dimensions={0}
  %gemm = bf16[8,4]{1,0} custom-call(%a), custom_call_target="__cublas$gemm"
  %all-gather-done.3 = bf16[16,16]{1,0} all-gather-done(%all-gather-start.3)
  %all-reduce.9 = f32[8]{0} all-reduce(%b), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  %init = (s32[], bf16[8,16]{1,0}) tuple(%zero, %a)
  %while.1 = (s32[], bf16[8,16]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %result = bf16[8,16]{1,0} get-tuple-element(%while.1), index=1
}
"""


def test_async_forms_loops_and_groups():
    schedule = read_schedule(ASYNC)
    scatter, gather, reduce, permute = schedule.collectives
    assert (scatter.kind, scatter.is_async, scatter.hidden, scatter.group_size) == ("reduce-scatter", True, False, 4)
    assert (scatter.bytes_moved, scatter.wire_bytes) == (32, 24)
    assert (gather.kind, gather.hidden, gather.group_size, gather.bytes_moved) == ("all-gather", True, 2, 512)
    assert (reduce.kind, reduce.is_async, reduce.wire_bytes) == ("all-reduce", False, 2 * 32 * 3 / 4)
    assert (permute.kind, permute.trips, permute.hidden, permute.wire_bytes) == ("collective-permute", 5, True, 256)
    assert (schedule.count(), schedule.count("collective-permute"), schedule.num_hidden) == (8, 5, 6)
    assert (schedule.num_matmuls, schedule.estimated_cycles) == (6, 500)


def test_an_instruction_may_span_several_lines():
    """Pallas kernels on TPUs have metadata with line breaks, which must not end their computation."""
    kernel = """  %kernel = (bf16[8,16]{1,0}) custom-call(%x), custom_call_target="tpu", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(step)/splash"}
"""
    before = "  %fusion.7 = "
    assert read_schedule(ASYNC.replace(before, kernel + before)) == read_schedule(ASYNC)


def test_the_compute_between_start_and_end():
    schedule = read_schedule(ASYNC)
    scatter, gather, reduce, permute = schedule.collectives
    one = 2 * 8 * 16 * 4
    assert (permute.matmuls_between, permute.flops_between, permute.cycles_between) == (1, one, 100)
    # The library call has only one operand here, so its FLOPs are unknown.
    assert (gather.matmuls_between, gather.flops_between) == (1, 0)
    assert scatter.flops_between == reduce.flops_between == 0
    assert [(s.in_flight, s.flops, s.cycles) for s in schedule.stretches] == [((1,), 0, 0), ((3,), one, 100)]
    # Only the matmul in the loop has a cycle estimate, and runs five times.
    assert (schedule.matmul_flops, schedule.matmul_cycles) == (5 * one, 500)


def test_compute_shared_by_several_collectives_is_one_stretch():
    second = """  %collective-permute-start.2 = (bf16[8,16]{1,0}, bf16[8,16]{1,0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %fusion.7 ="""
    done = """  %collective-permute-done.2 = bf16[8,16]{1,0} collective-permute-done(%collective-permute-start.2)
  %i ="""
    schedule = read_schedule(ASYNC.replace("  %fusion.7 =", second).replace("  %i =", done))
    assert schedule.stretches[-1].in_flight == (3, 4)
    assert [one.flops_between for one in schedule.collectives[3:]] == [2 * 8 * 16 * 4] * 2
    # Indices are renumbered for one axis.
    along = schedule.along("tp", {"fsdp": 4, "tp": 2})
    assert [(one.kind, one.trips) for one in along.collectives] == [("collective-permute", 5)] * 2
    assert [stretch.in_flight for stretch in along.stretches] == [(0, 1)]


def test_a_start_marked_as_synchronous():
    """GPU programs mark it in the backend config."""
    text = ASYNC.replace(
        "{'dp'}, dimensions={0}",
        """{'dp'}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}""",
    )
    gather = read_schedule(text).collectives[1]
    assert (gather.kind, gather.is_async, gather.matmuls_between, gather.hidden) == ("all-gather", False, 0, False)


def test_known_trip_counts_win():
    noted = ASYNC.replace("body=%body\n", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}\n')
    assert read_schedule(noted).count("collective-permute") == 3


@pytest.mark.parametrize(
    ("f", "out", "kind", "wire"),
    [
        (lambda x: lax.psum(x, "dp"), P(), "all-reduce", 2 * 64 * 7 / 8),
        (lambda x: lax.all_gather(x, "dp", tiled=True), P("dp"), "all-gather", 512 * 7 / 8),
        (lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), "dp", tiled=True), P("dp"), "reduce-scatter", 512 * 7 / 8),
        (lambda x: lax.ppermute(x, "dp", [(i, (i + 1) % 8) for i in range(8)]), P("dp"), "collective-permute", 64),
    ],
)
def test_bytes_of_compiled_programs(f, out, kind, wire):
    """Each device holds 4 rows of 4 floats: 64 bytes."""
    mapped = jax.jit(jax.shard_map(f, mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=out))
    schedule = read_schedule(mapped.lower(jnp.ones((32, 4))).compile().as_text())
    assert (schedule.count(), schedule.count(kind)) == (1, 1)
    assert schedule.wire_bytes == wire


def test_loops_of_compiled_programs_are_counted_with_their_trips():
    def f(x):
        return lax.scan(lambda c, _: (lax.ppermute(c, "dp", [(i, (i + 1) % 8) for i in range(8)]), None), x, length=6)[
            0
        ]

    mapped = jax.jit(jax.shard_map(f, mesh=mw.create_mesh("dp:8"), in_specs=P("dp"), out_specs=P("dp")))
    assert read_schedule(mapped.lower(jnp.ones((8, 4))).compile().as_text()).count("collective-permute") == 6


CHOICES = """HloModule m, is_scheduled=true

%yes (p: f32[8,16]) -> f32[8,8] {
  %p = f32[8,16]{1,0} parameter(0)
  %all-gather.1 = f32[16,16]{1,0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%no (q: f32[8,16]) -> f32[8,8] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %slice = f32[8,8]{1,0} slice(%q), slice={[0:8], [0:8]}
}

ENTRY %main (a: f32[8,16], b: TYPE) -> f32[8,8] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = TYPE parameter(1)
  ROOT %conditional.1 = f32[8,8]{1,0} conditional(%b, %a, %a), BRANCHES
}
"""


@pytest.mark.parametrize(
    ("kind", "branches"),
    [
        ("pred[]", "true_computation=%yes, false_computation=%no"),  # as on GPUs
        ("s32[]", "branch_computations={%no, %yes}"),
    ],
)
def test_branches_are_read_in_both_forms(kind, branches):
    schedule = read_schedule(CHOICES.replace("TYPE", kind).replace("BRANCHES", branches))
    assert (schedule.num_matmuls, schedule.count("all-gather")) == (1, 1)


MORE = """HloModule m, is_scheduled=true

%all-reduce-scatter.1 (p: bf16[16,4]) -> bf16[2,4] {
  %p = bf16[16,4]{1,0} parameter(0)
  %all-reduce.1 = bf16[16,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[2,4]{1,0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={2,4}
}

%starts (q: bf16[2,4]) -> (bf16[2,4], bf16[8,4], u32[]) {
  %q = bf16[2,4]{1,0} parameter(0)
  %all-gather.1 = bf16[8,4]{1,0} all-gather(%q), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  ROOT %custom = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]) custom-call(%q, %all-gather.1), custom_call_target="Start"
}

%async_collective_fusion.1 (r: bf16[2,4], s: bf16[8,4]) -> (bf16[8,4], bf16[8,4]) {
  %r = bf16[2,4]{1,0} parameter(0)
  %s = bf16[8,4]{1,0} parameter(1)
  %all-gather.2 = bf16[8,4]{1,0} all-gather(%r), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %convolution.1 = bf16[8,4]{1,0} convolution(%s, %s), dim_labels=bf_io->bf
  ROOT %both = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) tuple(%convolution.1, %all-gather.2)
}

%ends (u: bf16[8,4]) -> bf16[8,4] {
  %u = bf16[8,4]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[8,4]{1,0} all-gather(%u), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

ENTRY %main (a: bf16[16,4], b: bf16[2,4]) -> bf16[8,4] {
  %a = bf16[16,4]{1,0} parameter(0)
  %b = bf16[2,4]{1,0} parameter(1)
  %fusion.1 = bf16[2,4]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %async-collective-start = (bf16[2,4]{1,0}, bf16[8,4]{1,0}, u32[]) fusion(%b), kind=kCustom, calls=%starts
  %part = bf16[8,4]{1,0} get-tuple-element(%async-collective-start), index=1
  %fusion.2 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) fusion(%b, %part), kind=kCustom, calls=%async_collective_fusion.1
  %rest = bf16[8,4]{1,0} get-tuple-element(%fusion.2), index=1
  %async-collective-done = bf16[8,4]{1,0} fusion(%rest), kind=kCustom, calls=%ends
  %gemm = bf16[8,4]{1,0} custom-call(%rest), custom_call_target="__cublas$gemm"
  %reduce-scatter-start = ((bf16[16,4]{1,0}, bf16[8,4]{1,0}), (bf16[8,4]{1,0}, bf16[4,4]{1,0})) reduce-scatter-start(%a, %rest), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%add
  %reduce-scatter-done = (bf16[8,4]{1,0}, bf16[4,4]{1,0}) reduce-scatter-done(%reduce-scatter-start)
  ROOT %permute = bf16[8,4]{1,0} collective-permute(%rest), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
}
"""


def test_fused_and_combined_forms_and_the_axes_they_run_along():
    schedule, sizes = read_schedule(MORE), {"fsdp": 4, "tp": 2}
    fused, gather, combined, permute = schedule.collectives
    assert (fused.kind, fused.is_async, fused.wire_bytes) == ("reduce-scatter", False, 128 * 7 / 8)
    assert fused.axes(sizes) == ("fsdp", "tp")
    assert (gather.kind, gather.hidden, gather.matmuls_between) == ("all-gather", True, 1)
    assert (gather.partners, gather.axes(sizes)) == (((0, 2, 4, 6),), ("fsdp",))
    assert (combined.kind, combined.bytes_moved, combined.hidden) == ("reduce-scatter", 192, False)
    assert (combined.axes(sizes), permute.axes(sizes)) == (("tp",), ("tp",))
    assert (schedule.along("fsdp", sizes).count(), schedule.along("tp", sizes).count()) == (1, 2)
    assert schedule.hidden_bytes == gather.wire_bytes == 48


@pytest.mark.parametrize("result", ["f32[8,4]{1,0}", "((f32[8,4]{1,0}), f32[8,4]{1,0})"])
def test_operands_listed_by_a_start_do_not_count(result):
    text = f"""HloModule step

ENTRY %main (a: f32[8,4]) -> f32[8,4] {{
  %a = f32[8,4]{{1,0}} parameter(0)
  %all-reduce-start = {result} all-reduce-start(%a), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %all-reduce-done = f32[8,4]{{1,0}} all-reduce-done(%all-reduce-start)
}}
"""
    (found,) = read_schedule(text).collectives
    assert (found.bytes_moved, found.wire_bytes) == (128, 128)


def test_attributes_with_line_breaks_do_not_end_a_computation():
    """XLA prints kernels' attributes with line breaks, also before a closing brace at the start of a line."""
    call = '  %kernel = f32[8] custom-call(%x), frontend_attributes={kernel="{\n"block": 512\n}}, metadata={}\n'
    text = ASYNC.replace("\n  %fusion.7 =", f"\n{call}  %fusion.7 =")
    assert text.count("block") == 1
    assert read_schedule(text) == read_schedule(ASYNC)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,3},{1,2}}", (0, 3)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[4,2]T(1,0)", (0, 2)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", (7, 3)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6)),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", (0, 4)),
        # A part of an axis: a factor of 2 after a factor of 1 or 2.
        ("mesh['a'=2,'b'=4] {'b':(1)2}", (0, 2)),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
        ("mesh['a'=8,'b'=2] {'a':(1)2,'a':(4)2}", (0, 2, 8, 10)),
    ],
)
def test_groups_of_devices(groups, expected):
    assert partners(f"replica_groups={groups}, use_global_device_ids=true") == (expected,)
