"""What tests of the exported facts share: an outbox in trouble, and a database that is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections

from outbox_app.models import DatabaseNow, Lease, Process, StagedJob
from tests.jobs.dead.rows import dead_jobs, staged_jobs

#: What nobody may see who only has the address of a view.
SECRET = "password=hunter2"


@pytest.fixture
def drainer(alias: str) -> Callable[..., Process]:
    """``drainer(silent=0.0, shards=0, **columns)``: a row of one, with shards of its own."""

    def make(*, silent: float = 0.0, shards: int = 0, **columns: Any) -> Process:
        values = {"host": "web-1", "pid": 7, "lease_seconds": 10, **columns}
        row = Process.objects.using(alias).create(id=uuid4(), **values)
        rows = Process.objects.using(alias).filter(pk=row.pk)
        rows.update(heartbeat_at=DatabaseNow() - timedelta(seconds=silent))
        first = Lease.objects.using(alias).count()
        Lease.objects.using(alias).bulk_create(
            Lease(resource="jobs", part=part, owner=row.pk) for part in range(first, first + shards)
        )
        return row

    return make


@pytest.fixture
def staged(alias: str) -> Callable[..., list[StagedJob]]:
    """``staged(count, age=seconds)``: ready jobs that were staged so long ago."""

    def make(count: int = 1, *, age: float = 0.0) -> list[StagedJob]:
        jobs = staged_jobs(count, using=alias)
        rows = StagedJob.objects.using(alias).filter(pk__in=[job.pk for job in jobs])
        rows.update(staged_at=DatabaseNow() - timedelta(seconds=age))
        return jobs

    return make


@pytest.fixture
def died(alias: str) -> Callable[..., Any]:
    """``died(count, error="E")``: dead jobs."""
    return lambda count=1, **columns: dead_jobs(count, using=alias, **columns)


@pytest.fixture
def away(settings: Any, django_db_blocker: Any) -> Iterator[str]:
    """An alias whose database is away, with the outbox on it. Not for the mark ``django_db``."""
    alias = f"away_{uuid4().hex[:8]}"
    connections.settings[alias] = {
        **deepcopy(connections.settings["default"]),
        "NAME": "/nowhere/at/all.sqlite3",
    }
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    try:
        with django_db_blocker.unblock():
            yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]
