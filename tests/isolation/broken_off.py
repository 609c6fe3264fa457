"""Run by ``test_neighbours``: a test whose teardown its time limit breaks off, and neighbours."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from outbox_app.models import Incident


def write(alias: str) -> None:
    Incident.objects.using(alias).create(kind="takeover", shards=[1], first_id=1, last_id=2)


@pytest.mark.timeout(3)
@pytest.mark.django_db(databases=["default"])
def test_a_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    write("default")
    connection = connections["default"]
    rollback = connection._rollback

    def slow() -> None:
        connection._rollback = rollback
        threading.Event().wait(600)
        rollback()

    connection._rollback = slow


@pytest.mark.django_db(transaction=True)
def test_b_that_commits(alias: str) -> None:
    assert not Incident.objects.using(alias).exists()
    write(alias)


def test_c_in_a_transaction(alias: str) -> None:
    assert not Incident.objects.using(alias).exists()
    write(alias)
