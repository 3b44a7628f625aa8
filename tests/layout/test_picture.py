import itertools
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import meshwright as mw
from meshwright import P
from meshwright.layout.leaf import make_leaf
from meshwright.layout.picture import device_list, tile_panels

MESHES = ["a:8", "a:4,b:2", "a:2,b:2,c:2", "b:1,a:8", "a:2,b:4"]


@st.composite
def cases(draw):
    text = draw(st.sampled_from(MESHES))
    mesh = mw.create_mesh(text)
    axes = draw(st.permutations(list(mesh.shape)))
    rank = draw(st.integers(0, 4))
    entries, used = [], 0
    for _ in range(draw(st.integers(0, rank))):
        count = draw(st.integers(0, len(axes) - used))
        entries.append(tuple(axes[used : used + count]) or None)
        used += count
    spec = P(*entries)
    ways = [int(np.prod([mesh.shape[axis] for axis in entry or ()])) for entry in entries]
    shape = tuple(draw(st.integers(1, 3)) * (ways[dim] if dim < len(ways) else 1) for dim in range(rank))
    return mesh, make_leaf("w", shape, np.dtype("float32"), spec, dict(mesh.shape))


def tiles_by_jax(mesh, leaf):
    """Returns the devices (by position in the mesh) of each slice, according to JAX."""
    number = {device: index for index, device in enumerate(mesh.devices.flat)}
    held = {}
    for device, index in NamedSharding(mesh, leaf.spec).devices_indices_map(leaf.shape).items():
        start = tuple(part.indices(size)[0] for part, size in zip(index, leaf.shape, strict=True))
        held.setdefault(start, []).append(number[device])
    return {start: tuple(sorted(devices)) for start, devices in held.items()}


@given(cases())
def test_tiles_are_where_jax_puts_them(case):
    mesh, leaf = case
    panels = tile_panels(leaf, mesh)
    cells = [cell for panel in panels for row in panel.cells for cell in row]
    # Every device holds exactly one tile.
    assert sorted(itertools.chain(*cells)) == list(range(8))
    # In reading order, the cells are JAX's tiles, sorted by their start.
    expected = tiles_by_jax(mesh, leaf)
    assert cells == [expected[start] for start in sorted(expected)]


@given(cases())
def test_labels_are_the_slices(case):
    mesh, leaf = case
    starts = {start for panel in tile_panels(leaf, mesh) for start in panel.row_labels + panel.column_labels if start}
    expected = {
        f"{start}:{start + part}"
        for dim, (size, part) in enumerate(zip(leaf.shape, leaf.shard_shape, strict=True))
        if part < size
        for start in range(0, size, part)
    }
    outer = {label for label in expected if label not in starts}
    assert starts <= expected
    if sum(part < size for size, part in zip(leaf.shape, leaf.shard_shape, strict=True)) <= 2:
        assert not outer


def layout_of(shape, spec, mesh="a:4,b:2"):
    return mw.make_layout([("w", spec)], {"w": jax.ShapeDtypeStruct(shape, "float32")}, mw.create_abstract_mesh(mesh))


def test_terminal_picture():
    assert layout_of((8, 4), P("a", "b")).picture("w") == (
        "w 8x4, P('a', 'b') on a=4 x b=2: 8 tiles of 2x2, each on one device\n"
        "      0:2   2:4\n"
        "    +-----+-----+\n"
        "0:2 |  0  |  1  |\n"
        "    +-----+-----+\n"
        "2:4 |  2  |  3  |\n"
        "    +-----+-----+\n"
        "4:6 |  4  |  5  |\n"
        "    +-----+-----+\n"
        "6:8 |  6  |  7  |\n"
        "    +-----+-----+"
    )


@pytest.mark.parametrize(
    ("shape", "spec", "heading", "cells"),
    [
        ((), P(), "w scalar, P() on a=4 x b=2: 1 tile of scalar, each on 8 devices", ["0-7"]),
        ((8,), P("b"), "w 8, P('b') on a=4 x b=2: 2 tiles of 4, each on 4 devices", ["0,2,4,6", "1,3,5,7"]),
        ((8, 3), P("a"), "w 8x3, P('a') on a=4 x b=2: 4 tiles of 2x3, each on 2 devices", ["0,1", "2,3", "4,5", "6,7"]),
        (
            (2, 2, 8),
            P("b", None, "a"),
            "w 2x2x8, P('b', None, 'a') on a=4 x b=2: 8 tiles of 1x2x2, each on one device",
            "01234567",
        ),
    ],
)
def test_headings_and_cells(shape, spec, heading, cells):
    for svg in (False, True):
        picture = layout_of(shape, spec).picture("w", svg=svg)
        text = "".join(ElementTree.fromstring(picture).itertext()) if svg else picture
        assert all(part in text for part in (heading.split(": ") if svg else [heading]))
        assert all(cell in text for cell in cells)


def test_outer_dims_become_panels():
    text = layout_of((2, 2, 2), P("a", "b", "c"), "a:2,b:2,c:2").picture("w")
    assert "dim 0 part 0 of 2" in text
    assert "dim 0 part 1 of 2" in text


def test_large_meshes_are_elided():
    layout = layout_of((64, 64), P("a", "b"), "a:64,b:64")
    text = layout.picture("w")
    assert ".." in text
    assert len(text.splitlines()) < 60
    assert len(layout.picture("w", svg=True)) < 100_000
    many = layout_of((32, 2, 2), P("a", "b", "c"), "a:32,b:2,c:2").picture("w")
    assert "... and 16 more panels" in many


def test_svg_is_well_formed_and_escapes_names():
    name = 'a<b>&"c"'
    tree = {name: jax.ShapeDtypeStruct((8, 8), "float32")}
    layout = mw.make_layout([(".*", P("a", "b"))], tree, mw.create_abstract_mesh("a:4,b:2"))
    root = ElementTree.fromstring(layout.picture(name, svg=True))
    assert root.tag.endswith("svg")
    assert root.get("aria-label").startswith(name)
    cells = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert [cell for cell in cells if cell.isdigit()] == list("01234567")


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([0], "0"),
        ([0, 1], "0,1"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 4, 6], "0,2,4,6"),
        ([0, 1, 2, 8], "0-2,8"),
        (range(0, 20, 2), "0,2,4,.. (10)"),
    ],
)
def test_device_list(devices, text):
    assert device_list(list(devices)) == text
