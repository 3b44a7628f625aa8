"""HTML report pages: charts, tables and pictures as strings, joined into one file that works offline.

Pages follow the reader's light or dark setting, print well, do not rely on color, and support keyboards and screen
readers.
"""

from meshwright.pages.areas import Level, area_chart
from meshwright.pages.bars import Bar, stacked_bars, stacked_columns
from meshwright.pages.blocks import Figure, badge, command, fold, headline, pairs, prose, quote, side_by_side, table
from meshwright.pages.grids import Tile, TileGrid, mesh_picture, tile_picture
from meshwright.pages.lines import Mark, Series, line_chart, smooth, thin
from meshwright.pages.markup import Markup, join, tag, text
from meshwright.pages.numbers import compact, duration, number, percent, plural
from meshwright.pages.page import Section, make_page, write_page
from meshwright.pages.pictures import Picture, encode_png, heat_map, image_grid
from meshwright.pages.scatter import Point, pareto_front, scatter_chart
from meshwright.pages.timeline import Lane, Moment, Shape, Span, timeline

__all__ = [
    "make_page",
    "write_page",
    "Section",
    "headline",
    "Figure",
    "prose",
    "badge",
    "command",
    "quote",
    "fold",
    "side_by_side",
    "table",
    "pairs",
    "line_chart",
    "Series",
    "Mark",
    "stacked_bars",
    "Bar",
    "stacked_columns",
    "area_chart",
    "Level",
    "scatter_chart",
    "Point",
    "pareto_front",
    "timeline",
    "Lane",
    "Span",
    "Moment",
    "Shape",
    "mesh_picture",
    "tile_picture",
    "TileGrid",
    "Tile",
    "image_grid",
    "Picture",
    "encode_png",
    "heat_map",
    "smooth",
    "thin",
    "number",
    "compact",
    "percent",
    "duration",
    "plural",
    "Markup",
    "tag",
    "join",
    "text",
]
