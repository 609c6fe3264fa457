"""Fences: an answer stays true for ever, in every race with the end of the transaction."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction
from django.db.models import QuerySet
from django.utils import timezone

from outbox_app.exceptions import NotAtomic
from outbox_app.prepared import fence, fences
from outbox_app.prepared.exceptions import FencedOut
from outbox_app.prepared.fences import Question, outcomes
from outbox_app.prepared.models import Fence
from outbox_app.retention.rows import prune
from tests.faults.tools import on
from tests.patience import eventually
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
DAY = timedelta(days=1)


def answer_for(event: Any) -> str:
    asked = [Question(event.event_id, event.prepared_at)]
    return outcomes(asked, using=event.using)[event.event_id]


def written(using: str) -> dict[Any, str]:
    rows = Fence.objects.using(using).exclude(pk=Fence.MARK)
    return dict(rows.values_list("event_id", "outcome"))


@pytest.mark.parametrize("commits", [True, False])
def test_an_open_transaction_is_in_progress(
    alias: str, sender: str, commits: bool, make: Any, elsewhere: Any, request: Any
) -> None:
    if commits:  # once with the time that it is
        request.getfixturevalue("short_waits")
    event = make()
    with transaction.atomic(using=sender):
        fence(event)
        answer = elsewhere(answer_for, event)
        assert answer_for(event) == "in_progress"  # over a session of its own
        assert answer.result() == "in_progress"
        transaction.set_rollback(not commits, using=sender)
    truth = "committed" if commits else "rolled_back"
    assert [answer_for(event), elsewhere(answer_for, event).result()] == [truth, truth]
    assert written(sender) == {event.event_id: truth}


def test_asked_in_the_moment_of_the_end(alias: str, sender: str, make: Any, elsewhere: Any) -> None:
    """An answer is "in progress", or what became of it; who was answered first has decided."""
    for n in range(12):
        event, barrier = make(), threading.Barrier(2)

        def asked(event: Any = event, barrier: Any = barrier) -> str:
            barrier.wait()
            return answer_for(event)

        answer, ended = elsewhere(asked), ""
        with suppress(FencedOut), transaction.atomic(using=sender):
            if n % 3:
                fence(event)
                barrier.wait()
            else:  # late
                barrier.wait()
                fence(event)
            transaction.set_rollback(n % 2 == 0, using=sender)
            ended = "committed" if n % 2 else "rolled_back"
        truth = ended or "rolled_back"
        assert answer.result() in {"in_progress", truth}
        assert answer_for(event) == truth


@on("default", "postgres")
def test_a_transaction_that_is_late_has_an_old_snapshot(
    alias: str, sender: str, make: Any, elsewhere: Any
) -> None:
    """At REPEATABLE READ it does not see the answer, and cannot commit all the same."""
    event = make()

    def run() -> None:
        with transaction.atomic(using=sender):
            with connections[sender].cursor() as cursor:
                if connections[sender].vendor == "postgresql":
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert written(sender) == {}
            assert elsewhere(answer_for, event).result() == "rolled_back"
            fence(event)

    with pytest.raises(FencedOut):
        run()


@pytest.mark.parametrize("early", [True, False])
def test_ten_fences_under_constant_questions(
    alias: str, sender: str, early: bool, make: Any, elsewhere: Any
) -> None:
    """No lock time-out and no deadlock, at MariaDB's REPEATABLE READ too."""
    connection = connections[sender]
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 5")
    known: list[Any] = []
    answers: list[dict[Any, str]] = []
    over = threading.Event()

    def question() -> None:
        while not over.is_set():
            asked = [Question(each.event_id, each.prepared_at) for each in known]
            answers.append(outcomes(asked, using=sender))

    committed = set()
    askers = [elsewhere(question) for _ in range(3)]
    try:
        for n in range(2 if connection.vendor == "sqlite" else 6):
            events = [make(event_id=uuid4()) for _ in range(10)]  # in no order
            known[:] = events[9:] if early else []
            with suppress(FencedOut), transaction.atomic(using=sender):
                for event in events:
                    fence(event)
                    known.append(event)
                transaction.set_rollback(n % 2 == 0, using=sender)
                committed |= set() if n % 2 == 0 else {event.event_id for event in events}
    finally:
        over.set()
        connection.close()
    for asker in askers:
        asker.result()
    assert early or committed
    for answer in answers:
        for id, outcome in answer.items():
            assert outcome in {"in_progress", "committed" if id in committed else "rolled_back"}


def test_the_rest_of_a_question_does_not_wait(
    alias: str, sender: str, make: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fences, "ANSWER_SECONDS", -1)
    event = make()
    assert answer_for(event) == "in_progress"
    assert written(sender) == {}


