"""Fixtures of the intake's tests: brokers to look into, and the drain in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from kombu import Queue

from outbox_app.delivery.drain import Drain
from outbox_app.models import StagedJob
from tests.intake import twins


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def assert_equal(broker_url: str) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """``assert_equal(send, using=…, **conf)``: staged and drained, it is what plain Celery sends.

    ``send`` is called with each twin. Returns the messages, in order.
    """
    inbox = (twins.RedisInbox if broker_url.startswith("redis") else twins.RabbitInbox)(broker_url)

    def check(
        send: Callable[[twins.Twin], Any],
        *,
        using: str = "default",
        queues: tuple[Queue, ...] = (),
        **conf: Any,
    ) -> list[dict[str, Any]]:
        name = f"app-{uuid4().hex[:12]}"
        app = twins.plain(broker_url, name, **conf)
        inbox.prepare([*app.app.amqp.queues.values(), *queues])
        send(app)
        expected = twins.normalised(inbox.received())
        assert expected, "plain Celery sent nothing"
        app.app.close()

        app = twins.staging(broker_url, name, **conf)
        with transaction.atomic(using=using):
            send(app)
        assert not inbox.received()
        assert StagedJob.objects.using(using).count() == len(expected)
        tally = Drain(using=using).run(once=True)
        assert (tally.published, tally.dead, tally.expired) == (len(expected), 0, 0)
        got = twins.normalised(inbox.received())
        app.app.close()
        assert got == expected
        return got

    yield check
    inbox.close()
