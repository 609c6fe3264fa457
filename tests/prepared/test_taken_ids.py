"""Ids that the log, or another sender, has already: refused before the sender's transaction."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import connections, transaction

from outbox_app.events.log.publish import publish
from outbox_app.events.models import Event, EventLog
from outbox_app.prepared import (
    NewPrepared,
    confirm,
    keeper,
    operations,
    prepare_many,
    prepared,
)
from outbox_app.prepared import prepare as prepare_first
from outbox_app.prepared.exceptions import PreparedConflict, PreparedError
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from tests.events.log.own_log.models import Visit
from tests.faults.tools import on

committing = pytest.mark.django_db(transaction=True)
SENDER = "alias:billing"


def request(id: UUID, stream: str = "order-17", **options: Any) -> PreparedEvent:
    given = {"data": {"total": 30}, "event_id": id, **options}
    return checked(NewPrepared(stream, "order.paid", **given))


def prepare(alias: str, *requests: PreparedEvent, sender: str = SENDER) -> list[str]:
    return [answer.state for answer in keeper.prepare(sender, requests, using=alias)]


def published(alias: str, id: UUID, data: Any, log: type[EventLog] = Event) -> None:
    with transaction.atomic(using=alias):
        publish("order-17", "order.paid", data, message_id=id, log=log, using=alias)


@pytest.mark.parametrize(("total", "answer"), [(31, "conflict"), (30, "confirmed")])
def test_an_id_that_the_log_has(alias: str, total: int, answer: str, in_log: Any) -> None:
    """Of another event it could never be confirmed; of this event it was."""
    id, free = uuid4(), uuid4()
    published(alias, id, {"total": total})
    for _ in range(2):
        assert prepare(alias, request(id), request(free)) == [answer, "prepared"]
    assert PreparedEvent.objects.using(alias).get().event_id == free
    [decided] = keeper.decide(SENDER, {id: "confirmed"}, by=keeper.CALL, using=alias)
    assert decided.state == "unknown"
    assert in_log() == [("order-17", "order.paid", {"total": total})]


def test_an_id_of_another_log_is_free(alias: str) -> None:
    of_event, of_visit = uuid4(), uuid4()
    published(alias, of_event, {})
    published(alias, of_visit, {}, log=Visit)
    free = [request(of_visit), request(of_event, log=Visit)]
    assert prepare(alias, *free) == ["prepared"] * 2
    taken = [request(of_event), request(of_visit, log=Visit)]
    assert prepare(alias, *taken, sender="alias:other") == ["conflict"] * 2


@pytest.mark.parametrize("state", ["prepared", "undecided", "confirmed", "cancelled"])
@pytest.mark.parametrize("kind", ["event", "job"])
def test_an_id_of_another_sender(alias: str, kind: str, state: str, in_log: Any) -> None:
    """Two transactions would share one event, or one task id. A cancelled one is never sent."""
    id = uuid4()
    new = NewPrepared(job="tests.door.add", args=[1], event_id=id)
    first, second = (
        checked(new) if kind == "job" else request(id, data={"total": total}) for total in (1, 2)
    )
    assert prepare(alias, first, sender="alias:first") == ["prepared"]
    if state in ("undecided", "cancelled") or kind == "job":
        PreparedEvent.objects.using(alias).update(state=state)
    elif state == "confirmed":
        keeper.decide("alias:first", {id: state}, by=keeper.CALL, using=alias)
    for _ in range(2):
        answer = "prepared" if state == "cancelled" else "conflict"
        assert prepare(alias, second, sender="alias:second") == [answer]
    assert PreparedEvent.objects.using(alias).count() == 1 + (state == "cancelled")
    assert prepare(alias, first, sender="alias:first") == [state]


def test_a_repeat_is_no_conflict(alias: str, in_log: Any) -> None:
    """While it is prepared, when it is published, and when its decision has been pruned."""
    id = uuid4()
    for _ in range(2):
        assert prepare(alias, request(id)) == ["prepared"]
    keeper.decide(SENDER, {id: "confirmed"}, by=keeper.CALL, using=alias)
    assert prepare(alias, request(id)) == ["confirmed"]
    PreparedEvent.objects.using(alias).all().delete()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert prepare(alias, request(id, metadata={"traceparent": trace})) == ["confirmed"]
    assert prepare(alias, request(id, data={"total": 31})) == ["conflict"]
    assert len(in_log()) == 1


def test_a_repeat_after_the_id_was_taken(alias: str) -> None:
    """The transaction may not have begun yet."""
    id = uuid4()
    assert prepare(alias, request(id)) == ["prepared"]
    published(alias, id, {"total": 31})
    assert prepare(alias, request(id)) == ["conflict"]


@committing
def test_a_sender_begins_no_transaction(alias: str, sender: str, fences: Any, ask: Any) -> None:
    """One of several is enough; the others are cancelled, as no fence says otherwise."""
    taken = uuid4()
    published(alias, taken, {"total": 31})
    begun = []
    refused = pytest.raises(PreparedConflict, match=r"belongs to an event.*needs a new id")
    with refused, prepared("order-17", "order.paid", using=sender, event_id=taken):
        begun.append(True)
    several = [NewPrepared("order-1", "t", immune=0), NewPrepared("order-2", "t", event_id=taken)]
    with pytest.raises(PreparedConflict, match=str(taken)):
        prepare_many(several, using=sender)
    ask()
    assert (begun, fences()) == ([], ["rolled_back"])
    assert PreparedEvent.objects.using(alias).get().state == "cancelled"


@committing
def test_a_confirm_that_is_repeated_after_its_decision_was_pruned(
    alias: str, sender: str, make: Any, pay: Any, in_log: Any
) -> None:
    event = make()
    pay(event)
    confirm(event)
    PreparedEvent.objects.using(alias).all().delete()
    confirm(event)
    assert len(in_log()) == 1


@committing
def test_an_id_that_is_published_between_prepare_and_confirm(
    alias: str, sender: str, pay: Any, states: Any, in_log: Any
) -> None:
    """The event is undecided, its reason says what to do, and the page's code does it."""
    event = prepare_first("order-17", "order.paid", {"total": 30}, using=sender)
    pay(event)
    published(alias, event.event_id, {"total": 31})
    with pytest.raises(PreparedError, match=r"undecided: .*publish its content under a new id"):
        confirm(event)
    row = PreparedEvent.objects.using(alias).get()
    assert (row.state, row.next_check_at) == ("undecided", None)
    events = operations.selected(using=alias, ids=[event.event_id])
    decided, [why] = operations.decide(events, "confirmed", by="ann", reason="paid")
    assert (decided, "under a new id" in why) == (0, True)
    page = Path(__file__).parents[2].joinpath("docs/howto/decide-prepared.md").read_text()
    [code] = re.findall(r"## The id is taken\n.*?```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("01999d2e-6f0a-7c3e-9b1a-0a1b2c3d4e5f", str(event.event_id))
    exec(code.replace('"default"', repr(alias)), {})
    assert states() == ["cancelled"]
    assert in_log() == [("order-17", "order.paid", {"total": n}) for n in (31, 30)]


@committing
def test_a_confirm_in_the_background_says_why(
    alias: str, sender: str, states: Any, told: Any, caplog: Any
) -> None:
    """The keeper was told, and does not ask again: the log must not say so."""
    with prepared("order-17", "order.paid", {"total": 30}, using=sender) as event:
        published(alias, event.event_id, {"total": 31})
    told()
    assert states() == ["undecided"]
    assert not [each for each in caplog.messages if "it will ask" in each]
    [line] = [each for each in caplog.messages if each.startswith("The keeper did not decide")]
    assert "under a new id" in line


@committing
@on("postgres", "mariadb")  # SQLite has one writer at a time
def test_two_senders_that_prepare_an_id_at_once(
    alias: str, states: Any, in_log: Any, elsewhere: Any
) -> None:
    """Neither sees the other: the second to be confirmed is undecided, and says why."""
    id = uuid4()
    first, second = (request(id, data={"total": total}) for total in (1, 2))
    answers = []

    def meanwhile(execute: Any, sql: str, *args: Any) -> Any:
        if "INSERT" in sql and "outbox_prepared" in sql and not answers:
            answers.append(elsewhere(prepare, alias, first, sender="alias:first").result())
        return execute(sql, *args)

    with connections[alias].execute_wrapper(meanwhile):
        assert prepare(alias, second, sender="alias:second") == ["prepared"]
    assert answers == [["prepared"]]
    for name in ("alias:first", "alias:second"):
        keeper.decide(name, {id: "confirmed"}, by=keeper.CALL, using=alias)
    assert states() == ["confirmed", "undecided"]
    row = PreparedEvent.objects.using(alias).get(sender="alias:second")
    assert "under a new id" in row.reason
    assert in_log() == [("order-17", "order.paid", {"total": 1})]
