"""Sphinx configuration: MyST pages, autodoc for the API, furo."""

import thinwire

project = "thinwire"
author = "The thinwire authors"
copyright = "The thinwire authors"
version = release = thinwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "thinwire"
html_static_path = ["_static"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