def test_a_database_that_fails_is_not_a_transaction_that_is_open(
    alias: str, sender: str, make: Any, monkeypatch: Any
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OperationalError("disk full")

    monkeypatch.setattr(fences, "insert_if_missing", full)
    event = make()
    with pytest.raises(OperationalError, match="disk full"):
        answer_for(event)


def test_an_answer_is_committed_where_autocommit_is_off(
    alias: str, sender: str, make: Any, monkeypatch: Any
) -> None:
    event = make()
    connections[sender].ensure_connection()
    monkeypatch.setitem(connections.settings[sender], "AUTOCOMMIT", False)
    assert answer_for(event) == "rolled_back"
    assert written(sender) == {event.event_id: "rolled_back"}


def test_outside_a_transaction(alias: str, sender: str, make: Any) -> None:
    with pytest.raises(NotAtomic, match="outside a transaction"):
        fence(make())


def test_twice(alias: str, sender: str, make: Any, pay: Any) -> None:
    event = make()
    with pytest.raises(FencedOut, match="its id was used before"):
        pay(event, event)
    assert answer_for(event) == "rolled_back"


def old(event: Any, days: int) -> None:
    """Let its fence have been written so many days ago."""
    at = timezone.now() - days * DAY
    assert Fence.objects.using(event.using).filter(pk=event.event_id).update(written_at=at)


prune_fences = partial(prune, "fences")


def test_a_fence_that_was_removed_is_not_answered_for(
    alias: str, sender: str, make: Any, pay: Any
) -> None:
    committed, kept = make(), make()
    pay(committed, kept)
    old(committed, 40)
    old(kept, 20)
    assert prune_fences(using=sender, older_than=30) == 1
    assert written(sender) == {kept.event_id: "committed"}
    mark = Fence.objects.using(sender).get(pk=Fence.MARK).written_at
    for prepared_at, answer in (
        (timezone.now() - 40 * DAY, "too_old"),
        (mark + 0.99 * DAY, "too_old"),  # clocks differ
        (mark + 1.01 * DAY, "rolled_back"),
    ):
        asked = [Question(each.event_id, prepared_at) for each in (committed, kept)]
        answers = {committed.event_id: answer, kept.event_id: "committed"}
        assert outcomes(asked, using=sender) == answers


def test_what_one_keeper_was_told_is_rolled_back_for_another(
    alias: str, sender: str, make: Any
) -> None:
    event = make()
    asked = [Question(event.event_id, event.prepared_at)]
    for keeper in ("one", "another"):
        assert outcomes(asked, keeper=keeper, using=sender) == {event.event_id: "rolled_back"}


def test_the_mark_is_there_when_pruning_is_interrupted(
    alias: str, sender: str, make: Any, pay: Any, monkeypatch: Any
) -> None:
    events = [make() for _ in range(5)]
    pay(*events)
    for event in events:
        old(event, 40)
    delete, left = QuerySet._raw_delete, [None]

    def interrupted(*args: Any, **options: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return delete(*args, **options)

    monkeypatch.setattr(QuerySet, "_raw_delete", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune_fences(using=sender, older_than=30, batch_size=2)
    monkeypatch.undo()
    asked = [Question(event.event_id, timezone.now() - 40 * DAY) for event in events]
    assert sorted(outcomes(asked, using=sender).values()) == ["committed"] * 3 + ["too_old"] * 2
    assert prune_fences(using=sender, older_than=30) == 3


def test_the_mark_never_goes_back(alias: str, sender: str, make: Any, pay: Any) -> None:
    pay(make())
    marks = []
    for days in (10, 30, 5):
        prune_fences(using=sender, older_than=days)
        marks.append(Fence.objects.using(sender).get(pk=Fence.MARK).written_at)
    assert marks[0] == marks[1] < marks[2]


WAITING = {
    "postgres": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
    MARIADB: "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


@on("default", "postgres")
@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_an_answer_waits_for_the_end(
    alias: str, sender: str, level: str, make: Any, elsewhere: Any, monkeypatch: Any
) -> None:
    """And then has seen it, whatever isolation the project has chosen for the alias."""
    monkeypatch.setattr(fences, "LOCK_SECONDS", 30)
    options = dict(connections.settings[sender].get("OPTIONS", {}))
    if sender == "postgres":
        value = level.lower().replace(" ", r"\ ")
        options["options"] = f"-c default_transaction_isolation={value}"
    else:
        options["isolation_level"] = level.lower()
    monkeypatch.setitem(connections.settings[sender], "OPTIONS", options)
    connections[sender].close()
    try:
        for commits in (True, False) if sender == "postgres" else (True,):
            event = make()
            with transaction.atomic(using=sender):
                fence(event)
                answer = elsewhere(answer_for, event)
                watcher = connections.create_connection(sender)
                eventually(partial(waiting, watcher))
                watcher.close()
                transaction.set_rollback(not commits, using=sender)
            assert answer.result() == ("committed" if commits else "rolled_back")
    finally:
        connections[sender].close()


def waiting(watcher: Any) -> bool:
    with watcher.cursor() as cursor:
        cursor.execute(WAITING[watcher.alias])
        return bool(cursor.fetchall())


def test_without_time_zones(
    alias: str, sender: str, settings: Any, make: Any, pay: Any, ask: Any, states: Any
) -> None:
    settings.USE_TZ = False
    event, other = make(), make()
    pay(event)
    ask()
    assert states() == ["confirmed", "cancelled"]
    old(event, 40)
    assert prune_fences(using=sender, older_than=30) == 1
    then = timezone.now() - 40 * DAY
    asked = [Question(event.event_id, then), Question(other.event_id, other.prepared_at)]
    answers = {event.event_id: "too_old", other.event_id: "rolled_back"}
    assert outcomes(asked, using=sender) == answers
