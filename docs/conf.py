"""Sphinx configuration: MyST pages, autodoc for the API, furo."""

import thinwire

project = "thinwire"
author = "The thinwire authors"
copyright = "The thinwire authors"
version = release = thinwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
html_theme = "furo"
html_title = "thinwire"
html_static_path = ["_static"]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_preprocess_types = False


def to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Show what our docstrings mean: formulas and fenced code as blocks, |x| as itself."""
    result: list[str] = []
    fence = False
    for i, line in enumerate(lines):
        stripped = line.strip()
        if stripped.startswith("```"):
            result += [line.replace("```python", ".. code-block:: python"), ""] if not fence else [""]
            fence = not fence
            continue
        opens_block = line.endswith(":") and not line.endswith("::") and lines[i + 1 : i + 2] == [""]
        if opens_block and indent(lines[i + 2 : i + 3]) > indent([line]):
            line += ":"
        in_block = fence or (line and indent([line]) >= 4)
        result.append(("   " if fence and line else "") + (line if in_block else line.replace("|", "\\|")))
    lines[:] = result


def indent(line: list[str]) -> int:
    return len(line[0]) - len(line[0].lstrip()) if line else 0


def setup(app) -> None:
    app.connect("autodoc-process-docstring", to_rst, priority=600)  # after napoleon
