"""Two projects that know each other: "shop" keeps the events that "billing" prepares."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def calls_end(one_way_calls_end: None) -> None:
    """One-way calls end with each test of this folder."""
