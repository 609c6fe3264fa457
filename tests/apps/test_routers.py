"""Where the routers place the tables of an app."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.capability import is_on
from outbox_app.django_tasks.models import TaskResult
from outbox_app.models import StagedJob


class Allows:
    """Allows tables of these labels."""

    def __init__(self, *labels: str) -> None:
        self.labels = labels

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return app_label in self.labels


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (["outbox_app"], False),
        (["outbox_app", "outbox_django_tasks"], True),
        (["outbox_django_tasks"], True),
        ([], True),  # another alias migrates this database
    ],
)
def test_an_app_is_elsewhere_if_jobs_are_alone(
    settings: Any, labels: list[str], found: bool
) -> None:
    settings.DATABASE_ROUTERS = [Allows(*labels)]
    assert is_on("default", TaskResult) is found
    assert is_on("default", StagedJob)
