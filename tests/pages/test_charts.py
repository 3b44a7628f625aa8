"""Text and coordinates of charts, read from their HTML; test_page.py opens them in a browser."""

import itertools
import math
import re
from pathlib import Path

import pytest

import meshwright.pages
from meshwright.pages import (
    Bar,
    Lane,
    Level,
    Mark,
    Moment,
    Series,
    Span,
    area_chart,
    line_chart,
    stacked_bars,
    stacked_columns,
    timeline,
)  # fmt: skip

STEPS = list(range(1, 11))


def curves(html):
    """Returns the points of every curve: x from 0 to 10000, y in pixels."""
    lines = re.findall(r'<path d="([^"]*)" class="curve', html.split("</figcaption>")[1])
    return [
        [tuple(map(float, point.split())) for point in re.findall(r"[ML]([-\d.]+ [-\d.]+)", line)] for line in lines
    ]


# --- Lines ---


def test_a_line_passes_through_its_values():
    (points,) = curves(line_chart("t", [Series("a", [0, 5, 10], [0.0, 4.0, 2.0])], low=0.0, high=4.0, height=100))
    assert points == [(0, 100), (5000, 0), (10000, 50)]


def test_a_log_axis_spaces_powers_evenly():
    (points,) = curves(line_chart("t", [Series("a", [0, 1, 2], [1.0, 10.0, 100.0])], log=True, height=100))
    assert [y for _, y in points] == [100, 50, 0]


def test_gaps_are_not_drawn_over():
    html = line_chart("t", [Series("a", STEPS, [1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0, 1.0, 1.0, 1.0])])
    assert re.search(r'<path d="M[^M]*M[^L"]*M[^"]*" class="curve', html)
    assert html.count('class="dot') == 1  # the value between two gaps


def test_values_above_the_frame_are_marked_and_counted():
    html = line_chart("t", [Series("a", STEPS, [50.0 if step in (3, 4) else 1.0 for step in STEPS])], high=2.0)
    assert "2 points lie above the frame (▲), the highest at 50." in html
    assert html.count('class="overflow"') == 2


def test_end_labels_of_curves_do_not_overlap():
    series = [Series(name, STEPS, [1.0 + 0.001 * i] * 10, tone=i) for i, name in enumerate("abc")]
    labels = [float(y) for y in re.findall(r'<text x="100%" dx="8" y="([\d.]+)"', line_chart("t", series))]
    assert len(labels) == 3
    assert all(b - a >= 16 for a, b in itertools.pairwise(labels))


def test_a_chart_describes_its_curves():
    html = line_chart("Loss", [Series("train", STEPS, [11.0 - step for step in STEPS])])
    assert "Loss. train: 10 at step 1, 1 at 10, lowest 1 at 10, highest 10 at 1." in html


def test_a_chart_has_a_table_of_its_numbers():
    html = line_chart("t", [Series("a", range(100), range(100)), Series("eval", [20, 70], [1.25, 0.5])])
    table = html.partition("<details")[2]
    assert "of 100 drawn points" in table
    assert '<td class="number">20</td><td class="number">20</td><td class="number">1.25</td>' in table


def test_marks_have_labels():
    html = line_chart("t", [Series("a", STEPS, STEPS)], marks=[Mark(5, "resumed"), Mark(7, "saved", tall=False)])
    assert ">resumed</text>" in html
    assert "saved at 7" in html
    assert ">saved</text>" not in html


@pytest.mark.parametrize("series", [[], [Series("a", [], [])], [Series("a", [1, 2], [math.nan, math.inf])]])
def test_a_chart_without_values_says_so(series):
    assert "No data recorded." in line_chart("t", series)


# --- Bars ---


def widths(html):
    return [float(width) for width in re.findall(r'<rect x="[\d.]+%" y="\d+" width="([\d.]+)%"', html)]


def test_bars_are_on_one_scale():
    assert widths(stacked_bars("t", ["a", "b"], [Bar("x", [1, 3]), Bar("y", [2, 0])])) == [25, 75, 50]


def test_a_bar_over_capacity_shows_the_excess():
    html = stacked_bars(
        "t", ["a", "b"], [Bar("fits", [3, 1]), Bar("not", [9, 2])], capacity=8.0, show=lambda v: f"{v:g} GiB"
    )
    assert "fits: 4 GiB, 4 GiB free (50.0%)" in html
    assert "not: 11 GiB, 3 GiB over" in html
    assert html.count('class="capacity"') == 2
    assert html.count("bar-name over") == 1


def test_a_bar_far_below_capacity_can_be_seen():
    html = stacked_bars("Memory", ["a", "b"], [Bar("x", [3.0, 1.0])], capacity=1000, capacity_label="chip has")
    assert re.findall(r'width="([\d.]+)%" height="30"', html) == ["75.000", "25.000"]
    assert "chip has 1,000, far to the right" in html
    assert 'class="capacity"' not in html
    assert "996 free (99.6%)" in html


