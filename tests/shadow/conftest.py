"""An app whose broker is in memory, its task, what it has sent, and brokers to look into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.jobs.staging import message_equality, tasks


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def inbox(broker_url: str) -> Iterator[message_equality.Inbox]:
    """Reads messages from the broker."""
    made = (
        message_equality.RedisInbox
        if broker_url.startswith("redis")
        else message_equality.RabbitInbox
    )(broker_url)
    yield made
    made.close()


@pytest.fixture
def app(make_app: Callable[..., Any]) -> Any:
    """An OutboxCelery with a broker and a result backend in memory."""
    return make_app("memory://", result_backend="cache+memory://")


@pytest.fixture
def add(app: Any) -> Any:
    """The task ``add`` of ``app``."""
    return app.task(name="add", shared=False)(tasks.add)


@pytest.fixture
def sent_by() -> Callable[[Any], list[Any]]:
    """``sent_by(app)``: the arguments of the messages that the app has sent without a row."""

    def take(app: Any) -> list[Any]:
        found = []
        with app.connection_for_read() as connection:
            queue = app.amqp.default_queue(connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message.payload[0])
        return found

    return take


@pytest.fixture
def sent(app: Any, sent_by: Callable[[Any], list[Any]]) -> Callable[[], list[Any]]:
    """``sent()``: the same for the fixture ``app``."""
    return partial(sent_by, app)
