"""What tests of subscriptions share: events to publish, and runs until nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction

from outbox_app import NewEvent, publish_many
from outbox_app.subscriptions import subscriber as declared
from outbox_app.subscriptions.runner import Runner


@pytest.fixture
def published(alias: str) -> Callable[..., list[Any]]:
    """``published("a", "b", "a")``: one committed transaction with an event for each stream."""

    def make(*streams: str, type: str = "made", **options: Any) -> list[Any]:
        with transaction.atomic(using=alias):
            return publish_many((NewEvent(stream, type) for stream in streams), **options)

    return make


@pytest.fixture
def run(alias: str) -> Callable[..., int]:
    """``run("name", …)``: runs subscriptions until nothing is left. Returns how many events."""

    def make(*names: str, **options: Any) -> int:
        chosen = [declared.subscriber_named(name) for name in names]
        return Runner(chosen, **options).run(once=True)

    return make
