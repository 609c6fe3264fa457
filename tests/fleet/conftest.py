"""Registries, and a process that has met no other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox_app.fleet import announcing, cluster
from tests.patience import patience

LEASE = 1.0


@pytest.fixture(autouse=True)
def process_begins_and_ends() -> Iterator[None]:
    """As one that is not announced, and has called no service."""
    yield
    announcing.leave()
    watches = [known.watch for known in cluster._services.values()]
    cluster.forget()
    for watch in watches:
        watch.thread.join()


@pytest.fixture
def fleet(settings: Any) -> Callable[..., None]:
    """``fleet(**changes)``: this process is of the service "shop", with a lease of a second."""

    def change(**changes: Any) -> None:
        given = {"SERVICE": "shop", **settings.OUTBOX.get("FLEET", {}), **changes}
        seconds = patience(LEASE)
        lease = {"LEASE_SECONDS": seconds, "PUBLISH_TIMEOUT": seconds / 2}
        settings.OUTBOX = {**settings.OUTBOX, **lease, "FLEET": given}

    change()
    return change
