"""Sphinx builds these pages with warnings as errors: ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outbox_app import __version__

project = "outbox_app"
author = "The outbox_app authors"
copyright = "The outbox_app authors"
release = version = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True

html_theme = "alabaster"
html_theme_options = {"description": "Transactional outbox for Django and Celery"}
html_sidebars = {"**": ["about.html", "searchbox.html", "navigation.html"]}
