"""Facts about prepared events: waiting ones, decisions by route, and silent senders."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import CharField, Sum
from django.db.models.functions import Cast
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow, database_time
from outbox_app.models import Incident, Process, Statistic
from outbox_app.monitoring.diagnosis import problems
from outbox_app.monitoring.status import outbox_status
from outbox_app.prepared import operations, prepared, status
from outbox_app.prepared import sender as senders
from outbox_app.prepared import series as of_prepared
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.series import decisions
from outbox_app.prepared.status import prepared_status
from outbox_app.process import counters

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])

State = PreparedEvent.State


@pytest.fixture
def row(alias: str) -> Any:
    """``row(sender, age=seconds, **columns)``: a prepared event of this age."""

    def make(sender: str = "alias:billing", *, age: float = 0.0, **columns: Any) -> None:
        values = {"event_id": uuid4(), "decide_by": DatabaseNow() + timedelta(days=1), **columns}
        made = PreparedEvent.objects.using(alias).create(sender=sender, **values)
        then = DatabaseNow() - timedelta(seconds=age)
        PreparedEvent.objects.using(alias).filter(pk=made.pk).update(prepared_at=then)

    return make


@pytest.fixture
def written(monkeypatch: Any) -> None:
    """Write counters at once."""
    monkeypatch.setattr(counters, "EVERY", 0.0)


def figures(alias: str, name: str) -> dict[str, float]:
    """By label; the test may have gone on into another minute."""
    rows = Statistic.objects.using(alias).filter(name=name).order_by()
    return dict(rows.values_list("label").annotate(Sum("value")))


def test_a_keeper_without_prepared_events(alias: str) -> None:
    found = outbox_status()
    assert found.sections["prepared"].facts is None
    assert found.as_json()["prepared"] is None
    assert prepared_status(using=alias) is None


def test_what_waits(alias: str, row: Any) -> None:
    row(age=100, next_check_at=DatabaseNow())
    row("alias:shop", age=50)
    row(state=State.UNDECIDED, age=90_000)
    row(state=State.CONFIRMED, age=90_000)
    Incident.objects.using(alias).create(kind="contradiction", first_id=1, last_id=1)
    Incident.objects.using(alias).create(kind="takeover", first_id=1, last_id=1)
    old = Incident.objects.using(alias).create(kind="contradiction", first_id=1, last_id=1)
    Incident.objects.using(alias).filter(pk=old.pk).update(
        created_at=DatabaseNow() - timedelta(days=2)
    )
    found = prepared_status(using=alias)
    assert found
    assert (found.prepared, found.undecided, found.due) == (2, 1, 1)
    assert (found.contradictions, found.processes, found.silent) == (1, 0, [])
    assert 100 <= found.oldest_seconds < 200


def test_a_process_that_asks(alias: str, row: Any, drainer: Any) -> None:
    drainer(shards=128)
    row(next_check_at=DatabaseNow())
    process = {"host": "h", "lease_seconds": 10}
    assert [each.code for each in problems(outbox_status())] == ["no_check_back"]
    gone = Process.objects.using(alias).create(id=uuid4(), pid=2, resource="prepared", **process)
    Process.objects.using(alias).filter(pk=gone.pk).update(
        heartbeat_at=DatabaseNow() - timedelta(seconds=60)
    )
    assert [each.code for each in problems(outbox_status())] == ["no_check_back"]
    Process.objects.using(alias).create(id=uuid4(), pid=3, resource="prepared", **process)
    assert problems(outbox_status()) == []


def test_who_does_not_answer(alias: str, row: Any, monkeypatch: Any) -> None:
    row("alias:slow", unreachable=9, last_answer="in_progress")
    row("alias:forgetful", unreachable=9, last_answer="too_old")
    row("alias:new", unreachable=2, last_answer="OSError")
    row("alias:away", age=60, unreachable=3, last_answer="OSError: a" + "x" * 1000)
    row("alias:away", unreachable=4, last_answer="OSError: b")
    row("alias:given-up", state=State.UNDECIDED, unreachable=9, last_answer="OSError")
    found = prepared_status(using=alias)
    assert found
    [silent] = found.silent
    assert (silent.sender, silent.events, len(silent.last_answer)) == ("alias:away", 2, 300)
    assert 60 <= silent.oldest_seconds < 120
    [problem] = [each for each in problems(outbox_status()) if each.code == "sender_silent"]
    assert problem.detail.startswith("alias:away: OSError: a")
    monkeypatch.setattr(status, "SAMPLE", 1)
    found = prepared_status(using=alias)
    assert found
    assert [each.events for each in found.silent] == [1]


def test_the_number_of_statements_depends_on_nothing(alias: str, row: Any) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connections[alias]) as queries:
            prepared_status(using=alias)
            decisions(using=alias)
        return len(queries)

    row()
    before = statements()
    for number in range(30):
        row(f"alias:{number}", unreachable=5, last_answer="OSError")
        row(state=State.UNDECIDED)
    assert statements() == before <= 9


def test_decisions_are_counted_by_outcome_and_route(
    alias: str, sender: str, told: Any, ask: Any, row: Any, written: None
) -> None:
    for name in ("one", "two"):
        with prepared(name, "order.paid", using=sender):
            pass
    told()  # twice confirmed, by a call
    senders.prepare("three", "order.paid", using=sender, immune=0)
    ask()  # rolled back, as it answers
    late = {"decide_by": DatabaseNow() - timedelta(days=1), "next_check_at": DatabaseNow()}
    row("alias:nowhere", policy="cancel", **late)
    ask()
    row(age=1000)
    operations.decide(
        operations.selected(using=alias, sender="alias:billing"), State.CANCELLED,
        by="ann", reason="x",
    )  # fmt: skip
    assert figures(alias, of_prepared.DECIDED) == {
        "confirmed call": 2,
        "cancelled answer": 1,
        "cancelled policy": 1,
        "cancelled person": 1,
    }
    assert sum(figures(alias, of_prepared.DECIDE_TIME).values()) == 5
    assert figures(alias, of_prepared.DECIDE_TIME)["3600"] == 1
    # The test may have gone on into another minute: all are of the last full one, in sources apart.
    rows = Statistic.objects.using(alias)
    now: Any = database_time(rows)
    full = now.replace(second=0, microsecond=0) - timedelta(minutes=1)
    rows.update(minute=full, source=Cast("id", CharField()))
    found = outbox_status()
    assert found.sections["prepared"].decisions.per_minute["confirmed", "call"] == 2
    assert found.sections["prepared"].decisions.p95
    assert found.as_json()["prepared"]["decided_per_minute"]["cancelled person"] == 1


def test_what_is_repeated_or_too_late_is_counted_once(
    alias: str, sender: str, states: Any, written: None
) -> None:
    event = senders.prepare("one", "order.paid", using=sender)
    with transaction.atomic(using=sender):
        senders.fence(event)
    for _ in range(3):
        senders.confirm(event)
    assert figures(alias, of_prepared.DECIDED) == {"confirmed call": 1}


def test_nothing_is_written_inside_a_transaction_or_before_its_time(
    alias: str, sender: str, told: Any, row: Any, monkeypatch: Any
) -> None:
    row()
    operations.decide(
        operations.selected(using=alias), State.CANCELLED, by="ann", reason="not yet due"
    )
    assert figures(alias, of_prepared.DECIDED) == {}
    [counted] = counters._shared.values()
    assert [each.changed != set() for each in counted.changed()] == [True]


def test_a_failure_to_count_fails_no_decision(
    alias: str, row: Any, states: Any, monkeypatch: Any
) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(counters.Minute, "add", fail)
    row()
    operations.decide(operations.selected(using=alias), State.CANCELLED, by="ann", reason="x")
    assert states() == ["cancelled"]


def test_the_command_tells_it(alias: str, row: Any, drainer: Any) -> None:
    drainer(shards=128)
    row("alias:away", age=600, unreachable=5, last_answer="OSError: a\x1bb")
    row(state=State.UNDECIDED)
    output = StringIO()
    call_command("outbox_status", stdout=output)
    lines = output.getvalue()
    assert "prepared    1, the oldest 10 min old, 1 undecided, 0 asking, 0 contradictions" in lines
    assert "decided     none per minute" in lines
    assert lines.count("alias:away: OSError: a\\x1bb") == lines.count("OSError") == 1
    assert "- 1 prepared event is undecided." in lines
