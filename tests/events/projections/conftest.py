"""Projections that end with the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from outbox_app import failpoints
from outbox_app.events.subscriptions import subscriber as declared
from tests.events.projections.models import Sold, Status
from tests.patience import patience


@pytest.fixture(autouse=True)
def subscribers() -> Iterator[None]:
    """Forget the subscriptions and failpoints of a test."""
    before = dict(declared._subscribers)
    yield
    declared._subscribers.clear()
    declared._subscribers.update(before)
    failpoints._actions.clear()


@pytest.fixture
def status(alias: str) -> Callable[[], dict[str, tuple[str, int]]]:
    """``status()``: path and version of each row, by stream."""

    def read() -> dict[str, tuple[str, int]]:
        rows = Status.objects.using(alias).order_by("pk")
        return {row.stream: (row.path.strip(), row.version) for row in rows if not row.deleted}

    return read


@pytest.fixture
def sold(alias: str) -> Callable[[], dict[int, int]]:
    """``sold()``: the count of each article."""
    return lambda: dict(Sold.objects.using(alias).values_list("article", "count"))


@pytest.fixture
def in_thread(alias: str) -> Iterator[Callable[..., threading.Thread]]:
    """``in_thread(function)``: run it with its own connection. An error fails the test."""
    threads, errors = [], []

    def start(function: Callable[[], Any]) -> threading.Thread:
        def body() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)
            finally:
                connections[alias].close()

        thread = threading.Thread(target=body, daemon=True)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.join(patience())
        assert not thread.is_alive()
    assert not errors, errors
