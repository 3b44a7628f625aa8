"""Layouts: the checked specs of a tree on a mesh, with reports, tables, pictures and JSON."""

from meshwright.layout.layout import Layout, make_layout, match_partition_rules
from meshwright.layout.leaf import LayoutDiff, LeafChange, LeafLayout, format_bytes
from meshwright.layout.report import LayoutReport, explain_layout

__all__ = [
    "Layout",
    "LayoutDiff",
    "LayoutReport",
    "LeafChange",
    "LeafLayout",
    "explain_layout",
    "format_bytes",
    "make_layout",
    "match_partition_rules",
]
