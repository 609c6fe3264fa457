"""Business rows on one alias, the keeper on another: each database keeps once, and sends once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections, transaction

from outbox_app.database import lock_wait
from outbox_app.prepared import fence
from outbox_app.prepared import fences as fences_module
from outbox_app.prepared import sender as senders
from outbox_app.prepared.sender import Prepared
from tests.faults.test_pgbouncer import pooler as pooler
from tests.servers.mysql import MARIADB

#: Whether tests take as many of each thing as may go wrong once in a while.
FULL = os.environ.get("OUTBOX_PREPARED") == "full"


@pytest.fixture
def short_waits(sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer waits for an open transaction for 0.02 s, and not for 0.5 s or 1 s."""
    monkeypatch.setattr(fences_module, "LOCK_SECONDS", 0 if sender == MARIADB else 0.02)
    # MariaDB knows 0, too, which MySQL does not.
    monkeypatch.setattr(lock_wait, "max", lambda least, given: given, raising=False)


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Future[Any]]]:
    """``elsewhere(function, *args)``: call it in another thread, which closes its connections."""
    with ThreadPoolExecutor(16) as pool:

        def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            finally:
                connections.close_all()

        yield lambda *args, **options: pool.submit(call, *args, **options)


@pytest.fixture
def make(alias: str, sender: str) -> Callable[..., Prepared]:
    """``make(stream, **options)``: a prepared event that is due for a check-back at once."""

    def prepare(stream: str = "order-17", **options: Any) -> Prepared:
        options = {"immune": 0, "data": {"total": 30}, **options}
        return senders.prepare(stream, "order.paid", using=sender, **options)

    return prepare


@pytest.fixture
def pay(sender: str) -> Callable[..., None]:
    """``pay(event)``: run the business transaction, without a confirm."""

    def run(*events: Prepared, commit: bool = True) -> None:
        with transaction.atomic(using=sender):
            for event in events:
                fence(event)
            transaction.set_rollback(not commit, using=sender)

    return run


@pytest.fixture(autouse=True)
def calls_end(one_way_calls_end: None) -> None:
    """One-way calls end with each test of this folder."""
