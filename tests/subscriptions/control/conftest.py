"""Subscriptions of a test, and runners that handle them in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from django.db import connections

from outbox_app import subscriber
from outbox_app.subscriptions.runner import Runner
from outbox_app.subscriptions.subscriber import subscriber_named
from tests.faults.tools import PATIENCE
from tests.subscriptions.conftest import published, run

__all__ = ["published", "run"]


@pytest.fixture
def seen_by() -> Callable[..., list[tuple[str, int]]]:
    """``seen_by("name", …)``: declares a subscription. Returns what it is given, as it comes."""

    def make(name: str, **options: Any) -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []

        @subscriber(name, **options)
        def handle(events: list[Any]) -> None:
            seen.extend((event.stream, event.version) for event in events)

        return seen

    return make


@pytest.fixture
def running(alias: str) -> Callable[..., AbstractContextManager[Runner]]:
    """``with running("name"): …``: a runner in a thread; it must end when it is told to."""

    @contextmanager
    def make(*names: str, **options: Any) -> Iterator[Runner]:
        options = {"interval": 0.02, "lease_seconds": 2.0, **options}
        runner = Runner([subscriber_named(name) for name in names], **options)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                runner.run()
            except BaseException as error:
                errors.append(error)
            finally:
                connections[alias].close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield runner
        finally:
            runner.stop()
            thread.join(PATIENCE)
        assert not thread.is_alive(), "the runner does not stop"
        assert not errors, repr(errors)

    return make
