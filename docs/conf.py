"""Sphinx configuration. Nothing here needs the network, to build or to read."""

from importlib import metadata

project = "Meshwright"
author = "The Meshwright authors"
copyright = "The Meshwright authors"
release = metadata.version("meshwright")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]

# Docstrings use single backticks for code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

html_theme = "pydata_sphinx_theme"
html_title = f"Meshwright {release}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_extra_path = ["_extra"]  # pages that are whole already: plans/
html_css_files = ["tables.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
