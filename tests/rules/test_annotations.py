"""Rules from the annotations of Flax models: the same specs as Flax gives, explained by the layout."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import meshwright as mw
from meshwright import P
from meshwright.rules import rules_from_annotations
from meshwright.rules.annotations import is_axis_table

TABLE = {"embed": "fsdp", "mlp": "tp", "layers": None}


class Block(nn.Module):
    partition: object

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        h = nn.Dense(16, kernel_init=self.partition(init, ("embed", "mlp")))(x)
        return nn.Dense(x.shape[-1], kernel_init=self.partition(init, ("mlp", "embed")))(nn.relu(h))


class Stack(nn.Module):
    partition: object

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Block(self.partition)(x)
        return x


def shapes(module):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.ones((2, 8)))["params"]


def specs(params, rules, mesh):
    return mw.flatten_tree(mw.match_partition_rules(rules, nn.meta.unbox(params), mesh=mesh), sep="/")


@pytest.mark.parametrize("table", [TABLE, list(TABLE.items())])
def test_specs_equal_those_of_flax(table):
    params = shapes(Stack(nn.with_logical_partitioning))
    mesh = mw.create_abstract_mesh("fsdp:2,tp:2")
    mine = specs(params, rules_from_annotations(params, table, others=[("bias", P())]), mesh)
    theirs = nn.logical_to_mesh(nn.get_partition_spec(params), list(TABLE.items()))
    for name, spec in mw.flatten_tree(theirs, sep="/", is_leaf=lambda node: isinstance(node, P)).items():
        assert tuple(mine[name]) == tuple(spec), name


def test_layers_share_a_rule_and_the_layout_names_the_annotation():
    params = shapes(Stack(nn.with_logical_partitioning))
    rules = rules_from_annotations(params, TABLE, others=[("bias", P())])
    assert [text for text, _ in rules] == [r"^Block_\d+/Dense_0/kernel$", r"^Block_\d+/Dense_1/kernel$", "bias"]
    layout = mw.make_layout(rules, nn.meta.unbox(params), mw.create_abstract_mesh("fsdp:2,tp:2"))
    leaf = layout["Block_2/Dense_1/kernel"]
    assert leaf.spec == P("tp", "fsdp")
    assert "annotation of Block_" in leaf.why
    assert "('mlp', 'embed')" in str(layout)
    assert "annotation of Block_" in str(layout.report())


def test_a_mesh_may_lack_axes_of_the_annotations():
    params = shapes(Block(nn.with_logical_partitioning))
    rules = rules_from_annotations(params, TABLE, others=[("bias", P())])
    assert specs(params, rules, mw.create_abstract_mesh("dp:8"))["Dense_0/kernel"] == P(None, None)
    assert specs(params, rules, mw.create_abstract_mesh("tp:8"))["Dense_0/kernel"] == P(None, "tp")


def test_partitioned_names_are_mesh_axes():
    init = nn.with_partitioning(nn.initializers.ones, ("fsdp", ("tp", "sp")))
    params = shapes(nn.Dense(8, kernel_init=init, use_bias=False))
    rules = rules_from_annotations(params)
    assert rules[0] == ("^kernel$", P("fsdp", ("tp", "sp")))
    assert specs(params, rules, mw.create_abstract_mesh("fsdp:2,tp:2"))["kernel"] == P("fsdp", "tp")


def test_an_unknown_axis_stays_an_error():
    init = nn.with_partitioning(nn.initializers.ones, ("fsdp", "mlp"))
    params = shapes(nn.Dense(8, kernel_init=init, use_bias=False))
    with pytest.raises(mw.LayoutError, match=r"names axis 'mlp'; the mesh has axes: fsdp"):
        specs(params, rules_from_annotations(params), mw.create_abstract_mesh("fsdp:2"))
    assert rules_from_annotations(params, {"mlp": "tp", "fsdp": "fsdp"})[0][1] == P("fsdp", "tp")
    assert "mlp" in rules_from_annotations(params, optional_axes=("mlp",)).optional_axes


def test_an_earlier_pair_has_priority():
    init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
    params = shapes(nn.Dense(8, kernel_init=init, use_bias=False))
    table = [("mlp", "tp"), ("embed", "tp"), ("embed", "fsdp")]
    rules = rules_from_annotations(params, table)
    assert rules[0][1] == P("fsdp", "tp")
    assert rules[0][1] == nn.logical_to_mesh_axes(("embed", "mlp"), table)
    once = rules_from_annotations(params, [("embed", "tp"), ("mlp", "tp")])
    assert once[0][1] == P("tp", None)
    assert "dim 1 stays whole, because its axis splits another dim" in once.entries[0].source


def test_nnx_variables_and_their_own_tables():
    def linear(**metadata):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "mlp"), **metadata)
        return nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))), nnx.Param)

    with nnx.use_eager_sharding(False):
        plain, local = linear(), linear(sharding_rules=(("embed", "fsdp"), ("mlp", "tp")))
    assert rules_from_annotations(plain, TABLE)[0] == ("^kernel$", P("fsdp", "tp"))
    assert rules_from_annotations(local)[0] == ("^kernel$", P("fsdp", "tp"))
    assert len(rules_from_annotations(plain)) == 1  # the bias has no annotation


def logical(names=("embed", "mlp")):
    return shapes(nn.Dense(8, kernel_init=nn.with_logical_partitioning(nn.initializers.ones, names), use_bias=False))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: rules_from_annotations(logical()),
            r"annotation of `kernel`: 'embed' is a logical name, and there is no table that maps it to a mesh axis\.\n"
            r"hint: pass a table as rules, for example rules=\{'embed': \"fsdp\"\}\.",
        ),
        (
            lambda: rules_from_annotations(logical(("embed", "mpl")), TABLE),
            r"logical name 'mpl' is not in the table \(embed, mlp, layers\)\.\nhint: did you mean 'mlp'\?",
        ),
        (
            lambda: rules_from_annotations(logical(("embed", "other")), TABLE),
            r"hint: add 'other': None to replicate these dims\.",
        ),
        (
            lambda: rules_from_annotations({"kernel": jnp.ones((2, 2))}, TABLE),
            r"rules is a table of axes \(embed, mlp, layers\), but no leaf is annotated\.\nhint: annotate the model",
        ),
        (lambda: rules_from_annotations(logical(), {1: "fsdp"}), r"has the name 1, which is not a string"),
        (lambda: rules_from_annotations(logical(), {"embed": 3}), r"table of axes maps 'embed' to 3\.\nhint: map it"),
    ],
)
def test_errors(make, text):
    with pytest.raises(mw.RuleError, match=text):
        make()


def test_tables_and_rules_are_told_apart():
    assert is_axis_table(TABLE)
    assert is_axis_table([("embed", None), ("mlp", ("tp", "sp"))])
    for rules in ([], None, [("kernel", P())], mw.Rules([("kernel", P())])):
        assert not is_axis_table(rules)
