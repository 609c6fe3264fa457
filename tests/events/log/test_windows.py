"""The windows of the three databases pass one suite. Tests of one database: ``test_window_*``."""

from __future__ import annotations

import pytest

from .conformance import WindowConformance


@pytest.mark.django_db(transaction=True)
class TestWindows(WindowConformance):
    """See there."""
