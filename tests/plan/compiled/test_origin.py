# ruff: noqa: E501 (HLO lines are long)
"""Origins of collectives: by the scopes of FSDP gathers, and traced back to program arguments."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.mesh.axes import pcast_varying
from meshwright.models import Decoder
from meshwright.parallel.fsdp import gather_tree
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.origin import last_scope, short_path
from meshwright.plan.step_setup import Setup, build_step
from meshwright.train import language_job

SPECS = {"layers": {"wq": P(None, None, "fsdp")}, "head": P("fsdp")}
PARAMS = {"layers": {"wq": jnp.ones((4, 16, 16))}, "head": jnp.ones((16, 8))}


@pytest.fixture(autouse=True)
def _names_are_of_this_program():
    """Otherwise a cached program could have the names of another."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


def serving(f):
    """Returns the data that collectives of a loss's gradient send, by kind."""

    def step(state, x):
        return jax.grad(lambda params: lax.psum(f(params, x).mean(), "fsdp"))(state["params"])

    specs = {"params": SPECS}
    mesh = mw.create_mesh("fsdp:8")
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=SPECS))
    found = {}
    for one in read_schedule(mapped.lower({"params": PARAMS}, jnp.ones((64, 16))).compile().as_text()).collectives:
        found.setdefault(one.kind, set()).add((one.serves, one.trips))
        assert one.line.startswith("compiled/test_origin.py:"), one.line
    return found


def test_fsdp_gathers_name_the_parameter_and_its_gradient():
    def f(params, x):
        def layer(h, w):
            whole = gather_tree({"layers": {"wq": w}}, {"layers": {"wq": P(None, "fsdp")}}, axis="fsdp")
            return jnp.tanh(h @ whole["layers"]["wq"]), None

        h, _ = lax.scan(layer, x, params["layers"]["wq"])
        return h @ gather_tree({"head": params["head"]}, {"head": P("fsdp")}, axis="fsdp")["head"]

    found = serving(f)
    assert ("params/layers/wq", 4) in found["all-gather"]
    assert found["reduce-scatter"] == {("gradient of params/layers/wq", 4), ("gradient of params/head", 1)}


def test_collectives_of_a_train_step_name_their_parameters():
    def loss(params, batch, rng):
        return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2), {}

    job = mw.Job(
        init=lambda key: {"w": jnp.ones((64, 64)), "b": jnp.ones(64)},
        rules=[("w", P("fsdp")), ("b", P())],
        loss=loss,
        batch={"x": jax.ShapeDtypeStruct((8, 64), "float32")},
    )
    setup = Setup(mesh="dp:2,fsdp:4", precision="float32", optimizer="sgd")
    step, batch = build_step(job, mw.create_mesh(setup.mesh), setup)
    collectives = read_schedule(step.lower(batch).compile().as_text()).collectives
    said = " ".join(one.serves for one in collectives if one.kind == "all-reduce")
    assert "the gradient norm" in said
    assert "activation" not in said
    named = {(one.kind, one.serves) for one in collectives if "params" in one.serves}
    assert {("all-gather", "params/w"), ("reduce-scatter", "gradient of params/w")} <= named
    sums = " ".join(serves for kind, serves in named if kind == "all-reduce")
    assert "params/w" in sums or "params/b" in sums


def test_arguments_are_found_through_loops_slices_and_casts():
    """Nothing has a scope, so the operand is traced out of the loop to the parameters."""

    def f(params, x):
        def layer(h, w):
            whole = lax.all_gather(w.astype(jnp.bfloat16), "fsdp", axis=1, tiled=True)
            return jnp.tanh(h @ whole.astype(jnp.float32)), None

        h, _ = lax.scan(layer, x, params["layers"]["wq"])
        return h @ lax.all_gather(params["head"], "fsdp", axis=0, tiled=True)

    found = serving(f)
    assert {name for name, _ in found["all-gather"]} == {"params/layers/wq", "params/head"}
    assert all(name.startswith("a gradient") for name, _ in found["reduce-scatter"])