def test_the_remark_of_a_bar_follows_its_total():
    html = stacked_bars("Time", ["a"], [Bar("x", [3.0], "(2 to 4)"), Bar("y", [3.0], "(2 to 5)")])
    assert "<b>x</b> 3 (2 to 4)</p>" in html
    assert ">x</th>" in html


def test_one_bar_names_its_parts_with_their_shares():
    html = stacked_bars("t", ["step", "data", "none"], [Bar("", [3.0, 1.0, 0.0])])
    assert "step 3 (75.0%)" in html
    assert "data 1 (25.0%)" in html
    assert "none 0 (0%)" in html


def test_parts_of_a_column_are_stacked():
    html = stacked_columns("t", ["a", "b"], [(0, 1, [1.0, 3.0]), (1, 2, [2.0, 0.0])], high=4.0, height=100)
    boxes = re.findall(r'<rect x="([\d.]+)%" y="([\d.]+)" width="([\d.]+)%" height="([\d.]+)"', html)
    assert [tuple(map(float, box)) for box in boxes] == [(3, 75, 44, 25), (3, 0, 44, 75), (53, 50, 44, 50)]


def test_a_column_above_the_frame_is_clipped_marked_and_counted():
    html = stacked_columns("t", ["a"], [(0, 1, [1.0]), (1, 2, [20.0])], high=2.0)
    assert "One column is higher than the frame (▲), up to 20." in html


# --- Timelines ---


def test_a_timeline_starts_at_its_earliest_span():
    html = timeline("t", [Lane("a", [Span(100, 150, "x")]), Lane("b", [Span(125, 200, "y")], [Moment(200, "end")])])
    spans = re.findall(r'x="([\d.]+)%" width="([\d.]+)%" y="\d+" height="24" rx="3"', html)
    assert spans == [("0.000", "50.000"), ("25.000", "75.000")]
    assert 'x="100.000%" y=' in html
    assert "a: x from 0 s to 50 s. b: y from 25 s to 1 min 40 s; end at 1 min 40 s." in html


def test_short_spans_keep_their_color():
    """A border of one pixel would hide the color of a span that is as short, and a pattern would cut it."""
    html = timeline("t", [Lane("a", [Span(0, 0.3, "a"), Span(0.3, 50, "b"), Span(50, 100, "c")])])
    assert re.findall(r'class="(span[^"]*)"><title>(\w)', html) == [
        ("span thin thin-0", "a"),
        ("span", "b"),
        ("span", "c"),
    ]
    css = Path(meshwright.pages.__file__).with_name("page.css").read_text()
    assert ".lanes svg:not(.zoomed) .thin { stroke: none; }" in css
    assert all(f"svg:not(.zoomed) .thin-{tone} {{ fill: var(--c{tone}); }}" in css for tone in range(6))


def test_a_label_that_is_too_long_is_cut_at_its_comma():
    html = timeline("t", [Lane("a", [Span(0, 15, "attention, backward"), Span(15, 100, "mlp, backward")])])
    assert re.findall(r'class="part-label[^"]*">([^<]*)<', html) == ["attention", "mlp, backward"]


def test_an_empty_timeline_says_so():
    assert "No data recorded." in timeline("t", [Lane("a")])


def test_a_peak_in_the_middle_has_its_label_around_it():
    """On a phone, a label on one side would leave the page."""
    levels = [Level(0, 2, {"a": 1.0}), Level(2, 4, {"a": 9.0}), Level(4, 6, {"a": 1.0})]
    page = area_chart("Memory", levels, x_name="time", x_unit="s", show_x="{:g} seconds".format)
    assert re.search(r'<text x="50.00%" dx="0"[^>]* class="level-label middle">peak 9 at 3 seconds<', page)
    # The label's halo must not cover the dot of the peak, whose radius is 4.5.
    dot = float(re.search(r'cy="([\d.]+)" r="4.5" class="peak-dot"', page)[1])
    assert float(re.search(r'y="([-\d.]+)" class="level-label middle"', page)[1]) <= dot - 4.5 - 4


def test_a_flat_peak_has_no_place():
    levels = [Level(0, 98, {"a": 5}), Level(98, 100, {"a": 1})]
    assert "peak 5 nearly all the time" in area_chart("m", levels, x_name="time", x_unit="ms")
    assert "peak 5 at 45 ms" in area_chart("m", [Level(0, 90, {"a": 5}), levels[1]], x_name="time", x_unit="ms")


@pytest.mark.parametrize(("peak", "is_below"), [(97.0, True), (60.0, False), (102.0, False)])
def test_labels_of_close_lines_do_not_overlap(peak, is_below):
    """The label of the lower line is below it, and the other one above its line."""
    page = area_chart("Memory", [Level(0, 1, {"state": peak})], x_name="time", x_unit="ms", capacity=100.0)
    lines = {kind: float(y) for y, kind in re.findall(r'y1="([\d.]+)"[^>]*class="(peak|capacity)-line"', page)}
    texts = {said: float(y) for y, said in re.findall(r'<text[^>]* y="([\d.]+)"[^>]*>(peak|capacity)', page)}
    assert (texts["peak"] > lines["peak"]) == is_below
    assert abs(texts["peak"] - texts["capacity"]) > 12
