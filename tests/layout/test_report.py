import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright import P


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


TREE = {
    "embed": {"table": struct(50257, 64)},
    "layers": [{"up": {"kernel": struct(64, 128)}, "norm": struct(64)} for _ in range(3)],
    "pos": struct(4096, 4096),
    "head": struct(64, 10),
}
RULES = [
    ("table", P("fsdp", "tp")),
    ("kernel", P("fsdp", "tp")),
    ("norm", P()),
    ("up/kernel", P("tp")),
    ("no/such/thing", P("tp")),
    ("pos", P()),
]
MESH = mw.create_abstract_mesh("fsdp:4,tp:2")


def test_report_lists_all_problems():
    report = mw.explain_layout(RULES, TREE, MESH)
    assert not report.ok
    assert report.unmatched == ("head",)
    assert [(problem.name, problem.problem.padded) for problem in report.indivisible] == [("embed/table", 50260)]
    assert [rule.index for rule in report.dead_rules] == [4]
    assert [(rule.index, rule.by) for rule in report.shadowed_rules] == [(3, 1)]
    assert [(leaf.name, leaf.bytes_total) for leaf in report.large_replicated] == [("pos", 64 * 2**20)]
    assert report.num_rule_hits == (1, 3, 3, 0, 0, 1)
    assert report.padded == []
    assert [leaf.name for leaf in report.leaves] == [
        *(f"layers/{i}/{name}" for i in range(3) for name in ("norm", "up/kernel")),
        "pos",
    ]


def test_report_as_text():
    text = str(mw.explain_layout(RULES, TREE, MESH))
    for line in (
        "mesh fsdp=4 x tp=2 (8 devices), 9 leaves, 6 rules, ",
        "rule 1 'kernel' -> P('fsdp', 'tp'): 3 leaves",
        "rule 0 'table' -> P('fsdp', 'tp'): 1 leaf",
        "no rule matches 1 leaf:",
        "`embed/table` (rule 0): dim 0 has size 50257; `fsdp` has 4 devices: 50257 % 4 = 1.",
        "pad to 50260, or drop `fsdp` here",
        "rule 3 `up/kernel` is shadowed: rule 1 matches `layers/0/up/kernel` first",
        "rule 4 `no/such/thing` matches no leaf",
        "pos 4096x4096 is replicated on every device: 64.0 MiB each",
    ):
        assert line in text, line


def test_padding_is_a_note_in_the_report():
    report = mw.explain_layout([("table", P("fsdp", "tp")), (".*", P("tp"))], TREE, MESH, pad="table")
    assert report.ok
    assert [leaf.stored_shape for leaf in report.padded] == [(50260, 64)]
    assert "embed/table is padded: 50257x64 (stored 50260x64)" in report.notes()
    assert "embed/table is padded" not in "".join(report.concerns())


def test_report_without_problems():
    report = mw.explain_layout([("w", P("fsdp"))], {"w": struct(8)}, MESH)
    assert report.ok
    assert report.error() is None
    assert str(report).endswith("no problems found.")
    assert mw.make_layout([("w", P("fsdp"))], {"w": struct(8)}, MESH).report().ok


def test_the_same_problem_in_all_layers_is_one_line():
    tree = {"layers": [{"w": struct(6)} for _ in range(5)]}
    with pytest.raises(
        mw.LayoutError, match=r"5 leaves do not fit .*\n  `layers/0/w` and 4 more like it \(rule 0\): dim 0"
    ) as caught:
        mw.make_layout([("w", P("fsdp"))], tree, MESH)
    assert str(caught.value).count("layers/") == 1


def test_optional_axes_are_skipped_and_others_are_not():
    tree = {"w": struct(8, 8)}
    rules = [("w", P("fsdp", "sp"))]
    assert mw.make_layout(mw.Rules(rules, optional_axes=("sp",)), tree, MESH)["w"].spec == P("fsdp", None)
    with pytest.raises(mw.LayoutError, match="names axis 'sp'"):
        mw.make_layout(rules, tree, MESH)


@pytest.mark.parametrize("kind", [np.zeros, lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)])
def test_arrays_and_structs_give_the_same_layout(kind):
    tree = {"w": kind((8, 8), np.float32)}
    assert mw.make_layout([("w", P("fsdp"))], tree, MESH) == mw.make_layout(
        [("w", P("fsdp"))], {"w": struct(8, 8)}, MESH
    )
