"""Two projects that know each other: "shop" keeps the events that "billing" prepares."""

from __future__ import annotations

import pytest

from outbox_app.door import clocks


@pytest.fixture(autouse=True)
def no_clock_is_noted() -> None:
    """Forget the clocks of peers, as in a process that has met no peer."""
    clocks._noted.clear()


@pytest.fixture(autouse=True)
def calls_end(one_way_calls_end: None) -> None:
    """One-way calls end with each test of this folder."""
