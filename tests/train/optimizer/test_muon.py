"""Muon takes the steps of optax's, on every mesh, with one exchange of the matrices in each direction."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import meshwright as mw
from meshwright import P
from meshwright.models import XLSTM, Decoder
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import can_compile_for
from meshwright.train import init_state, make_train_step, muon, orthogonalize, state_layout
from meshwright.train.optimizer.muon import is_hidden_matrix, orthogonalized_names
from meshwright.train.optimizer.newton_schulz import COEFFICIENTS, DION_COEFFICIENTS

RULES = mw.Rules(
    [
        ("embed", P("tp", "fsdp")),
        ("up", P("pp", "fsdp", "tp")),
        ("down", P("pp", "tp", "fsdp")),
        ("one", P(("fsdp", "tp"))),
        (".*", P()),
    ],
    optional_axes=("pp", "fsdp", "tp"),
)
SHAPES = {"embed": (16, 8), "up": (3, 8, 16), "down": (3, 16, 8), "square": (8, 8), "one": (16, 8), "norm": (8,)}


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: jax.random.normal(k, shape) / shape[-1] ** 0.5
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def loss(params, batch, rng):
    h = batch["x"] @ params["embed"] @ params["square"] * params["norm"]
    for up, down in zip(params["up"], params["down"], strict=True):
        h = h + jnp.tanh(h @ up) @ down
    return jnp.mean((jnp.tanh(h @ params["one"].T) - batch["y"]) ** 2), {}


def make_batch():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((16, 16)).astype(np.float32) for name in "xy"}


JOB = mw.Job(init=init, rules=RULES, loss=loss, batch=make_batch())
OPTIONS = {"weight_decay": 0.1, "rms": 0.2, "is_matrix": lambda name, leaf: name not in ("embed", "norm")}


PUBLISHED = {"num_iterations": 5, "coefficients": (COEFFICIENTS,)}  # optax's defaults


def by_optax(num_steps, **options):
    """The steps of `optax.contrib.muon` on one device."""
    matrix, batch = MuonDimensionNumbers(-2, -1), make_batch()
    numbers = {name: matrix if name not in ("embed", "norm") else None for name in SHAPES}
    optimizer = optax.contrib.muon(
        0.1, weight_decay=0.1, adam_weight_decay=0.1, adam_b2=0.95, consistent_rms=0.2,
        muon_weight_dimension_numbers=numbers, **options,
    )  # fmt: skip
    params = init(jax.random.split(jax.random.key(0))[0])
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: loss(params, batch, None)[0])(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(num_steps):
        params, state = step(params, state)
    return jax.device_get(params)


@functools.cache
def reference():
    return by_optax(3, ns_coeffs=DION_COEFFICIENTS, ns_steps=4)


@pytest.mark.parametrize(
    ("mesh", "zero_axis"),
    [
        ("dp:1", None),
        ("dp:8", None),
        ("dp:8", "dp"),
        ("fsdp:8", None),
        ("tp:8", None),
        ("dp:2,fsdp:4", None),
        ("fsdp:2,tp:4", None),
        ("dp:2,fsdp:2,tp:2", None),
        ("dp:4,tp:2", "dp"),
        ("pp:3,fsdp:2", None),
    ],
)
def test_the_steps_are_those_of_optax_on_every_mesh(mesh, zero_axis):
    check_steps(muon(0.1, **OPTIONS), reference(), mesh, zero_axis)


def test_published_coefficients_are_the_defaults_of_optax():
    check_steps(muon(0.1, **OPTIONS, **PUBLISHED), by_optax(3), "dp:2,fsdp:2,tp:2")


def check_steps(optimizer, steps_of_optax, mesh, zero_axis=None):
    mesh = mw.create_mesh(mesh, devices=math.prod(int(axis[-1]) for axis in mesh.split(",")))
    layout = state_layout(JOB, optimizer, mesh, zero_axis=zero_axis)
    state = init_state(JOB, optimizer, layout, jax.random.key(0))
    step = make_train_step(JOB, optimizer, layout, view="global", donate=False)
    for _ in range(3):
        state, _ = step(state, make_batch())
    for name, expected in steps_of_optax.items():
        # Iterations multiply small singular values and their rounding errors: five by 3.44^5, four of Dion's by 174.
        atol = 485 * np.finfo(np.float32).eps * np.abs(expected).max()
        np.testing.assert_allclose(state.params[name], expected, atol=atol, err_msg=name)


def test_momentum_is_split_over_the_zero_axis():
    layout = state_layout(JOB, muon(0.1, **OPTIONS), mw.create_abstract_mesh("dp:4,tp:2"), zero_axis="dp")
    momentum = {leaf.name.rpartition("/")[2]: leaf for leaf in layout.leaves if "/muon/" in leaf.name and leaf.shape}
    assert set(momentum) == set(SHAPES) - {"embed", "norm"}
    for name, leaf in momentum.items():
        ways = 4 if name == "square" else 8  # the rules replicate it along tp
        assert math.prod(leaf.shard_shape) * ways == math.prod(SHAPES[name]), name


@pytest.mark.parametrize(
    ("mesh", "kv_heads"), [("tp:4", None), ("fsdp:2,tp:4", None), ("fsdp:2,tp:2", 2), ("fsdp:4,tp:2", 2)]
)
def test_the_layers_of_a_decoder_are_orthogonalized_as_on_one_device(mesh, kv_heads):
    """On these meshes, XLA:CPU gave the operands of an all-to-all different layouts and refused its own program."""
    model = Decoder(vocab_size=64, num_layers=2, d_model=64, num_heads=8, num_kv_heads=kv_heads, d_ff=128)
    params = model.init(jax.random.key(0))
    mesh = mw.create_mesh(mesh, devices=math.prod(int(axis[-1]) for axis in mesh.split(",")))
    layout = mw.make_layout(model.rules, params, mesh)
    names = ("attn", "mlp")
    layers, specs, shardings = (
        {name: tree["layers"][name] for name in names} for tree in (params, layout.specs, layout.shardings)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        split = jax.jit(lambda tree: orthogonalize(tree, specs=specs), out_shardings=shardings)(
            jax.device_put(layers, shardings)
        )
    for one, whole in zip(jax.tree.leaves(split), jax.tree.leaves(orthogonalize(layers)), strict=True):
        # The bound of `check_steps`; singular values are near 1.
        np.testing.assert_allclose(one, whole, atol=485 * np.finfo(np.float32).eps)


def test_matrices_travel_once_in_each_direction():
    """Of two groups of matrices on fsdp, each is exchanged whole; the gradients need no all-to-all."""
    optimizer = muon(0.1, **OPTIONS)
    layout = state_layout(JOB, optimizer, mw.create_mesh("fsdp:8"))
    counts = {}
    for name, one in (("muon", optimizer), ("sgd", optax.sgd(0.1))):
        layout = state_layout(JOB, one, mw.create_mesh("fsdp:8"))
        program = make_train_step(JOB, one, layout, view="global").lower(make_batch()).compile()
        counts[name] = read_schedule(program.as_text())
    assert counts["sgd"].count("all-to-all") == 0
    sent = [c for c in counts["muon"].collectives if c.kind == "all-to-all"]
    # Stacks of 6 and 1 matrices of 8 x 16, filled up to 8 each, are split 8 ways; each way moves a share of a stack.
    assert [c.bytes_moved for c in sent] == [8 * 8 * 16 * 4 // 8] * 4
    # The square matrices are replicated: their updates are gathered, and nothing else is.
    assert counts["muon"].count("all-gather") - counts["sgd"].count("all-gather") == 1


COMPILED_7B = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
import meshwright as mw
from meshwright.models import XLSTM, Decoder
from meshwright.plan.compiled.collectives import read_schedule
from meshwright.plan.compiled.topology import target_mesh
from meshwright.train import orthogonalize

mesh = target_mesh("v5p:4x4x4", (64,), ("fsdp",))
model = Decoder.named("7b")
params = mw.train.abstract_init(model.init)["layers"]
params = {name: params[name] for name in ("attn", "mlp")}
layout = mw.make_layout(model.rules, {"layers": params}, mesh)
specs = layout.specs["layers"]
run = lambda tree: orthogonalize(tree, specs=specs, dtype=jnp.bfloat16)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    made = jax.jit(run, out_shardings=layout.shardings["layers"]).lower(layout.abstract["layers"])
schedule = read_schedule(made.compile().as_text())
print(*sorted(f"{c.kind}:{round(c.bytes_moved / 2**20)}" for c in schedule.collectives))
"""


