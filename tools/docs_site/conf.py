"""Settings of Sphinx for the documentation's web site; ``python -m tools.docs_site`` calls it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import radixrt

project = "radixrt"
version = release = radixrt.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
html_theme = "furo"
html_title = f"radixrt {release}"
html_show_sourcelink = False
myst_heading_anchors = 4  # the anchors that GitHub makes
myst_enable_extensions = ["html_image"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch", "zmq", "transformers"]
nitpicky = False
