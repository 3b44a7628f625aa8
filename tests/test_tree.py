import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct
from hypothesis import given
from hypothesis import strategies as st
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

import meshwright as mw
from meshwright.tree import key_to_string, named_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    weight: Any
    bias: Any


@struct.dataclass
class Flax:
    inner: Any
    static: str = struct.field(pytree_node=False, default="s")


class Anonymous:
    """A container without keys, so JAX numbers its children."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(Anonymous, lambda node: (node.children, None), lambda _, kids: Anonymous(*kids))


class OddKey:
    def __init__(self, idx):
        self.idx = idx


class Odd:
    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Odd, lambda node: ([(OddKey(f"odd{i}"), c) for i, c in enumerate(node.children)], None), lambda _, kids: Odd(*kids)
)

TREES = {
    "dict": ({"b": 1, "a": {"c": 2}}, ["a/c", "b"]),
    "sequences": ([1, (2, 3)], ["0", "1/0", "1/1"]),
    "int keys": ({0: 1, 10: 2, 2: 3}, ["0", "2", "10"]),
    "named tuple": (Pair(1, Pair(2, 3)), ["left", "right/left", "right/right"]),
    "registered dataclass": ({"d": Registered(1, [2])}, ["d/weight", "d/bias/0"]),
    "flax dataclass": (Flax({"x": 1}), ["inner/x"]),
    "numbered children": ({"n": Anonymous(1, {"x": 2})}, ["n/0", "n/1/x"]),
    "foreign keys": (Odd(1, 2), ["odd0", "odd1"]),
    "None is not a leaf": ({"a": None, "b": 1}, ["b"]),
    "single leaf": (1, [""]),
    "empty": ({}, []),
}


@pytest.mark.parametrize(("tree", "names"), TREES.values(), ids=TREES)
def test_every_container_has_one_spelling(tree, names):
    leaves = jax.tree.leaves(tree)
    assert mw.flatten_tree(tree, sep="/") == dict(zip(names, leaves, strict=True))
    assert list(mw.flatten_tree(tree, sep="/")) == names
    assert [leaf.name for leaf in named_leaves(tree)] == names
    assert list(mw.flatten_tree(tree)) == [tuple(name.split("/")) if name else () for name in names]
    mapped = mw.named_tree_map(lambda name, leaf: f"{name}={leaf}", tree, sep="/")
    assert jax.tree.leaves(mapped) == [f"{name}={leaf}" for name, leaf in zip(names, leaves, strict=True)]
    assert jax.tree.structure(mapped) == jax.tree.structure(tree)


@pytest.mark.parametrize(
    ("key", "name"),
    [(DictKey("a"), "a"), (DictKey(3), "3"), (SequenceKey(4), "4"), (GetAttrKey("w"), "w"), (FlattenedIndexKey(5), "5"),
     (OddKey("k"), "k"), ("plain", "plain")],
)  # fmt: skip
def test_key_to_string(key, name):
    assert key_to_string(key) == name


def test_tree_path_to_string():
    path = (DictKey("block"), SequenceKey(0), GetAttrKey("kernel"))
    assert mw.tree_path_to_string(path) == ("block", "0", "kernel")
    assert mw.tree_path_to_string(path, ".") == "block.0.kernel"
    assert mw.tree_path_to_string((), "/") == ""


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.recursive(st.integers(), lambda x: st.lists(x, max_size=3)),
        max_size=4,
    )
)
def test_flatten_keeps_every_leaf_in_order(tree):
    flat = mw.flatten_tree(tree, sep=".")
    assert list(flat.values()) == jax.tree.leaves(tree)


def test_is_leaf_stops_the_flattening():
    tree = {"a": [1, 2], "b": 3}
    assert mw.flatten_tree(tree, is_leaf=lambda node: isinstance(node, list), sep="/") == {"a": [1, 2], "b": 3}
    lengths = mw.named_tree_map(lambda name, x: len(x), {"a": [1, 2]}, is_leaf=lambda node: isinstance(node, list))
    assert lengths == {"a": 2}


def test_named_tree_map_over_several_trees():
    result = mw.named_tree_map(lambda name, a, b: f"{name}:{a}{b}", {"x": {"y": 1}}, {"x": {"y": 2}}, sep=".")
    assert result == {"x": {"y": "x.y:12"}}


# --- Collisions ---

COLLISIONS = [
    ({"a": {"b": 1}, "a/b": 2}, "a/b"),
    ({"a": [1], "a/0": 2}, "a/0"),
    ({"p": {"a": {"b": 1}, "a/b": 2}}, "p/a/b"),
]


@pytest.mark.parametrize(("tree", "name"), COLLISIONS)
@pytest.mark.parametrize("flatten", [lambda tree: mw.flatten_tree(tree, sep="/"), named_leaves])
def test_two_leaves_with_one_name_are_an_error(tree, name, flatten):
    with pytest.raises(mw.TreeError, match=rf"two leaves are both named '{name}': .* and .*\nhint: rename one"):
        flatten(tree)


@pytest.mark.parametrize(("tree", "name"), COLLISIONS)
def test_collisions_are_seen_by_rules_and_layouts(tree, name):
    tree = jax.tree.map(lambda _: jnp.ones(4), tree)
    for act in (
        lambda: mw.match_partition_rules([(".*", mw.P())], tree),
        lambda: mw.make_layout([(".*", mw.P())], tree, mw.create_abstract_mesh("dp:2")),
    ):
        with pytest.raises(mw.TreeError, match=f"both named '{name}'"):
            act()


# --- tree_apply ---


def test_tree_apply():
    fns = {"a": lambda x: x + 1, "b": [abs, str]}
    assert mw.tree_apply(fns, {"a": 1, "b": [-2, 3]}) == {"a": 2, "b": [2, "3"]}
    assert mw.tree_apply({"a": len}, {"a": {"x": 1, "y": 2}}) == {"a": 2}
    assert mw.tree_apply({}, {}) == {}


@pytest.mark.parametrize(
    ("fns", "tree", "text"),
    [
        ({"a": abs}, {"b": 1}, "differ in structure"),
        ({"a": abs}, {"a": 1, "b": 2}, "differ in structure"),
        ([abs, abs], [1], "differ in structure"),
        ({"a": 3}, {"a": 1}, "must contain functions; found 3"),
    ],
)
def test_tree_apply_refuses_trees_that_do_not_match(fns, tree, text):
    with pytest.raises(mw.TreeError, match=text):
        mw.tree_apply(fns, tree)


def test_tree_apply_calls_apply_many_only_if_all_functions_share_it():
    calls = []

    class Joined:
        def __init__(self, kind):
            self.kind = kind

        def __call__(self, value):
            calls.append(("one", value))
            return value

        @property
        def apply_many(self):
            return KINDS[self.kind]

    def make(kind):
        def many(functions, values):
            calls.append((kind, list(values)))
            return values

        return many

    KINDS = {"x": make("x"), "y": make("y")}
    assert mw.tree_apply([Joined("x"), Joined("x")], [1, 2]) == [1, 2]
    assert mw.tree_apply([Joined("x"), Joined("y")], [1, 2]) == [1, 2]
    assert mw.tree_apply([Joined("x"), abs], [1, -2]) == [1, 2]
    assert calls == [("x", [1, 2]), ("one", 1), ("one", 2), ("one", 1)]


# --- Boxes ---


def test_flax_boxes_add_no_level():
    box = nn.Partitioned(jnp.ones((2, 3)), names=("a", None))
    [leaf] = named_leaves({"dense": {"kernel": box}})
    assert leaf.name == "dense/kernel"
    assert leaf.value.shape == (2, 3)


def test_linen_module_with_boxes_is_named_like_one_without():
    def names(init):
        variables = jax.eval_shape(nn.Dense(4, kernel_init=init).init, jax.random.key(0), jnp.ones((1, 3)))
        return [leaf.name for leaf in named_leaves(variables)]

    plain = nn.initializers.lecun_normal()
    assert names(nn.with_partitioning(plain, (None, "tp"))) == names(plain) == ["params/bias", "params/kernel"]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2)])


@pytest.mark.parametrize("view", [lambda net: net, nnx.state], ids=["module", "state"])
def test_nnx_variables_add_no_level(view):
    net = Net(nnx.Rngs(0))
    names = [leaf.name for leaf in named_leaves(view(net))]
    assert sorted(names) == ["blocks/0/kernel", "blocks/1/kernel", "first/bias", "first/kernel"]
