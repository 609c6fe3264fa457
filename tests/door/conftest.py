"""Two projects that know each other: "shop" keeps the events that "billing" prepares."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.door import plain, signing
from outbox_app.entities import service
from tests.entities.models import Account
from tests.fixtures.door import GRANTED


@pytest.fixture(autouse=True)
def calls_end(one_way_calls_end: None) -> None:
    """One-way calls end with each test of this folder."""


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test of this folder sends: the library believes all that the plain form does."""
    verify = plain.verify

    def judge(message: Any, peer_of: Any) -> Any:
        if found := verify(message, peer_of):
            verifier = signing._Verifier(peer_of)
            components = signing._components(message)
            try:
                [result] = verifier.verify(message, max_age=None, require_components=components)
                verifier.check_time()
            except signing.HTTPMessageSignaturesException as error:  # which would be a refusal
                raise AssertionError("the library does not believe it") from error
            signed = result.covered_components['"content-digest"']
            assert found == (verifier.peer, signed)
        return found

    monkeypatch.setattr(plain, "verify", judge)


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
