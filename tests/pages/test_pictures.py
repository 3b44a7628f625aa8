"""Images and heat maps."""

import pytest

from meshwright.pages import Picture, encode_png, heat_map, image_grid

from .png_file import decode


@pytest.mark.parametrize(("channels", "color"), [(1, 0), (3, 2)])
def test_a_png_holds_its_pixels(channels, color):
    pixels = bytes(range(5 * 4 * channels))
    assert decode(encode_png(pixels, width=5, height=4, channels=channels)) == (5, 4, color, pixels)


def test_an_image_grid_tells_right_from_wrong_without_color():
    png = encode_png(bytes(1), width=1, height=1, channels=1)
    html = image_grid(
        "Digits", [Picture(png, "3", good=True), Picture(png, "4, true <9>", good=False), Picture(png, "")]
    )
    assert html.count("<img") == 3
    assert "✓ 3" in html
    assert "✕ 4, true &lt;9&gt;" in html
    assert 'class="picture right"' in html
    assert "</img>" not in html


def test_a_heat_map_scales_to_its_largest_value():
    html = heat_map("confusion", [[4, 0], [-2, float("nan")]])
    assert 'class="tone-0" fill-opacity="1.000"' in html
    assert 'class="tone-1" fill-opacity="0.500"' in html
    assert html.count('fill-opacity="0.000"') == 2
    assert "row 1, column 0: -2" in html
    large = heat_map("large", [[1.0] * 300] * 200)
    assert large.count('class="cell"') == 39 * 39
    assert "metrics.jsonl has all values" in large
    assert "No data recorded" in heat_map("none", [])