def test_activations_are_named_by_user_scopes():
    def f(params, x):
        with jax.named_scope("attention"):
            h = lax.all_gather(jnp.tanh(x), "fsdp", tiled=True)
        return h * params["head"].sum()

    assert serving(f)["all-gather"] == {("an activation of attention", 1)}


def test_scopes_change_no_program_and_no_number():
    """With and without scopes, programs are equal except for metadata, and gradients are equal."""
    mesh = mw.create_mesh("fsdp:8")
    values = {"layers": {"wq": jax.random.normal(jax.random.key(0), (4, 16, 16))}, "head": PARAMS["head"]}

    def step(params, x):
        def loss(params):
            whole = gather_tree(params, SPECS, axis="fsdp")
            return lax.psum((x @ whole["layers"]["wq"][0] @ whole["head"]).mean(), "fsdp")

        return jax.grad(loss)(params)

    def run():
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(SPECS, P("fsdp")), out_specs=SPECS))
        text = mapped.lower(values, jnp.ones((8, 16))).compile().as_text()
        lines = [line.partition(", metadata=")[0] for line in text.splitlines() if line.startswith("  ")]
        return lines, mapped(values, jnp.ones((8, 16)))

    lines, grads = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.named_scope", lambda name: contextlib.nullcontext())
        jax.clear_caches()  # drops traces with scopes
        plain_lines, plain_grads = run()
    assert lines == plain_lines
    jax.tree.map(np.testing.assert_array_equal, grads, plain_grads)


LOOP = """HloModule m, is_scheduled=true

%body (t: (s32[], f32[8,16], f32[8,16])) -> (s32[], f32[8,16], f32[8,16]) {
  %t = (s32[], f32[8,16]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %kept = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %sum = f32[8,16]{1,0} get-tuple-element(%t), index=2
  %more = f32[8,16]{1,0} add(%sum, %kept), metadata={op_name="jit(f)/blend/add"}
  ROOT %out = (s32[], f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(%i, %kept, %more)
}

ENTRY %main (a: f32[8,16], b: f32[8,16]) -> f32[64,16] {
  %a = f32[8,16]{1,0} parameter(0), metadata={op_name="state.params['w']"}
  %b = f32[8,16]{1,0} parameter(1), metadata={op_name="x"}
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(%zero, %a, %b)
  %while = (s32[], f32[8,16]{1,0}, f32[8,16]{1,0}) while(%init), condition=%condition, body=%body
  %value = f32[8,16]{1,0} get-tuple-element(%while), index=1
  ROOT %gather = f32[64,16]{1,0} all-gather(%value), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/all_gather"}
}
"""


def test_only_values_that_a_loop_passes_through_are_traced_to_before_it():
    assert read_schedule(LOOP).collectives[0].serves == "params/w"
    changed = LOOP.replace("get-tuple-element(%while), index=1", "get-tuple-element(%while), index=2")
    assert read_schedule(changed).collectives[0].serves == "an activation"


LOST = """HloModule m, is_scheduled=true

FileNames
1 "/home/someone/project/src/pkg/train.py"
2 "/home/someone/env/lib/python3.12/site-packages/meshwright/parallel/gather.py"

FunctionNames
1 "loss.<locals>.layer"
2 "_all_gather"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%region (reduce_scatter.1: f32[], reduce_scatter.2: f32[]) -> f32[] {
  %reduce_scatter.1 = f32[] parameter(0), metadata={op_name="reduce_scatter"}
  %reduce_scatter.2 = f32[] parameter(1), metadata={op_name="reduce_scatter"}
  ROOT %add = f32[] add(%reduce_scatter.1, %reduce_scatter.2), metadata={op_name="add" stack_frame_id=2}
}

ENTRY %main (a: f32[64,64]) -> f32[8,64] {
  %a = f32[64,64]{1,0} parameter(0), metadata={op_name="x"}
  %made = f32[64,64]{1,0} multiply(%a, %a)
  %all-reduce = f32[64,64]{1,0} all-reduce(%made), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%region
  ROOT %cut = f32[8,64]{1,0} dynamic-slice(%all-reduce), dynamic_slice_sizes={8,64}
}
"""


