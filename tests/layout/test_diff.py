import jax
import pytest

import meshwright as mw
from meshwright import P


def layout(tree, spec=P("a"), mesh="a:4,b:2", **options):
    tree = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in tree.items()}
    return mw.make_layout([(".*", spec)], tree, mw.create_abstract_mesh(mesh), **options)


W = {"w": ((8, 8), "float32")}


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (layout(W), layout(W), None),
        (layout(W), layout(W, P("a", None)), None),
        (layout(W), layout(W, P("b")), "P('a') -> P('b')"),
        (layout(W), layout({"w": ((8, 4), "float32")}), "shape (8, 8) -> (8, 4)"),
        (layout(W), layout({"w": ((8, 8), "bfloat16")}), "dtype float32 -> bfloat16"),
        (layout(W), layout(W, mesh="a:8,b:2"), "slices of (2, 8) -> (1, 8)"),
        (layout(W), layout({"v": ((8, 8), "float32")}), "removed added"),
        (
            layout({"w": ((6, 8), "float32")}, P("b")),
            layout({"w": ((6, 8), "float32")}, P("b", None), "a:4,b:4", pad=True),
            "stored as (6, 8) -> (8, 8)",
        ),
    ],
)
def test_what_changed(before, after, what):
    diff = before.diff(after)
    assert bool(diff) is (what is not None)
    assert " ".join(change.what for change in diff.changes) == (what or "")
    assert (diff.bytes_before, diff.bytes_after) == (before.bytes_per_device, after.bytes_per_device)
    assert (str(diff) == "no difference") is (what is None)


def test_text_of_a_diff():
    text = str(layout(W).diff(layout(W, P("a", "b"), "a:2,b:2")))
    assert text.splitlines() == [
        "mesh a=4 x b=2 -> a=2 x b=2",
        "leaf  change                 bytes/device",
        "----  ---------------------  ------------",
        "w     P('a') -> P('a', 'b')  64 B -> 64 B",
        "per device: 64 B -> 64 B",
    ]


def test_a_mesh_alone_can_differ():
    diff = layout(W, P()).diff(layout(W, P(), "a:2,b:2"))
    assert diff
    assert diff.changes == ()
    assert str(diff).splitlines()[0] == "mesh a=4 x b=2 -> a=2 x b=2"