@pytest.mark.slow  # compiles for 64 chips
@pytest.mark.skipif(sys.platform != "linux", reason="libtpu exists for Linux only")
def test_a_7b_update_on_64_chips_is_one_exchange_each_way(run_compiler):
    """128 matrices of 4096 x 4096 and 96, filled up to 128, of 4096 x 11008, in bfloat16, over 64 chips."""
    if not can_compile_for("v5p:4x4x4"):
        pytest.skip("the compiler for v5p is not installed")
    done = run_compiler(COMPILED_7B, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    square, wide = (128 * 4096 * n * 2 // 64 // 2**20 for n in (4096, 11008))
    assert done.stdout.split() == sorted([f"all-to-all:{square}", f"all-to-all:{wide}"] * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_iterations": 0}, r"num_iterations must be a whole number of at least 1; got 0.\nhint: use 4"),
        ({"num_iterations": 2.5}, r"num_iterations must be a whole number of at least 1; got 2.5"),
        ({"beta": 1.0}, r"beta must be at least 0 and below 1; got 1.0"),
        ({"rms": 0.0}, r"rms must be above 0; got 0.0.\nhint: use 0.2, or None"),
        ({"coefficients": COEFFICIENTS}, r"coefficients are \(3.4445, .*\).\nhint: use triples of numbers"),
        ({"coefficients": [(1.0, 2.0, 0.0)]}, r"coefficients are \[\(1.0, 2.0, 0.0\)\]"),
        ({"dtype": "int8"}, r"dtype is 'int8', not a dtype of real numbers.\nhint: use float32 or bfloat16"),
        ({"dtype": "bfloat"}, r"dtype is 'bfloat', not a dtype"),
        ({"is_matrix": "up"}, r"is_matrix is 'up'.\nhint: pass a function"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        muon(0.1, **options)


@pytest.mark.parametrize("leaf", [jnp.ones(3), jnp.ones((3, 3), jnp.int32)])
def test_only_matrices_of_real_numbers_are_orthogonalized(leaf):
    with pytest.raises(mw.MeshwrightError, match=r"`w` has shape .* dtype .*, so it is not a matrix of real numbers"):
        orthogonalize({"w": leaf})


def test_parts_of_matrices_in_the_local_view_are_rejected():
    """Each device would orthogonalize its rows, which is another function of the matrix."""

    def update(x):
        return orthogonalize({"w": x})["w"]

    mesh, x = mw.create_mesh("fsdp:8"), jax.random.normal(jax.random.key(0), (16, 8))
    sliced = mw.parallel.local_map(update, mesh=mesh, in_specs=(P("fsdp"),), out_specs=P("fsdp"))
    with pytest.raises(mw.MeshwrightError, match=r"cannot orthogonalize `w` here: it differs along fsdp.*\nhint: upd"):
        sliced(x)
    whole = mw.parallel.local_map(update, mesh=mesh, in_specs=(P(),), out_specs=P())
    np.testing.assert_allclose(whole(x), update(x), atol=485 * np.finfo(np.float32).eps)


def test_arrays_on_explicit_axes_need_no_specs():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    x = jax.random.normal(jax.random.key(0), (3, 16, 8))
    whole = jax.device_get(orthogonalize({"w": x})["w"])
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.NamedSharding(mesh, P(None, "fsdp", "tp")))
        found = jax.jit(orthogonalize)({"w": placed})["w"]
    assert found.sharding.spec == P(None, "fsdp", "tp")
    np.testing.assert_allclose(found, whole, atol=485 * np.finfo(np.float32).eps)


def test_specs_with_unknown_axes_are_rejected():
    with jax.set_mesh(mw.create_mesh("fsdp:8")), pytest.raises(mw.MeshwrightError, match="spec of `w` names axis 'tp'"):
        jax.jit(lambda x: orthogonalize({"w": x}, specs={"w": P("tp")}))(jnp.ones((8, 8)))


def test_a_function_chooses_the_matrices():
    params = {"head": jnp.ones((4, 8)), "up": jnp.ones((4, 8))}
    for is_matrix, expected in ((None, {"up"}), (lambda name, leaf: name == "head", {"head"})):
        state = muon(0.1, is_matrix=is_matrix).init(params)
        mu = state.inner_states["muon"].inner_state[0].mu
        assert {name for name, leaf in mu.items() if hasattr(leaf, "shape")} == expected


MODELS = {
    "decoder": Decoder(vocab_size=64, num_layers=2, d_model=64, num_heads=8, d_ff=128, qkv_bias=True, qk_norm=True),
    "xlstm": XLSTM(vocab_size=64, num_layers=2, d_model=64, num_heads=8, d_ff=128),
}
MATRICES = {
    "decoder": "attn/k attn/o attn/q attn/v mlp/down mlp/gate mlp/up",
    "xlstm": "mlp/down mlp/gate mlp/up mlstm/f_gate mlstm/i_gate mlstm/k mlstm/o_gate mlstm/out mlstm/q mlstm/v",
}


@pytest.mark.parametrize("name", MODELS)
def test_the_projections_of_models_are_matrices(name):
    found = orthogonalized_names(jax.eval_shape(muon(0.1).init, jax.eval_shape(MODELS[name].init, jax.random.key(0))))
    assert found == [f"layers/{one}" for one in MATRICES[name].split()]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("multi_head_attention/query/kernel", (16, 16), True),
        ("downscale/kernel", (16, 8), True),
        ("heads/q", (16, 16), True),
        ("bottleneck/kernel", (16, 8), True),
        ("attention/query/kernel", (16, 4, 4), False),  # [features, heads, head size] is one matrix of 16 x 16
        ("conv/kernel", (3, 3, 16, 16), False),
        ("layers/0/attention/query/kernel", (16, 4, 4), False),
        ("layers/attention/query/kernel", (2, 16, 4, 4), False),
        ("layers/up", (2, 16, 16), True),
        ("layers/0/up", (16, 16), True),
        ("lm_head/kernel", (16, 64), False),
        ("Embed_0/embedding", (64, 16), False),
        ("token_embedder/weight", (64, 16), False),
        ("model/embed_tokens/weight", (64, 16), False),
        ("unembed", (16, 64), False),
        ("position", (12, 16), False),
        ("pos_embed", (12, 16), False),
        ("wpe/weight", (12, 16), False),
        ("layers/LayerNorm_0/weight", (2, 16), False),
        ("layers/rmsnorm/weight", (2, 16), False),
        ("layers/q_bias", (2, 16), False),
        ("layers/logit_scale", (2, 16), False),
        ("layers/router", (2, 16, 4), False),
    ],
)
def test_only_hidden_matrices_are_orthogonalized(name, shape, expected):
    assert is_hidden_matrix(name, jnp.ones(shape)) == expected


def test_a_vector_is_no_matrix():
    with pytest.raises(mw.MeshwrightError, match=r"is_matrix chose `norm`, which has 1 dims.\nhint: return True only"):
        muon(0.1, is_matrix=lambda name, leaf: True).init({"norm": jnp.ones(8)})