def test_a_reduction_without_a_name_uses_that_of_its_computation():
    """On TPUs, only the computation of a scatter that became an all-reduce keeps its name."""
    (one,) = read_schedule(LOST).collectives
    assert one.source == "reduce_scatter"
    # The innermost call outside Meshwright, without the home folder.
    assert one.line == "pkg/train.py:12"
    assert one.serves == "an activation of loss.layer"


@pytest.mark.parametrize("collective", [gather_tree, pcast_varying], ids=lambda call: call.__name__)
def test_a_line_inside_of_a_collective_is_that_of_its_caller(collective):
    """Read from where the function really is, so that a moved module cannot hide callers."""
    file = inspect.getsourcefile(collective)
    changed = LOST.replace("/home/someone/env/lib/python3.12/site-packages/meshwright/parallel/gather.py", file)
    assert read_schedule(changed).collectives[0].line == "pkg/train.py:12"


def test_a_reduction_without_a_name_uses_the_cast_of_the_gradient():
    named = LOST.replace(
        "%made = f32[64,64]{1,0} multiply(%a, %a)",
        '%made = f32[64,64]{1,0} multiply(%a, %a), metadata={op_name="jit(step)/transpose(jvp(params[head/kernel]))/convert"}',
    )
    assert read_schedule(named).collectives[0].serves == "gradient of params/head/kernel"


@pytest.mark.parametrize(
    ("name", "serves"),
    [
        ("jit(s)/jvp(params[layers/(attn/k])/all_gather:mlp/gate])/all_gather)", "params/layers/attn/k and 1 more"),
        ("jit(s)/(jvp(params[head/kernel])/all_gather:jvp(params[norm])/all_gather)", "params/head/kernel and 1 more"),
        ("jit(s)/jvp(params[layers/(attn/(k]/all_gather:o]/all_gather):mlp/up]/all_gather)", "params/layers/attn/k"),
    ],
)
def test_merged_names_are_told_apart(name, serves):
    """XLA:GPU combines gathers, and writes what their names share only once."""
    text = LOOP.replace('op_name="jit(f)/all_gather"', f'op_name="{name}"')
    found = read_schedule(text).collectives[0].serves
    assert found.startswith(serves)
    assert "(" not in found


@pytest.mark.parametrize(
    ("pipeline", "sends"),
    [
        ("gpipe", {"activations between stages", "gradients between stages"}),
        ("1f1b", {"activations and gradients between stages"}),
    ],
)
def test_hops_between_stages_are_named(pipeline, sends):
    job = language_job(Decoder.named("tiny"), batch_size=32, num_tokens=16)
    setup = Setup(mesh="pp:2,fsdp:4", pipeline=pipeline, precision="float32", optimizer="sgd")
    step, batch = build_step(job, mw.create_mesh(setup.mesh), setup)
    collectives = read_schedule(step.lower(batch).compile().as_text()).collectives
    assert sends <= {one.serves for one in collectives if one.kind == "collective-permute"}


@pytest.mark.parametrize(
    ("source", "scope"),
    [
        ("jit(step)/shard_map/jvp()/while/body/closed_call/checkpoint/ppermute", ""),
        ("jit(step)/shard_map/transpose(jvp(mlp))/ppermute", "mlp"),
        ("jit(step)/encoder/attention/all_gather", "attention"),
        ("jit(step)/shard_map/(transpose(jvp())/psum_invariant:psum_invariant)", ""),
    ],
)
def test_last_scope(source, scope):
    assert last_scope(source) == scope


# Home folders of users and root, on Linux and macOS.
@pytest.mark.parametrize("path", ["/home/me/train.py", "/root/train.py", "/Users/me/train.py", "train.py"])
def test_home_folders_are_removed(path):
    assert short_path(path) == "train.py"
