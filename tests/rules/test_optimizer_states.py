"""Rules for parameters, applied to optimizer and train states."""

import functools
from typing import NamedTuple

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P
from meshwright.rules.matching import find_subjects
from meshwright.tree import named_leaves

MESH = mw.create_abstract_mesh("fsdp:4,tp:2")

# Anchored rules and a catch-all: the optimizer's prefixes must not change which rule matches.
RULES = [
    ("^embed/w$", P("tp", "fsdp")),
    ("^block/square$", P("fsdp", "tp")),
    ("^block/stack$", P(None, "fsdp", "tp")),
    (".*", P()),
]
SPECS = {
    "embed/w": P("tp", "fsdp"),
    "block/square": P("fsdp", "tp"),
    "block/stack": P(None, "fsdp", "tp"),
    "block/bias": P(),
}


def make_params():
    shapes = {"embed": {"w": (16, 24)}, "block": {"square": (8, 8), "stack": (3, 16, 8), "bias": (8,)}}
    return jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=lambda node: isinstance(node, tuple))


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-3),
    "adamw bf16 moments": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "adafactor with momentum": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "adafactor unfactored": lambda: optax.adafactor(1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), is_matrix),
    "adamw masked decay": lambda: optax.adamw(1e-3, mask=mw.get_weight_decay_mask(["bias"])),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4),
    "multi_transform": lambda: optax.multi_transform(
        {True: optax.adam(1e-3), False: optax.sgd(0.1, momentum=0.9)}, is_matrix
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "our muon": lambda: mw.train.muon(1e-3, is_matrix=lambda name, leaf: leaf.ndim > 1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.ema(0.9)),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "MultiSteps of masked adafactor": lambda: optax.MultiSteps(
        optax.masked(optax.adafactor(1e-3, min_dim_size_to_factor=4), is_matrix), 2
    ),
}


class OwnState(NamedTuple):
    """The state of an optimizer that is neither optax's nor Meshwright's."""

    count: jax.Array
    slow: dict


def own():
    def init(params):
        return OwnState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


def flax_state(params, tx):
    return flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=tx)


def our_state(params, tx):
    return mw.TrainState.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key(0), mutable_variables={})


def dict_state(params, tx):
    return {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}


STATES = {"flax": flax_state, "ours": our_state, "dict": dict_state}


@functools.cache
def abstract_state(optimizer, state):
    tx = OPTIMIZERS[optimizer]()
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    return jax.eval_shape(lambda: STATES[state](make_params(), tx))


def check_moments(leaves, prefix=""):
    """Checks that every leaf with its parameter's shape has its spec, and returns the number of such leaves."""
    shapes = {leaf.name: leaf.value.shape for leaf in named_leaves(jax.eval_shape(make_params))}
    count = 0
    for leaf in leaves:
        for name, shape in shapes.items():
            if leaf.name.startswith(prefix) and leaf.name.endswith(f"/{name}") and leaf.shape == shape:
                assert leaf.spec == SPECS[name], leaf.name
                count += 1
    return count


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_have_the_specs_of_their_parameters(optimizer, state):
    tree = abstract_state(optimizer, state)
    layout = mw.make_layout(RULES, tree, MESH)
    assert check_moments(layout.leaves, "params/") == 4
    moments = check_moments(layout.leaves, "opt_state/")
    assert moments >= (1 if optimizer == "adafactor" or "masked" in optimizer else 4)
    # match_partition_rules returns the same specs, in the structure of the state.
    specs = mw.match_partition_rules(RULES, tree, mesh=MESH)
    assert jax.tree.structure(specs) == jax.tree.structure(tree)
    assert jax.tree.leaves(specs) == [leaf.spec for leaf in layout.leaves]
    # JAX accepts every derived spec.
    for leaf in layout.leaves:
        assert NamedSharding(MESH, leaf.spec).shard_shape(leaf.shape) == leaf.shard_shape


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_state_alone(optimizer):
    opt_state = abstract_state(optimizer, "dict")["opt_state"]
    whole = mw.make_layout(RULES, abstract_state(optimizer, "dict"), MESH)
    # A masked optimizer has no moments for some rules, so make_layout would warn.
    with_params = mw.explain_layout(RULES, opt_state, MESH, params=jax.eval_shape(make_params))
    assert with_params.ok
    expected = {leaf.name.removeprefix("opt_state/"): leaf.spec for leaf in whole.leaves if leaf.name[0] == "o"}
    assert {leaf.name: leaf.spec for leaf in with_params.leaves} == expected
    # Without the parameters, factored statistics are replicated, with a remark.
    alone = mw.explain_layout(RULES, opt_state, MESH)
    assert alone.ok
    for leaf in alone.leaves:
        assert leaf.spec == expected[leaf.name] or leaf.reason == "statistic of another rank; pass params= to shard it"


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon", "MultiSteps of masked adafactor"])
def test_a_state_is_sharded_and_gathered(optimizer):
    tx = OPTIMIZERS[optimizer]()
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    state = our_state(make_params(), tx)
    mesh = mw.create_mesh("fsdp:4,tp:2")
    layout = mw.make_layout(RULES, state, mesh)
    placed = layout.shard(state)
    for leaf, array in zip(layout.leaves, jax.tree.leaves(placed), strict=True):
        assert array.sharding == NamedSharding(mesh, leaf.spec)
    back = layout.gather(placed)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        if hasattr(before, "dtype") and jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
            before, after = jax.random.key_data(before), jax.random.key_data(after)
        before = before if hasattr(before, "dtype") else np.int32(before)  # the step of a train state
        np.testing.assert_array_equal(before, after, strict=True)


