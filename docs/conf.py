"""Sphinx builds these pages with warnings as errors: ``make docs``.

Sphinx makes the API pages from docstrings. This needs a configured Django, but no database and no
broker.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import django
from django.conf import settings
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import llms

from outbox_app import __version__

settings.configure(
    INSTALLED_APPS=[
        *("django.contrib.contenttypes", "django.contrib.auth", "outbox_app"),
        *("outbox_app.events", "outbox_app.entities", "outbox_app.prepared"),
        *("outbox_app.pipeline", "outbox_app.door", "outbox_app.fleet", "outbox_app.ids"),
        *("outbox_app.django_tasks", "outbox_app.shadow"),
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    SECRET_KEY="docs",
)
django.setup()

project = "outbox_app"
author = "The outbox_app authors"
copyright = "The outbox_app authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sidebar"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True
# Names of Python, Django, Celery and kombu are not linked, so that building needs no network.
nitpick_ignore_regex = [(r"py:.*", r"(?!outbox_app\.).*")]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_use_rtype = False

# Search, a dark mode, and a sidebar by subject. An environment without the extra "docs" builds too.
html_theme = "furo" if find_spec("furo") else "alabaster"
html_title = f"outbox_app {release}"


def setup(app: Sphinx) -> None:
    app.connect("build-finished", llms.write)
