"""The models' own app is the current one, as in a project."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import _state

from outbox_app.celery import OutboxCelery
from outbox_app.testing import staged_jobs


@pytest.fixture
def app(make_app: Callable[..., OutboxCelery]) -> Iterator[OutboxCelery]:
    """An app whose worker would import ``tests.mixin.tasks``. This process has not done so yet."""
    before = getattr(_state._tls, "current_app", None)
    app = make_app(imports=["tests.mixin.tasks"])
    app.set_current()
    yield app
    _state._set_current_app(before)


@pytest.fixture
def staged(app: OutboxCelery, alias: str) -> Callable[[], list[tuple[str, list[Any]]]]:
    """``staged()``: the tasks and arguments of the staged jobs."""
    return lambda: [(job.task, job.args) for job in staged_jobs(using=alias)]
