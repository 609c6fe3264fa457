"""Fixtures of immediate delivery: turned on, patient, with the broker of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox_app.jobs import immediate
from outbox_app.models import StagedJob
from tests.tasks import note


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(autouse=True)
def on(settings: Any) -> Callable[..., None]:
    """``on(**outbox)``: turn IMMEDIATE on, with long timeouts for a busy machine."""

    def apply(**outbox: Any) -> None:
        settings.OUTBOX = {**settings.OUTBOX, **outbox}

    apply(IMMEDIATE=True, IMMEDIATE_TIMEOUT=20, IMMEDIATE_HOLD=600)
    return apply


@pytest.fixture(autouse=True)
def connections_end_with_the_test() -> Iterator[None]:
    yield
    for broker in immediate._brokers.values():
        broker.close()
    immediate._brokers.clear()


@pytest.fixture
def app(make_app: Callable[..., Any]) -> Any:
    """An app with a broker in memory and the task ``note``."""
    app = make_app("memory://")
    app.task(name="note", shared=False)(note)
    return app


@pytest.fixture
def states(alias: str) -> Callable[[], list[str]]:
    """``states()``: for each row in the table whether it is ready or held."""

    def read() -> list[str]:
        rows = StagedJob.objects.using(alias).order_by("id")
        return ["held" if job.available_at else "ready" for job in rows]

    return read
