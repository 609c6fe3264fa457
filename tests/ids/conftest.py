"""Makers of ids, each as another process has one, on the table as the migration leaves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from outbox_app.ids.conf import DATACENTRES, NODES
from outbox_app.ids.generator import Snowflakes
from outbox_app.ids.models import Node
from tests.patience import patience


class Clock:
    """A monotonic clock that a test moves."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def nodes(alias: str) -> Iterator[None]:
    Node.objects.using(alias).all().delete()
    new = [Node(datacentre=d, node=n) for d in range(DATACENTRES) for n in range(NODES)]
    Node.objects.using(alias).bulk_create(new)
    yield
    # A thread that asks for more time would put rows that are missing into the next test's table.
    for thread in threading.enumerate():
        if thread.name == "outbox-ids":
            thread.join(patience())


@pytest.fixture
def process(nodes: None, clock: Clock) -> Callable[[], Snowflakes]:
    """``process()``: the generator of another process."""
    return lambda: Snowflakes(clock=clock)
