"""The pytest fixture ``outbox``: the module ``outbox_app.testing``.

pytest loads this module in every run, before Django is configured, so it imports nothing but
pytest. Whether a test may touch the database is left to its marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest


@pytest.fixture
def outbox() -> Iterator[ModuleType]:
    """``outbox.assert_staged(…)``, ``outbox.run_staged()``: see ``outbox_app.testing``."""
    testing = import_module("outbox_app.testing")
    with testing.in_one_thread():
        yield testing
