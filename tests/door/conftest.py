"""Two projects that know each other: "shop" keeps the events that "billing" prepares."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.entities import service
from tests.entities.models import Account
from tests.fixtures.door import GRANTED


@pytest.fixture(autouse=True)
def calls_end(one_way_calls_end: None) -> None:
    """One-way calls end with each test of this folder."""


@pytest.fixture
def granted(both: None, settings: Any, peers: dict[str, Any]) -> None:
    """Billing may execute some commands."""
    peers["shop"]["billing"]["commands"] = [*GRANTED, "*.echo"]
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": peers["shop"] | peers["billing"]}


@pytest.fixture
def account(alias: str) -> None:
    """Account a, with 10."""
    opened = {"owner": "ann", "balance": 10}
    Account.execute("a", "open", opened, command_id="open", using=alias)


@pytest.fixture
def shop(granted: None, served: None, settings: Any) -> Any:
    """The service, as billing calls it over HTTP."""
    return service("shop")
