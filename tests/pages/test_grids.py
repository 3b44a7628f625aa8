import re

import pytest

from meshwright.mesh.string import parse_mesh
from meshwright.pages import Tile, TileGrid, mesh_picture, tile_picture
from meshwright.pages.colors import FILLS, NUM_TONES, fills_of
from meshwright.pages.grids import MAX_LATTICE_WIDTH, shown
from meshwright.plan.output.axes_picture import axes_picture, machine_axes
from meshwright.plan.target import parse_target


def devices(html):
    return [int(number) for number in re.findall(r'class="node" data-devices="(\d+)"', html)]


@pytest.mark.parametrize(
    "axes",
    [{"dp": 1}, {"fsdp": 8}, {"dp": 2, "tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}, {"pp": 2, "dp": 2, "fsdp": 2, "tp": 2}],
)
def test_every_device_of_a_small_mesh_is_drawn_once(axes):
    total = 1
    for size in axes.values():
        total *= size
    assert sorted(devices(mesh_picture("m", axes))) == list(range(total))


def test_devices_are_placed_by_their_axis_indices():
    html = mesh_picture("m", {"dp": 2, "fsdp": 2, "tp": 2}, names=[f"chip {i}" for i in range(8)])
    assert "device 5: dp 1, fsdp 0, tp 1, chip 5" in html
    places = {
        int(n): (int(x), int(y)) for n, x, y in re.findall(r'data-devices="(\d+)".*?<rect x="(\d+)" y="(\d+)"', html)
    }
    assert places[1][0] > places[0][0]  # tp runs right
    assert places[1][1] == places[0][1]
    assert places[2][1] > places[0][1]  # fsdp runs down
    assert places[2][0] == places[0][0]
    assert places[4][0] > places[0][0]  # dp runs backward: right and up
    assert places[4][1] < places[0][1]


def test_all_axes_are_named_including_size_1():
    html = mesh_picture("m", {"dp": 1, "fsdp": 4, "tp": 2})
    assert "tp →" in html
    assert "fsdp ↓" in html
    assert "dp: 1" in html
    assert "8 devices" in html


def test_a_large_mesh_shows_its_first_and_last_devices():
    html = mesh_picture("m", {"pp": 32, "dp": 16, "fsdp": 64, "tp": 8})
    assert "262,144 devices" in html
    assert min(devices(html)) == 0
    assert max(devices(html)) == 262_143
    assert len(html) < 300_000
    assert "more" in html


@pytest.mark.parametrize("axes", [{"x": 16, "y": 16, "z": 16}, {"x": 4, "y": 4, "z": 8}, {"x": 8, "y": 8, "z": 16}])
def test_a_torus_fits_the_column_of_text(axes):
    picture = str(mesh_picture("Torus", axes, node="chip", runs={}))
    widths = re.findall(r'<svg width="(\d+)"[^>]*class="lattice"', picture)
    assert 800 < int(widths[0]) <= MAX_LATTICE_WIDTH


def test_tiles_name_the_devices_that_hold_them():
    tiles = [[Tile("0,1", (0, 1)), Tile("2,3", (2, 3))]]
    html = tile_picture("w", [TileGrid("", [""], ["0:4", "4:8"], tiles)], note="two tiles.")
    assert html.count('class="tile"') == 2
    assert 'data-devices="2 3"' in html
    assert "on devices 2 3" in html
    assert ">4:8</text>" in html


@pytest.mark.parametrize(("count", "limit"), [(5, 8), (9, 8), (100, 3), (2, 1)])
def test_shown_keeps_first_and_last(count, limit):
    found = shown(count, limit)
    assert len(found) <= max(limit, 2)
    assert found[-1] == count - 1 or limit == 1


def test_an_axis_has_one_color_in_every_picture():
    """Also in the picture of where the axes run, whatever their order and number."""
    spec = parse_mesh("fsdp:4,tp:2")
    where = axes_picture(parse_target("h200:1x8"), spec)
    for axis, tone in (("fsdp", FILLS["fsdp"]), ("tp", FILLS["tp"])):
        assert f"url(#tone-{tone})" in where
        for axes in ({"fsdp": 4, "tp": 2}, {"tp": 2, "fsdp": 4}, {"pp": 2, axis: 4}):
            assert re.search(rf'class="axis-name[^"]* ink-{tone}">{axis} ', mesh_picture("m", axes))
    machine = mesh_picture("Torus", {"x": 4, "y": 8}, node="chip", runs={})
    assert "line-" not in machine
    assert ">3,7</text>" in machine


def test_a_machine_has_the_colors_of_the_axes_that_run_along_it():
    target, spec = parse_target("v5p:4x4x8"), parse_mesh("experts:4,fsdp:8,tp:4")
    runs = machine_axes(target, spec)
    assert runs == {"x": ("tp",), "y": ("experts",), "z": ("fsdp",)}
    split = ["experts", "fsdp", "tp"]
    machine = mesh_picture("Torus", {"x": 4, "y": 4, "z": 8}, node="chip", runs=runs, mesh_axes=split)
    fills = dict(zip(split, fills_of(split), strict=True))
    for dim, axis in zip("xyz", ("tp", "experts", "fsdp"), strict=True):
        assert re.search(rf'class="axis-name[^"]* ink-{fills[axis] % NUM_TONES}">{dim} ', machine)
        assert f"{dim}: {4 if dim != 'z' else 8} ({axis})" in machine
    # A direction along which several axes run has no color.
    runs = machine_axes(parse_target("h200:2x8"), parse_mesh("fsdp:8,tp:2"))
    assert runs == {"gpu": ("tp", "fsdp"), "host": ("fsdp",)}
    hosts = mesh_picture("Hosts", {"host": 2, "gpu": 8}, runs=runs, mesh_axes=["fsdp", "tp"])
    assert 'class="axis-name">gpu →' in hosts
    assert "gpu: 8 (tp, fsdp)" in hosts


def test_labels_that_would_be_too_small_on_a_phone_are_left_out():
    def picture(text, columns):
        labels = [f"{1024 * place}:{1024 * place + 1024}" for place in range(columns)]
        return tile_picture("w", [TileGrid("", ["0:4"], labels, [[Tile(text, (0, 1))] * columns])])

    for text in ("0,4,8,12", "0,16,32,.. (16)"):
        html = picture(text, 16)
        shown = len(text) <= 12
        assert (f">{text}</text>" in html) == shown
        assert ("see its devices" in html) != shown
        assert "on devices 0 1" in html
        assert int(re.search(r'<svg width="(\d+)"', html)[1]) * 9 <= 12.5 * 358
