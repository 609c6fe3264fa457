"""Fixtures of the broker tests: servers of this folder's own, and a hand on the drain's arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from outbox_app.failpoints import set_failpoint
from outbox_app.models import DeadJob, StagedJob
from tests.faults.tools import eventually
from tests.servers import RabbitMQ


@pytest.fixture(scope="package")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ server for tests that do not kill it. It accepts messages of up to 64 KiB."""
    with RabbitMQ(extra_config="max_message_size = 65536\n") as server:
        yield server


@pytest.fixture
def at() -> Iterator[Callable[[str, int, Callable[[], object]], None]]:
    """``at(failpoint, nth, action)``: call it when the drain passes the failpoint the nth time.

    The drain passes "checked" before each declaration and each send, so a new connection's first
    send is the second pass.
    """
    names = set()

    def make(name: str, nth: int, action: Callable[[], object]) -> None:
        passes = iter(range(1, nth + 1))
        names.add(name)
        set_failpoint(name, lambda: action() if next(passes, 0) == nth else None)

    yield make
    for name in names:
        set_failpoint(name, None)


@pytest.fixture
def drained() -> Callable[[str], None]:
    """``drained(alias)``: wait until no staged job is left."""
    return lambda alias: eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")


@pytest.fixture
def buried() -> Callable[[str], dict[str, str]]:
    """``buried(alias)``: the error and reason of each dead job, by its task id."""

    def look(alias: str) -> dict[str, str]:
        jobs = DeadJob.objects.using(alias).values_list("task_id", "error", "reason")
        return {task_id: f"{error}: {reason}" for task_id, error, reason in jobs}

    return look
