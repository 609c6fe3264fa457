"""Business rows on one alias, the keeper on another: each database keeps once, and sends once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connections, transaction

from outbox_app.models import Event, Fence, PreparedEvent
from outbox_app.prepared import fence, one_way
from outbox_app.prepared import fences as fences_module
from outbox_app.prepared import sender as senders
from outbox_app.prepared.asking import CheckBack
from outbox_app.prepared.sender import Prepared
from outbox_app.process import lock_wait
from tests.faults.test_pgbouncer import pooler as pooler
from tests.patience import patience

#: Whether tests take as many of each thing as may go wrong once in a while.
FULL = os.environ.get("OUTBOX_PREPARED") == "full"
#: By keeper, the sender.
SENDERS = {"default": "postgres", "postgres": "mariadb", "mariadb": "default"}


def sender_of(alias: str) -> str:
    others = [SENDERS[alias], *django_settings.DATABASES]
    return next(each for each in others if each in django_settings.DATABASES and each != alias)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test with a keeper and a sender has these two databases: the third need not be emptied."""
    for item in items:
        alias = getattr(item, "callspec", None) and item.callspec.params.get("alias")
        mark = item.get_closest_marker("django_db")
        there = alias in django_settings.DATABASES and len(django_settings.DATABASES) > 1
        if there and mark and "sender" in item.fixturenames:
            options = mark.kwargs | {"databases": [alias, sender_of(alias)]}
            item.add_marker(pytest.mark.django_db(**options), append=False)


@pytest.fixture
def sender(alias: str) -> str:
    """The alias of the business rows; the keeper is on ``alias``."""
    return sender_of(alias)


@pytest.fixture
def short_waits(sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer waits for an open transaction for a moment, and not for 0.5 s, or a whole one."""
    monkeypatch.setattr(fences_module, "LOCK_SECONDS", 0 if sender == "mariadb" else 0.02)
    # MariaDB knows 0, too, which MySQL does not.
    monkeypatch.setattr(lock_wait, "max", lambda least, given: given, raising=False)


@pytest.fixture(autouse=True)
def one_way_calls_end() -> Iterator[None]:
    """Calls of a test are made before its rows are removed."""
    yield
    assert one_way.drain(patience(10))


@pytest.fixture
def told() -> Callable[[], None]:
    """``told()``: every one-way call was made."""

    def wait() -> None:
        assert one_way.drain(patience(10))

    return wait


@pytest.fixture
def published(alias: str) -> Callable[[], list[tuple[str, str, Any]]]:
    """``published()``: what the keeper's log has."""

    def read() -> list[tuple[str, str, Any]]:
        events = Event.objects.using(alias).order_by("id")
        return list(events.values_list("stream", "type", "data"))

    return read


@pytest.fixture
def states(alias: str) -> Callable[[], list[str]]:
    """``states()``: of the prepared events, in the order of their recording."""

    def read() -> list[str]:
        rows = PreparedEvent.objects.using(alias).order_by("id")
        return list(rows.values_list("state", flat=True))

    return read


@pytest.fixture
def fences(sender: str) -> Callable[[], list[str]]:
    """``fences()``: outcomes in the sender's database."""

    def read() -> list[str]:
        rows = Fence.objects.using(sender).exclude(pk=Fence.MARK).order_by("written_at")
        return list(rows.values_list("outcome", flat=True))

    return read


@pytest.fixture
def ask(alias: str) -> Callable[..., CheckBack]:
    """``ask()``: a check-back that runs until nothing is due."""

    def run(**options: Any) -> CheckBack:
        loop = CheckBack(using=alias, **options)
        loop.run(once=True)
        return loop

    return run


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Future[Any]]]:
    """``elsewhere(function, *args)``: call it in another thread, whose connections end with it."""
    with ThreadPoolExecutor(16) as pool:

        def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            finally:
                connections.close_all()

        yield lambda *args, **options: pool.submit(call, *args, **options)


@pytest.fixture
def make(alias: str, sender: str) -> Callable[..., Prepared]:
    """``make(stream, **options)``: a prepared event about which its sender may be asked at once."""

    def prepare(stream: str = "order-17", **options: Any) -> Prepared:
        options = {"immune": 0, "data": {"total": 30}, **options}
        return senders.prepare(stream, "order.paid", using=sender, **options)

    return prepare


@pytest.fixture
def pay(sender: str) -> Callable[..., None]:
    """``pay(event)``: the business transaction, without a confirm."""

    def run(*events: Prepared, commit: bool = True) -> None:
        with transaction.atomic(using=sender):
            for event in events:
                fence(event)
            transaction.set_rollback(not commit, using=sender)

    return run
