"""One table of colors: every part that pages draw is in it, and no two colors look alike to anyone."""

import itertools
import re
from pathlib import Path

import pytest

import meshwright.pages
from meshwright.loop.logging.goodput import CATEGORIES
from meshwright.loop.report.story import PARTS as RUN_PARTS
from meshwright.pages import Bar, stacked_bars, stacked_columns
from meshwright.pages.colors import FILLS, NUM_FILLS, fills_of
from meshwright.plan.compiled.memory_trace import PARTS as TRACED
from meshwright.plan.costs.saved_activations import _KINDS, REST
from meshwright.plan.output.schedule_picture import KINDS
from meshwright.plan.output.summary import PART_NAMES

MEMORY = ("bookkeeping", "ticks", "gradients of a tick", "layers of the stages", "rest", *TRACED)
# Linear RGB as people with each color blindness see it (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHTS = {
    "all colors": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


ACTIVATIONS = ("residual stream", REST, *(name for name, _ in _KINDS))


@pytest.mark.parametrize("names", [MEMORY, tuple(PART_NAMES.values()), KINDS, CATEGORIES, RUN_PARTS, ACTIVATIONS])
def test_every_part_is_in_the_table_with_its_own_fill(names):
    assert set(names) <= FILLS.keys()
    assert len(set(fills_of(names))) == len(names)


def test_a_part_keeps_its_fill_whatever_it_is_drawn_with():
    alone = stacked_bars("t", ["activations"], [Bar("", [1])])
    beside = stacked_bars("t", ["new", "parameters", "activations"], [Bar("", [1, 2, 3])])
    columns = stacked_columns("t", ["parameters", "activations"], [(0, 1, [1, 1])])
    fill = f"url(#tone-{FILLS['activations']})"
    assert all(fill in html for html in (alone, beside, columns))
    assert len(set(fills_of(["new", "parameters", "activations", "other new"]))) == 4
    assert len(set(fills_of([f"part {number}" for number in range(NUM_FILLS)]))) == NUM_FILLS


def palettes():
    css = Path(meshwright.pages.__file__).with_name("page.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", css, flags=re.S):
        yield [re.search(rf"--c{tone}: (#\w+)", block)[1] for tone in range(6)], re.search(r"--paper: (#\w+)", block)[1]


def linear(color):
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(color, sight):
    x, y, z = times(XYZ, [min(1.0, max(0.0, part)) for part in times(SIGHTS[sight], linear(color))])
    x, y, z = ((part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116) for part in (x / 0.9505, y, z / 1.089))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def luminance(color):
    return times(XYZ, linear(color))[1]


@pytest.mark.parametrize("sight", SIGHTS)
def test_colors_differ_on_every_paper_for_everyone(sight):
    """A distance of 2 in L*a*b* is just visible side by side; 20 is told apart across a chart."""
    for colors, paper in palettes():
        for one, other in itertools.combinations(colors, 2):
            apart = sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight), strict=True)) ** 0.5
            assert apart > 20, (one, other)
        for color in colors:
            dark, light = sorted((luminance(color), luminance(paper)))
            assert (light + 0.05) / (dark + 0.05) > 3, color
