import re

import jax
import pytest

import meshwright as mw
from meshwright import P


def test_rules_are_a_sequence_of_pairs():
    pairs = [("a", P("dp")), ("b", P()), ("c", P(None, "tp"))]
    rules = mw.Rules(pairs, optional_axes=("tp",))
    assert list(rules) == pairs
    assert (len(rules), rules[0], rules[-1]) == (3, pairs[0], pairs[-1])
    assert list(rules[1:]) == pairs[1:]
    assert rules[1:].optional_axes == ("tp",)
    assert mw.Rules(rules.entries, optional_axes="tp") == rules


def test_optional_axes_are_dropped_only_if_the_mesh_lacks_them():
    rules = mw.Rules([("a", P("dp", "tp")), ("b", P(("dp", "tp"), "sp"))], optional_axes=("tp", "sp"))
    assert rules.on(mw.create_abstract_mesh("dp:2,tp:2,sp:2")) is rules
    assert list(rules.on(mw.create_abstract_mesh("dp:2,sp:2"))) == [("a", P("dp", None)), ("b", P("dp", "sp"))]
    assert list(rules.on(mw.create_abstract_mesh("dp:2"))) == [("a", P("dp", None)), ("b", P("dp", None))]


def test_compiled_patterns_are_accepted():
    assert mw.Rules([(re.compile("(?i)kernel"), P())])[0] == ("(?i)kernel", P())


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("kernel", "not a .regex, PartitionSpec. pair"),
        (("kernel",), "not a .regex, PartitionSpec. pair"),
        (3, "not a .regex, PartitionSpec. pair"),
        ((3, P()), "pattern 3 is not a string"),
        ((re.compile(b"x"), P()), "pattern b'x' is not a string"),
        ((re.compile("x", re.IGNORECASE), P()), r"the flags of .* would be lost\.\nhint: put them in the pattern"),
    ],
)
def test_malformed_rules(rule, text):
    with pytest.raises(mw.RuleError, match=f"^rule 1: .*{text}"):
        mw.Rules([("a", P()), rule])


MAPPING = {"embed": "fsdp", "mlp": ("tp", "sp"), "norm": None}


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("embed", "mlp"), P("fsdp", ("tp", "sp"))),
        ((None, "embed"), P(None, "fsdp")),
        (("norm",), P(None)),
        ((), P()),
        (["mlp"], P(("tp", "sp"))),
    ],
)
@pytest.mark.parametrize("mapping", [MAPPING, list(MAPPING.items())], ids=["dict", "pairs"])
def test_logical_rules(names, spec, mapping):
    rules = mw.logical_rules([("w", names)], mapping, optional_axes=("sp",))
    assert rules[0] == ("w", spec)
    assert rules.optional_axes == ("sp",)
    assert rules.entries[0].logical == tuple(names)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("embd",), r"rule 0 `w`: logical name 'embd' is not in the mapping .*\nhint: did you mean 'embed'"),
        (("zzzzz",), r"\nhint: add 'zzzzz': None to replicate these dims"),
        ("embed", r"must be a tuple of logical names\.\nhint: write"),
        (P("embed"), "must be a tuple of logical names"),
        (("embed", "embed"), "'embed' and 'embed' both map to mesh axis 'fsdp'"),
    ],
)
def test_logical_names_are_checked(names, text):
    with pytest.raises(mw.RuleError, match=text):
        mw.logical_rules([("w", names)], MAPPING)


def test_logical_names_show_in_the_report():
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    rules = mw.logical_rules([("w", ("embed", None))], MAPPING)
    report = mw.explain_layout(rules, tree, mw.create_abstract_mesh("fsdp:4"))
    assert "rule 0 'w' -> P('fsdp', None): 1 leaf  (from ('embed', None))" in str(report)