# --- Adafactor's rows and columns, compared with its updates ---


def dims_a_factor_depends_on(shape):
    """Finds the dims of each factor with gradients that vary along one dim at a time."""
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    ramps = [np.arange(1.0, n + 1).reshape([-1 if d == dim else 1 for d in range(len(shape))])
             for dim, n in enumerate(shape)]  # fmt: skip

    @jax.jit
    def spreads():
        params = jnp.ones(shape)
        states = [tx.update(jnp.broadcast_to(ramp, shape), tx.init(params), params)[1] for ramp in ramps]
        return [{field: jnp.ptp(getattr(state, field)) for field in ("v_row", "v_col")} for state in states]

    found = spreads()
    return {field: [dim for dim, spread in enumerate(found) if spread[field] > 0] for field in ("v_row", "v_col")}


@pytest.mark.parametrize(
    "shape", [(4, 8), (8, 4), (8, 8), (2, 4, 8), (8, 4, 2), (2, 8, 8), (8, 8, 2), (8, 2, 8), (4, 4, 4), (4, 8, 4)]
)
def test_adafactor_factors_follow_the_dims_they_keep(shape):
    if list(np.argsort(shape)) != sorted(range(len(shape)), key=shape.__getitem__):
        pytest.skip("numpy's argsort is not stable on this machine, and optax goes by it")
    axes = ("a", "b", "c")[: len(shape)]

    def init():
        params = {"w": jnp.ones(shape)}
        return {"params": params, "opt_state": optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(params)}

    layout = mw.make_layout([("w", P(*axes))], jax.eval_shape(init), mw.create_abstract_mesh("a:2,b:2,c:2"))
    for field, kept in dims_a_factor_depends_on(shape).items():
        leaf = layout[f"opt_state/{field}/w"]
        assert leaf.spec == P(*(axes[dim] for dim in kept))
        assert leaf.reason == f"dims {tuple(kept)} of the parameter"
    assert layout["opt_state/v/w"].reason == "one element"


# --- Roles ---


def test_roles():
    tree = {
        "params": {"w": jnp.ones((4, 4))},
        "opt_state": (optax.ScaleByAdamState(jnp.zeros(()), {"w": jnp.ones((4, 4))}, {"w": jnp.ones((4, 4))}),),
        "step": jnp.zeros(2),
        "rng": jnp.zeros(2, jnp.uint32),
        "batch_stats": {"mean": jnp.ones(4)},
    }
    roles = {subject.name: (subject.role, subject.names[-1]) for subject in find_subjects(tree)}
    assert roles == {
        "params/w": ("parameter", "w"),
        "opt_state/0/count": ("bookkeeping", "opt_state/0/count"),
        "opt_state/0/mu/w": ("statistic", "w"),
        "opt_state/0/nu/w": ("statistic", "w"),
        "step": ("bookkeeping", "step"),
        "rng": ("bookkeeping", "rng"),
        "batch_stats/mean": ("parameter", "batch_stats/mean"),
    }


def test_a_state_of_unknown_classes_is_recognized_by_its_paths():
    tree = {
        "params": {"w": jnp.ones((8, 4))},
        "opt_state": {"slow": {"w": jnp.ones((8, 4))}, "norms": {"w": jnp.ones(8)}},
    }
    layout = mw.make_layout([("^w$", P("fsdp", "tp"))], tree, MESH)
    assert layout["opt_state/slow/w"].spec == P("fsdp", "tp")
    assert layout["opt_state/norms/w"].spec == P("fsdp")


@pytest.mark.parametrize(
    ("shape", "spec", "reason"),
    [
        ((16, 8), P("tp", "fsdp"), ""),
        ((16,), P("tp"), "dims (0,) of the parameter"),
        ((8,), P("fsdp"), "dims (1,) of the parameter"),
        ((16, 1), P("tp", None), "statistic of another shape"),
        ((1, 8), P(None, "fsdp"), "statistic of another shape"),
        ((16, 8, 3), P("tp", "fsdp", None), "statistic of another shape"),
        ((10, 16, 8), P(None, "tp", "fsdp"), "several of the parameter's shape"),
        ((5,), P(), "statistic of unrelated shape"),
        ((5, 5), P(), "statistic of unrelated shape"),
    ],
)
def test_statistics_of_other_shapes(shape, spec, reason):
    tree = {"params": {"w": jnp.ones((16, 8))}, "opt_state": optax.EmaState(jnp.zeros(()), {"w": jnp.ones(shape)})}
    leaf = mw.make_layout([("^w$", P("tp", "fsdp"))], tree, MESH)["opt_state/ema/w"]
    assert (leaf.spec, leaf.reason) == (spec, reason)


def test_an_own_state_inside_of_optax_follows_its_parameters():
    tx = optax.masked(optax.chain(own(), optax.scale_by_adam()), is_matrix)
    layout = mw.make_layout(RULES, dict_state(make_params(), tx), MESH)
    assert check_moments(layout.leaves, "opt_state/") == 6
    assert layout["opt_state/inner_state/0/slow/embed/w"].spec == SPECS["embed/w"]
