"""Live bytes of scheduled programs, against hand counts; `test_compile.py` compares them with the compilers' peaks."""

from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.hlo import parse_program
from meshwright.plan.compiled.memory_trace import buffer_bytes, trace_memory
from meshwright.plan.compiled.scheduled_steps import (
    LoopStep,
    Wait,
    WorkStep,
    every_work,
    steps_from_json,
    steps_to_json,
)

# A forward loop saves one kibibyte per round in a stack of four, a backward loop reads it and sums a gradient; the
# update overwrites the donated parameter.
KIB = "f32[256]{0}"
STACK = "f32[4,256]{1,0}"
PROGRAM = f"""HloModule m, is_scheduled=true, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

%condition (c: (s32[], {KIB}, {STACK})) -> pred[] {{
  %c = (s32[], {KIB}, {STACK}) parameter(0)
  ROOT %less = pred[] constant(true)
}}

%forward (f: (s32[], {KIB}, {STACK})) -> (s32[], {KIB}, {STACK}) {{
  %f = (s32[], {KIB}, {STACK}) parameter(0)
  %i = s32[] get-tuple-element(%f), index=0
  %x = {KIB} get-tuple-element(%f), index=1
  %stack = {STACK} get-tuple-element(%f), index=2
  %g-start = ({KIB}, {KIB}) all-gather-start(%x), replica_groups={{{{0,1}}}}, metadata={{op_name="jvp(params[w])/a"}}
  %wide = f32[1024]{{0}} exponential(%x), metadata={{op_name="jit(step)/jvp(mlp)/exp"}}
  %y = {KIB} reduce(%wide), metadata={{op_name="jit(step)/jvp(mlp)/sum"}}
  %g = {KIB} all-gather-done(%g-start)
  %saved = {STACK} dynamic-update-slice(%stack, %y, %i), metadata={{op_name="jit(step)/jvp()/dynamic_update_slice"}}
  %next = {KIB} add(%y, %g), metadata={{op_name="jit(step)/jvp(mlp)/add"}}
  ROOT %out = (s32[], {KIB}, {STACK}) tuple(%i, %next, %saved)
}}

%backward (b: (s32[], {KIB}, {STACK})) -> (s32[], {KIB}, {STACK}) {{
  %b = (s32[], {KIB}, {STACK}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %d = {KIB} get-tuple-element(%b), index=1
  %kept = {STACK} get-tuple-element(%b), index=2
  %one = {KIB} dynamic-slice(%kept, %j), metadata={{op_name="jit(step)/transpose(jvp())/slice"}}
  %more = {KIB} add(%d, %one), metadata={{op_name="jit(step)/transpose(jvp(mlp))/add"}}
  ROOT %back = (s32[], {KIB}, {STACK}) tuple(%j, %more, %kept)
}}

ENTRY %main (w: {KIB}) -> ({KIB}) {{
  %w = {KIB} parameter(0), metadata={{op_name="state.params['w']"}}
  %zero = s32[] constant(0)
  %first = {KIB} copy(%w), metadata={{op_name="jit(step)/jvp(embedding)/copy"}}
  %empty = {STACK} broadcast(%zero), metadata={{op_name="jit(step)/broadcast"}}
  %carry = (s32[], {KIB}, {STACK}) tuple(%zero, %first, %empty)
  %run = (s32[], {KIB}, {STACK}) while(%carry), condition=%condition, body=%forward, TRIPS
  %stacked = {STACK} get-tuple-element(%run), index=2
  %none = {KIB} broadcast(%zero), metadata={{op_name="jit(step)/transpose(jvp())/broadcast"}}
  %carried = (s32[], {KIB}, {STACK}) tuple(%zero, %none, %stacked)
  %runs = (s32[], {KIB}, {STACK}) while(%carried), condition=%condition, body=%backward, TRIPS
  %grad = {KIB} get-tuple-element(%runs), index=1
  %new = {KIB} subtract(%w, %grad), metadata={{op_name="jit(step)/sub"}}
  ROOT %result = ({KIB}) tuple(%new)
}}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"4"}}')


def test_live_bytes_equal_a_hand_count():
    live = trace_memory(parse_program(PROGRAM)).live
    kib = {
        name: {part: size / 1024 for part, size in parts.items()}
        for (_, name), parts in live.items()
        if name in ("first", "wide", "y", "next", "one", "new")
    }
    assert kib["first"] == {"parameters": 1, "activations": 1}
    # The gathered weight is allocated at its start; the stack is filled in place.
    common = {"parameters": 1, "activations": 5, "gathered weights": 1}
    assert kib["wide"] == common | {"temporaries": 4}
    assert kib["y"] == common | {"temporaries": 5}
    # The next value of a loop takes the place of the one before.
    assert kib["next"] == common | {"temporaries": 1}
    assert kib["one"] == {"parameters": 1, "gradients": 1, "activations": 4, "temporaries": 1}
    # The result overwrites the donated parameter, and the stack is gone.
    assert kib["new"] == {"parameters": 1, "gradients": 1}
    assert trace_memory(parse_program(PROGRAM)).peak == live["forward", "y"]
    undonated = PROGRAM.replace("{ {0}: (0, {}, may-alias) }", "{}")
    assert sum(trace_memory(parse_program(undonated)).live["main", "new"].values()) == 3 * 1024


def test_sizes_are_padded_to_tiles_and_other_memories_do_not_count():
    assert buffer_bytes("f32[10,100]{1,0:T(8,128)}") == 16 * 128 * 4
    assert buffer_bytes("f32[10,100]{0,1:T(8,128)}") == 104 * 128 * 4
    assert buffer_bytes("pred[2,5]{1,0}") == 10
    assert [buffer_bytes(f"f32[8]{{0:T(128)S({space})}}") for space in (1, 5)] == [0, 0]


def test_steps_keep_the_order_of_the_program_and_the_trips_of_loops():
    schedule = read_schedule(PROGRAM, with_steps=True)
    loops = [one for one in schedule.steps if isinstance(one, LoopStep)]
    assert [loop.trips for loop in loops] == [4, 4]
    (gather,) = [one for one in loops[0].body if isinstance(one, Wait)]
    assert schedule.collectives[gather.place].kind == "all-gather"
    names = [one.name for one in loops[1].body if isinstance(one, WorkStep)]
    assert names[-1] == "mlp, backward"
    written = sum(work.moved * times for work, times in every_work(loops))
    assert written == 4 * (4096 + 1024 + (1024 + 4) + 1024 + 2 * 1024)
    assert steps_from_json(steps_to_json(schedule.steps)) == schedule.steps


def test_a_matmul_that_adds_to_an_operand_takes_no_memory():
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (x: {KIB}) -> {KIB} {{
  %x = {KIB} parameter(0), metadata={{op_name="state.params['w']"}}
  %sum = {KIB} exponential(%x)
  %added = ({KIB}, s8[64]{{0}}) custom-call(%x, %x, %sum), output_to_operand_aliasing={{{{0}}: (2, {{}})}}
  %more = {KIB} get-tuple-element(%added), index=0
  ROOT %last = {KIB} custom-call(%x, %more), output_to_operand_aliasing={{{{}}: (1, {{}})}}
}}
"""
    assert sum(trace_memory(parse_program(text)).peak.values()) == 1024 + 1024 + 64
    apart = text.replace("output_to_operand_aliasing", "nothing")
    assert sum(trace_memory(parse_program(apart)).peak.values()) == 3 * 1024 + 64
