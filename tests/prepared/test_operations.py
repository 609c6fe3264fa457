"""What people do with events in doubt: they have senders asked, decide, or give more time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import NotMigrated
from outbox_app.models import Incident
from outbox_app.prepared import operations
from outbox_app.prepared import sender as senders
from outbox_app.prepared.checking_back import SenderWorker
from outbox_app.prepared.exceptions import Contradiction
from outbox_app.prepared.models import PreparedEvent
from outbox_app.process import preflight

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])

State = PreparedEvent.State


@pytest.fixture
def doubtful(alias: str, sender: str) -> Any:
    """``doubtful(count, **columns)``: create undecided events. Returns their ids."""

    def make(count: int = 1, **columns: Any) -> list[UUID]:
        events = [
            senders.prepare(f"order-{n}", "order.paid", {"total": n}, using=sender)
            for n in range(count)
        ]
        ids = [event.event_id for event in events]
        values = {"state": State.UNDECIDED, "next_check_at": None, "reason": "not said in time"}
        PreparedEvent.objects.using(alias).filter(event_id__in=ids).update(**values | columns)
        return ids

    return make


def test_events_are_decided_batch_by_batch(
    alias: str, doubtful: Any, states: Any, monkeypatch: Any
) -> None:
    doubtful(5)
    monkeypatch.setattr(operations, "BATCH_SIZE", 2)
    lines: list[str] = []
    rows = operations.selected(using=alias)
    assert operations.decide(
        rows, State.CANCELLED, by="ann", reason="restored", write=lines.append
    ) == (5, [])
    assert [line.rpartition(" ")[2] for line in lines] == ["total=2/5", "total=4/5", "total=5/5"]
    assert states() == ["cancelled"] * 5


def test_one_that_was_edited_by_hand_cannot_be_confirmed(
    alias: str, doubtful: Any, states: Any, in_log: Any
) -> None:
    doubtful(2)
    PreparedEvent.objects.using(alias).filter(stream="order-0").update(stream="order-x")
    rows = operations.selected(using=alias)
    count, [failed] = operations.decide(rows, State.CONFIRMED, by="ann", reason="x")
    assert count == 1
    assert "it was edited by hand" in failed
    assert states() == ["undecided", "confirmed"]
    assert len(in_log()) == 1


def test_check_has_the_sender_asked(
    alias: str, sender: str, doubtful: Any, ask: Any, states: Any
) -> None:
    """Also where the time to decide is over, and where it is not: the fence has the last word."""
    late, early = doubtful(2)
    over = DatabaseNow() - timedelta(days=1)
    PreparedEvent.objects.using(alias).filter(event_id=late).update(decide_by=over)
    ask()
    assert states() == ["undecided"] * 2
    assert operations.check(operations.selected(using=alias, ids=[late, early])) == 2
    ask()
    assert states() == ["cancelled"] * 2


def test_check_while_the_transaction_is_open(
    alias: str, sender: str, ask: Any, states: Any
) -> None:
    """What its sender cannot say yet is asked again, as long as there is time."""
    event = senders.prepare("order-17", "order.paid", using=sender)
    events = PreparedEvent.objects.using(alias)
    events.update(state=State.UNDECIDED, next_check_at=None)
    operations.check(operations.selected(using=alias))
    asking = SenderWorker(f"alias:{sender}", using=alias)
    rows = asking._claim()
    asking.settle(rows, {event.event_id: "in_progress"})
    [row] = events.all()
    assert (row.state, row.answered, row.next_check_at is None) == ("undecided", 1, False)
    events.update(next_check_at=DatabaseNow())
    ask()
    assert states() == ["cancelled"]


def test_extend_lets_senders_be_asked_for_longer(
    alias: str, sender: str, doubtful: Any, states: Any
) -> None:
    [id] = doubtful(decide_by=DatabaseNow() - timedelta(days=1))
    events = operations.selected(using=alias, ids=[id])
    assert operations.extend(events, by="ann", reason="back at noon") == 1
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.state == "prepared"
    assert timedelta(hours=23) < row.decide_by - row.now <= timedelta(days=1)
    assert row.next_check_at <= row.now
    assert row.reason == "Extended by ann: back at noon"
    events = operations.selected(using=alias)
    events.update(decide_by=DatabaseNow() + timedelta(days=3))
    operations.extend(events, by="ann", reason="never earlier than it was")
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.decide_by - row.now > timedelta(days=2)


def test_a_person_with_the_name_of_a_route_is_told_from_it(alias: str, doubtful: Any) -> None:
    doubtful()
    operations.decide(operations.selected(using=alias), State.CANCELLED, by="policy", reason="x")
    assert PreparedEvent.objects.using(alias).get().decided_by == "policy (a person)"


def test_a_late_confirm_against_a_person_is_a_contradiction(
    alias: str, sender: str, states: Any
) -> None:
    """The risk that is asked about."""
    event = senders.prepare("order-17", "order.paid", using=sender)
    with transaction.atomic(using=sender):
        senders.fence(event)
    rows = operations.selected(using=alias, ids=[event.event_id])
    assert operations.decide(rows, State.CANCELLED, by="ann", reason="guessed") == (1, [])
    with pytest.raises(Contradiction):
        senders.confirm(event)
    [incident] = Incident.objects.using(alias)
    assert (incident.kind, "(by ann), so it cannot be confirmed" in incident.detail) == (
        "contradiction",
        True,
    )


def test_an_alias_without_fences_is_said_before_anything_is_sent(
    alias: str, sender: str, states: Any, monkeypatch: Any
) -> None:
    senders._require_fences.cache_clear()
    tables = connections[sender].introspection
    with monkeypatch.context() as patch:
        patch.setattr(tables, "table_names", lambda: ["business"])
        patch.setattr(preflight, "is_hidden", lambda table, using: False)  # it asks for the table
        with pytest.raises(NotMigrated, match=f"{sender}.* has no table outbox_fence"):
            senders.prepare("order-17", "order.paid", using=sender)
    assert states() == []
    senders.prepare("order-17", "order.paid", using=sender)
    assert senders._require_fences.cache_info().currsize == 1
