"""An app whose broker is in memory, and a task that adds."""

from __future__ import annotations

import pytest

from tests import tasks


@pytest.fixture
def app(make_app):
    return make_app()


@pytest.fixture
def add(app):
    return app.task(name="add")(tasks.add)
