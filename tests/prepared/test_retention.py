"""Decided events and old fences are deleted; open events stay; no pruned outcome is guessed."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from outbox_app.database.clock import DatabaseNow
from outbox_app.prepared.fences import Question, outcomes
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.retention import rows as retention
from tests.faults.tools import on

pytestmark = pytest.mark.django_db

State = PreparedEvent.State


def days(age: float) -> Any:
    return DatabaseNow() - timedelta(days=age)


def prune(*arguments: str, command: str = "outbox_prune") -> str:
    output = StringIO()
    call_command(command, *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def events(alias: str) -> Any:
    """Events decided 1, 31 and 40 days ago, and open for 50 days; the states and ages left."""
    rows = PreparedEvent.objects.using(alias)
    for state, age in ((State.CONFIRMED, 1), (State.CANCELLED, 31), (State.CONFIRMED, 40),
                       (State.PREPARED, None), (State.UNDECIDED, None)):  # fmt: skip
        decided = age and days(age)
        rows.create(sender="s", event_id=uuid4(), state=state, decided_at=decided, asked=age or 0,
                    decide_by=days(49))  # fmt: skip
    rows.update(prepared_at=days(50))
    return lambda: sorted(rows.values_list("state", "asked"))


OPEN = [("prepared", 0), ("undecided", 0)]


def test_decided_events_go_after_30_days(alias: str, events: Any, settings: Any) -> None:
    assert "would prune prepared rows=2 older_than=30d" in prune("--prepared", "--dry-run")
    assert "pruned prepared removed=2 older_than=30d" in prune("--prepared")
    assert events() == [("confirmed", 1), *OPEN]
    settings.OUTBOX = {**settings.OUTBOX, "PREPARED_RETENTION_DAYS": 60}
    assert "pruned prepared removed=0 older_than=60d" in prune("--prepared")


def test_open_ones_stay_for_ever(alias: str, events: Any) -> None:
    prune("--prepared", "--older-than=35", "--batch-size=1")
    assert events()[-2:] == OPEN
    assert len(events()) == 4


def test_fences_go_after_30_days_batch_by_batch(
    alias: str, settings: Any, monkeypatch: Any
) -> None:
    fences = Fence.objects.using(alias)
    for age in (1, 29, 31, 32, 33):
        fences.create(event_id=uuid4(), outcome="committed", written_at=days(age))
    fences.create(event_id=Fence.MARK, outcome="pruned", written_at=days(40))  # of an earlier run
    said = prune("--fences", "--database", alias, "--dry-run")
    assert "would prune fences rows=3" in said
    assert fences.count() == 6
    said = prune("--fences", "--database", alias, "--batch-size", "2")
    assert "pruned fences removed=3 older_than=30d" in said
    assert fences.exclude(pk=Fence.MARK).count() == 2
    mark = fences.get(pk=Fence.MARK).written_at
    now = timezone.now()
    assert timedelta(days=29.9) < now - mark < timedelta(days=30.1)
    old, new = uuid4(), uuid4()
    asked = [Question(old, now - timedelta(days=29.5)), Question(new, now - timedelta(days=28))]
    assert outcomes(asked, using=alias) == {old: "too_old", new: "rolled_back"}


def test_a_run_that_is_interrupted_has_set_the_mark(alias: str, monkeypatch: Any) -> None:
    fences = Fence.objects.using(alias)
    for _ in range(3):
        fences.create(event_id=uuid4(), outcome="committed", written_at=days(40))
    interrupted = lambda what, batches, *_, **options: next(batches)[0]  # noqa: E731
    monkeypatch.setattr(retention, "remove", interrupted)
    assert retention.prune("fences", alias, 30, batch_size=1) == 1
    assert fences.exclude(pk=Fence.MARK).count() == 2
    assert fences.filter(pk=Fence.MARK).exists()


def test_fences_are_those_of_a_sender(alias: str) -> None:
    with pytest.raises(CommandError, match="in the databases of senders") as error:
        prune("--fences")
    assert error.value.returncode == 2


@on("default")  # MariaDB is asked for the table itself
def test_an_alias_without_fences_is_said(alias: str, monkeypatch: Any) -> None:
    from django.db import connections

    introspection = connections[alias].introspection
    monkeypatch.setattr(introspection, "table_names", lambda: ["outbox_stagedjob"])
    with pytest.raises(CommandError, match="no table outbox_fence"):
        prune("--fences", "--database", alias)


def test_many_of_one_moment_go_in_one_run(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = PreparedEvent.objects.using(alias)
    for _ in range(5):
        rows.create(sender="s", event_id=uuid4(), state=State.CANCELLED, decide_by=days(49))
    rows.update(decided_at=DatabaseNow())
    later = timezone.now() + timedelta(days=40)
    monkeypatch.setattr(retention, "database_time", lambda rows: later)
    assert "pruned prepared removed=5" in prune("--prepared", "--batch-size=2")
