import math
import re

import pytest

from meshwright.pages import (
    Bar,
    Figure,
    Lane,
    Level,
    Mark,
    Markup,
    Moment,
    Point,
    Section,
    Series,
    Span,
    Tile,
    TileGrid,
    area_chart,
    command,
    headline,
    join,
    line_chart,
    make_page,
    mesh_picture,
    prose,
    scatter_chart,
    side_by_side,
    stacked_bars,
    stacked_columns,
    table,
    tag,
    tile_picture,
    timeline,
)

STEPS = list(range(1, 101))
NASTY = "</script><script>alert(1)</script>\"'&<b>\x00\ud800"


def visible(words):
    """Returns a text as a page shows it, without control characters and lone surrogates."""
    return words.replace("\x00", "\\x00").replace("\ud800", "\\ud800")


def every_piece():
    """Returns a page with one of every element and with text that attempts HTML injection."""
    losses = [math.nan if step == 50 else 5 / step for step in STEPS]
    charts = [
        line_chart("Loss", [Series("each", STEPS, losses, style="faint"), Series("eval", [20, 80], [1, 2], "dots", 1)]),
        line_chart("Spikes", [Series(NASTY, STEPS, [1000.0 if step == 7 else 1.0 for step in STEPS])], high=2.0),
        line_chart(
            "Log", [Series("norm", STEPS, [10.0 ** (step % 5) for step in STEPS])], log=True, marks=[Mark(9, NASTY)]
        ),
        line_chart("One", [Series("one", [3], [4.0])]),
        line_chart("None", [Series("none", [], [])]),
        stacked_columns("Columns", ["a", "b"], [(0, 10, [1.0, 2.0]), (10, 20, [2.0, 9.0])], high=4.0),
        stacked_bars("Memory", ["weights", "rest"], [Bar("small", [3, 1]), Bar("large", [9, 2])], capacity=8.0),
        timeline(
            "Overlap",
            [Lane("compute", [Span(0, 2, NASTY)]), Lane("links", [Span(1, 3, "gather", 2)], [Moment(2, "m")])],
        ),
        area_chart(
            "Areas",
            [Level(at, at + 1, {NASTY: 3.0, "activations": at % 7}) for at in range(400)],
            x_name="time",
            x_unit="ms",
            capacity=10,
        ),
        scatter_chart(
            "Dots",
            [Point(at, 100 / at, f"{NASTY} {at}", at < 8) for at in range(1, 10)],
            x_name="memory",
            x_unit="GiB",
            y_name="time",
            limit=8,
        ),
        mesh_picture("Mesh", {"dp": 2, "fsdp": 2, "tp": 2}),
        mesh_picture("Large", {"pp": 2, "dp": 16, "fsdp": 64, "tp": 8}),
        tile_picture("Tiles", [TileGrid("", ["0:4", "4:8"], [""], [[Tile("0,1", (0, 1))], [Tile("2,3", (2, 3))]])]),
    ]
    rows = [("a", "9.0 KiB"), ("b", "1.0 MiB"), ("c", "20 B")]
    head = join([tag("h1", NASTY), headline([Figure("loss", "2.1", NASTY)]), command("run --it", label="it")])
    sections = [
        Section("Charts", side_by_side(*charts)),
        Section("Words", join([prose("One.", NASTY, ""), table(["leaf", "bytes"], rows, right=(1,))])),
    ]
    return make_page(NASTY, head=head, sections=sections, foot="end")


def test_a_page_loads_nothing_and_escapes_all_text():
    html = every_piece()
    html.encode("utf-8")
    assert not re.search(r"https?:|\bsrc=|@import|<link|url\((?!#)", html)
    assert "alert(1)</script>" not in html
    assert html.count("<script>") == 1
    assert "default-src 'none'" in html


def test_attributes_are_quoted():
    assert tag("p", title='"><b>', data_x="a&b") == '<p title="&quot;&gt;&lt;b&gt;" data-x="a&amp;b"></p>'


def test_sections_are_in_the_contents():
    html = make_page("t", head=tag("h1", "t"), sections=[Section("Where the time went", Markup(""), short="Time")])
    assert '<a href="#time">Time</a>' in html
    assert '<section id="time" aria-labelledby="time-title"><h2 id="time-title">Where the time went</h2>' in html


@pytest.mark.parametrize("dark", [False, True])
def test_every_piece_is_drawn_in_a_browser(browse, tmp_path, dark):
    path = tmp_path / "page.html"
    path.write_text(every_piece(), encoding="utf-8")
    seen = browse(path, dark=dark, width=390 if dark else 1200)
    assert seen.console == []
    assert seen.found["problems"] == []
    assert seen.found["width"] == (390 if dark else 1200)
    assert seen.found["network"] == []
    # Each step, evaluations and their dots; Spikes, Log, the dot of One and two areas.
    assert seen.found["curves"] == 8
    assert seen.found["paper"] == ("rgb(19, 21, 25)" if dark else "rgb(255, 255, 255)")


def test_a_page_responds_to_keys_and_pointer(browse, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(every_piece(), encoding="utf-8")
    found = browse(path).found
    # All charts with the same x axis read out the same position.
    assert found["last"][0] == "step 100\neach 0.05\neval 2 (at 80)"
    assert found["last"][2] == "step 100\nnorm 1"
    assert found["before"][0].startswith("step 99\neach 0.05051")
    assert found["after_escape"] == []
    assert found["sorted"] == ["1.0 MiB", "9.0 KiB", "20 B"]
    assert found["lit"] == ["0", "0", "0 1"]
    assert found["lit_by_key"] == "1"
    assert found["dark_again"]
    assert found["buttons"] == ["Copy"]
    assert found["zoomed"] == 16
    assert found["finer_ticks"] == ["1.5 s", "1.6 s"]
    assert found["zoomed_by_wheel"]
    assert found["zoomed_out"]
    assert found["tips"] == {
        ".span": [visible(f"{NASTY}: 2 s, from 0 s"), "block"],
        ".plot .point.front": [visible(f"{NASTY} 1: 100, 1 GiB"), "block"],
    }


def test_the_browser_detects_broken_pages(browse, tmp_path):
    """Checks that the tests above would notice loads, errors and bad coordinates."""
    bad = Markup(
        '<img src="http://example.invalid/x.png" onerror="alert(1)">'
        '<figure><svg width="0"><rect x="NaN"/></svg></figure>'
    )
    path = tmp_path / "page.html"
    path.write_text(make_page("t", head=tag("h1", "t"), sections=[Section("Bad", bad)]), encoding="utf-8")
    seen = browse(path)
    assert any("violates the following Content Security Policy" in line for line in seen.console)
    assert any("no size" in problem for problem in seen.found["problems"])
    assert 'x="NaN"' in seen.found["problems"]
