import jax
import pytest

import meshwright as mw
from meshwright import P
from meshwright.layout.leaf import fold_names, leaf_rows, text_table


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["w"], "w"),
        (["l/0/w", "l/1/w"], "l/{0..1}/w (x2)"),
        (["l/0/w", "l/2/w"], "l/{0,2}/w (x2)"),
        ([f"l/{i}/w" for i in (0, 2, 4, 6, 8)], "l/*/w (x5)"),
        (["a/0/b/3", "a/1/b/3"], "a/{0..1}/b/3 (x2)"),
        (["a/0/0", "a/0/1", "a/1/0", "a/1/1"], "a/{0..1}/{0..1} (x4)"),
    ],
)
def test_fold_names(names, folded):
    assert fold_names(names) == folded


def test_only_equal_siblings_share_a_row():
    tree = {"l": [{"w": jax.ShapeDtypeStruct((8, 4 if i < 3 else 8), "float32")} for i in range(5)]}
    layout = mw.make_layout([("w", P("a"))], tree, mw.create_abstract_mesh("a:4"))
    assert leaf_rows(layout.leaves) == [
        ("l/{0..2}/w (x3)", "8x4", "float32", "0 `w`", "P('a')", "96 B"),
        ("l/{3..4}/w (x2)", "8x8", "float32", "0 `w`", "P('a')", "128 B"),
    ]
    assert [row[0] for row in leaf_rows(layout.leaves, collapse=False)] == [f"l/{i}/w" for i in range(5)]


def test_columns_are_aligned():
    text = text_table(("leaf", "bytes/device"), [("a", "1 B"), ("long name", "1024 B")])
    assert text.splitlines() == [
        "leaf       bytes/device",
        "---------  ------------",
        "a                   1 B",
        "long name        1024 B",
    ]
