"""Registries, and a process that has met no other one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox_app.fleet import cluster, registration
from tests.patience import patience

LEASE = 1.0


def begin_anew() -> None:
    """Let this process be one that is not registered, and has called no service."""
    registration.leave()
    watches = [known.watch for known in cluster._services.values()]
    cluster.forget()
    for watch in watches:
        watch.thread.join()


@pytest.fixture(autouse=True)
def process_begins_and_ends() -> Iterator[None]:
    """Forget the list of servers: a list from another test would be of another database."""
    begin_anew()
    yield
    begin_anew()


@pytest.fixture
def fleet(settings: Any) -> Callable[..., None]:
    """``fleet(**changes)``: settings of a process of the service "shop", with a short lease."""

    def change(**changes: Any) -> None:
        given = {"SERVICE": "shop", **settings.OUTBOX.get("FLEET", {}), **changes}
        seconds = patience(LEASE)
        lease = {"LEASE_SECONDS": seconds, "PUBLISH_TIMEOUT": seconds / 2}
        settings.OUTBOX = {**settings.OUTBOX, **lease, "FLEET": given}

    change()
    return change


@pytest.fixture
def cannot_start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of names: the system refuses to start a thread of that name, once for each entry."""
    names: list[str] = []
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name in names:
            names.remove(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return names
