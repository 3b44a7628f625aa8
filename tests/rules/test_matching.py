import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright import P

segments = st.sampled_from(["attn", "q", "k", "v", "kernel", "bias", "mlp", "layers", "0", "1", "12", "norm", "embed"])
paths = st.lists(segments, min_size=1, max_size=5).map("/".join)
regexes = st.one_of(
    paths,
    segments,
    st.sampled_from(
        [".*", "^embed", "kernel$", r"layers/\d+/", "(q|k|v)/kernel", "k", "(^|/)k(/|$)", r"\d", "(a+)?",
         "(attn|mlp)?/", "(attn/)*q", "[^/]+/bias", "norm|bias", "^(?!.*bias)", r"(\w)\1", "(?i)ATTN"]
    ),
)  # fmt: skip


@given(st.lists(paths, min_size=1, max_size=12, unique=True), st.lists(regexes, max_size=6))
def test_first_rule_found_by_re_search_wins(names, texts):
    tree = {name: jax.ShapeDtypeStruct((4, 4), "float32") for name in names}
    rules = [(text, P(f"axis{index}")) for index, text in enumerate(texts)]
    matches = mw.match_rules(rules, tree)
    naive = {name: next((i for i, text in enumerate(texts) if re.search(text, name)), None) for name in names}
    assert {leaf.subject.name: leaf.rule for leaf in matches.leaves} == naive
    assert [leaf.subject.name for leaf in matches.leaves] == sorted(names)
    assert list(matches.hits) == [list(naive.values()).count(index) for index in range(len(rules))]
    assert [subject.name for subject in matches.unmatched] == sorted(name for name in names if naive[name] is None)
    for leaf in matches.leaves:
        assert leaf.spec == (None if leaf.rule is None else rules[leaf.rule][1])


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.float32(1), "one element"),
        (3, "one element"),
        (2.5, "one element"),
        (True, "one element"),
        (np.ones((1, 1, 1)), "one element"),
        (jnp.ones(()), "one element"),
        (np.ones((0, 4)), "empty"),
    ],
)
def test_leaves_of_one_element_are_replicated_without_a_rule(leaf, reason):
    [match] = mw.match_rules([("w", P("tp", "dp", "sp", "x"))], {"w": leaf}).leaves
    assert (match.rule, match.spec, match.reason) == (None, P(), reason)


def test_leaves_that_are_not_arrays_are_refused():
    with pytest.raises(mw.TreeError, match=r"leaf `a/b` is a str, .*\nhint: mark static fields"):
        mw.match_partition_rules([(".*", P())], {"a": {"b": "text"}})


def test_structure_is_kept():
    tree = {"a": [np.ones((4, 4)), np.ones(4)], "b": (np.ones(4), None)}
    specs = mw.match_partition_rules([("a/0", P("x", "y")), (".*", P("x"))], tree)
    assert specs == {"a": [P("x", "y"), P("x")], "b": (P("x"), None)}


def test_without_a_mesh_only_the_rank_is_checked():
    assert mw.match_partition_rules([("w", P("anything"))], {"w": np.ones(7)}) == {"w": P("anything")}


def test_current_mesh_drops_optional_axes():
    rules = mw.Rules([("w", P("dp", "tp"))], optional_axes=("tp",))
    tree = {"w": np.ones((8, 8))}
    with jax.set_mesh(mw.create_mesh("dp:8")):
        assert mw.match_partition_rules(rules, tree) == {"w": P("dp", None)}
    assert mw.match_partition_rules(rules, tree) == {"w": P("dp", "tp")}


# --- Flax ---


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)


RULES = [("up/kernel", P("fsdp", "tp")), ("down/kernel", P("tp", "fsdp")), ("bias", P())]


def test_nnx_modules_are_matched_and_placed(assert_placed):
    net, mesh = Net(nnx.Rngs(0)), mw.create_mesh("fsdp:4,tp:2")
    specs = mw.match_partition_rules(RULES, net)
    assert isinstance(specs, Net)
    assert specs.up.kernel.get_value() == P("fsdp", "tp")
    layout = mw.make_layout(RULES, net, mesh)
    placed = layout.shard(net)
    assert_placed(placed.down.kernel.get_value(), mesh, P("tp", "fsdp"), net.down.kernel.get_value())
    x = jnp.ones((2, 8))
    # Devices sum the 8 and 16 products of each dot in another order: at most 24 roundings of values of about 1.
    np.testing.assert_allclose(placed.down(placed.up(x)), net.down(net.up(x)), rtol=0, atol=24 * 2**-24)


def test_nnx_state_alone():
    state = nnx.state(Net(nnx.Rngs(0)))
    assert mw.make_layout(RULES, state, mw.create_abstract_mesh("fsdp:4,tp:2"))["up/kernel"].spec == P("fsdp", "tp")


def test_linen_boxes_are_matched_and_placed(assert_placed):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "other"))
    variables = nn.Dense(16, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 8)))
    mesh = mw.create_mesh("fsdp:4,tp:2")
    layout = mw.make_layout([("^params/kernel$", P("fsdp", "tp")), ("bias", P("tp"))], variables, mesh)
    placed = layout.shard(variables)
    box = placed["params"]["kernel"]
    assert isinstance(box, nn.Partitioned)
    assert box.names == (None, "other")
    assert_placed(box.value, mesh, P("fsdp", "tp"), variables["params"]["kernel"].value)


# --- Weight decay ---


def test_weight_decay_mask():
    params = {"dense": {"kernel": 1.0, "bias": 2.0}, "ln": {"scale": 3.0}, "blocks": [{"bias_net": {"w": 4.0}}]}
    mask = mw.get_weight_decay_mask(["bias$", "^ln/"])(params)
    assert mask == {
        "dense": {"kernel": True, "bias": False},
        "ln": {"scale": False},
        "blocks": [{"bias_net": {"w": True}}],
    }
    assert jax.tree.leaves(mw.get_weight_decay_mask([])(params)) == [True] * 4


def test_weight_decay_mask_takes_a_list():
    with pytest.raises(mw.RuleError, match=r"must be a list of patterns; got 'bias'\.\nhint: pass \['bias'\]"):
        mw.get_weight_decay_mask("bias")
