"""``prepared()``: the event is published if and only if the block's transaction commits."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from celery import _state
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import Group
from django.db import DatabaseError, OperationalError, connections, transaction

from outbox_app.models import StagedJob
from outbox_app.prepared import NewPrepared, fence, keeper, prepared, prepared_many
from outbox_app.prepared import sender as senders
from outbox_app.prepared.exceptions import (
    FencedOut,
    InvalidPrepared,
    KeeperUnavailable,
    PreparedConflict,
)
from outbox_app.prepared.models import Fence, PreparedEvent
from tests import tasks
from tests.faults.tools import on

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


def paid(using: str, **options: Any) -> Any:
    return prepared("order-17", "order.paid", {"total": 30}, using=using, **options)


def test_left_without_an_error(
    alias: str, sender: str, told: Any, in_log: Any, states: Any, fences: Any
) -> None:
    with paid(sender):
        Group.objects.using(sender).create(name="business")
        assert states() == ["prepared"]
        assert in_log() == []
    told()
    assert Group.objects.using(sender).count() == 1
    assert in_log() == [("order-17", "order.paid", {"total": 30})]
    assert (states(), fences()) == (["confirmed"], ["committed"])


def test_left_with_an_error(
    alias: str, sender: str, told: Any, in_log: Any, states: Any, fences: Any
) -> None:
    def fail() -> None:
        with paid(sender):
            Group.objects.using(sender).create(name="business")
            raise ValueError("no money")

    with pytest.raises(ValueError, match="no money"):
        fail()
    told()
    assert not Group.objects.using(sender).exists()
    assert in_log() == []
    assert (states(), fences()) == (["cancelled"], ["rolled_back"])


def test_an_error_after_the_commit_cancels_nothing(
    alias: str, sender: str, told: Any, in_log: Any, states: Any
) -> None:
    def fail() -> None:
        raise ValueError("after the commit")

    with pytest.raises(ValueError, match="after the commit"), paid(sender):
        transaction.on_commit(fail, using=sender)
    told()
    assert states() == ["confirmed"]
    assert len(in_log()) == 1


@pytest.mark.parametrize("commits", [True, False])
def test_a_block_inside_a_transaction_waits_for_its_end(
    alias: str, sender: str, commits: bool, told: Any, in_log: Any, states: Any, ask: Any
) -> None:
    with transaction.atomic(using=sender):
        with paid(sender, immune=0):
            Group.objects.using(sender).create(name="business")
        told()
        assert states() == ["prepared"]
        transaction.set_rollback(not commits, using=sender)
    told()
    assert states() == ["confirmed" if commits else "prepared"]
    ask()
    assert states() == ["confirmed" if commits else "cancelled"]
    assert len(in_log()) == Group.objects.using(sender).count() == commits


@pytest.mark.parametrize("own", [False, True], ids=["of the block", "of the sender's own"])
def test_a_savepoint_takes_its_event_with_it(
    alias: str, sender: str, told: Any, in_log: Any, states: Any, ask: Any, own: bool
) -> None:
    with transaction.atomic(using=sender):
        savepoint = transaction.get_connection(sender).savepoint() if own else ""
        with suppress(ValueError), paid(sender, immune=0):
            Group.objects.using(sender).create(name="this part")
            if not own:
                raise ValueError("this part")
        if own:
            transaction.savepoint_rollback(savepoint, using=sender)
        with paid(sender):
            Group.objects.using(sender).create(name="the other part")
    told()
    ask()
    assert states() == ["cancelled", "confirmed"]
    assert len(in_log()) == 1


def test_several_events_of_one_transaction(
    alias: str, sender: str, told: Any, in_log: Any, fences: Any
) -> None:
    new = [NewPrepared(f"order-{n}", "order.paid", {"n": n}) for n in range(20)]
    with prepared_many(new, using=sender) as events:
        assert len(events) == 20
    told()
    assert in_log() == [(f"order-{n}", "order.paid", {"n": n}) for n in range(20)]
    assert fences() == ["committed"] * 20


def test_a_job(alias: str, sender: str, told: Any, make_app: Any, monkeypatch: Any) -> None:
    app = make_app()
    app.task(name="tests.add")(tasks.add)
    app.task(name="tests.loose", typing=False)(tasks.add)  # says that its arguments are its own
    monkeypatch.setattr(_state._tls, "current_app", app)
    with prepared(job="tests.add", args=[1, 2], using=sender) as event:
        pass
    told()
    senders.prepare(job="tests.loose", args=[1, 2, 3], using=sender)
    [job] = StagedJob.objects.using(alias)
    assert (job.task, job.task_id) == ("tests.add", str(event.event_id))


@on("default")
def test_a_job_whose_module_nobody_has_imported(
    alias: str, sender: str, make_app: Any, monkeypatch: Any, tmp_path: Any
) -> None:
    """As in a web process: a worker imports the modules of tasks when it starts."""
    lines = "from celery import shared_task", "@shared_task(name='late.add')", "def add(n): pass"
    (tmp_path / "late_tasks.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_state._tls, "current_app", make_app(include=["late_tasks"]))
    with pytest.raises(InvalidPrepared, match="do not fit"):
        senders.prepare(job="late.add", using=sender)
    with prepared(job="late.add", args=[1], using=sender, wait=True):
        pass
    assert StagedJob.objects.using(alias).get().task == "late.add"


def test_who_has_asked_first_has_decided(alias: str, sender: str, told: Any, states: Any) -> None:
    """An answer is true for ever: the transaction that comes after it cannot commit."""
    event = senders.prepare("order-17", "order.paid", using=sender)
    assert senders._outcomes([event]) == {event.event_id: "rolled_back"}

    def pay(swallow: Any) -> None:
        with transaction.atomic(using=sender):
            Group.objects.using(sender).create(name="business")
            with suppress(*swallow):
                fence(event)
            Group.objects.using(sender).count()

    with pytest.raises(FencedOut):
        pay([])
    with pytest.raises(DatabaseError):  # the fence has marked it for rollback
        pay([FencedOut])
    assert not Group.objects.using(sender).exists()


def test_inside_a_transaction_no_fence_is_asked(
    alias: str, sender: str, states: Any, monkeypatch: Any
) -> None:
    """An answer would wait for that transaction."""
    asked: list[Any] = []
    monkeypatch.setattr(senders, "_outcomes", lambda events: asked.append(events) or {})
    with transaction.atomic(using=sender), suppress(ValueError), paid(sender):
        raise ValueError
    assert (asked, states()) == ([], ["prepared"])


def test_the_blocks_own_error_is_raised_where_fences_give_no_answer(
    alias: str, sender: str, states: Any, monkeypatch: Any
) -> None:
    def away(*args: Any, **options: Any) -> None:
        raise OperationalError("away")

    monkeypatch.setattr(senders, "outcomes", away)
    with pytest.raises(ValueError, match="no money"), paid(sender):
        raise ValueError("no money")
    assert states() == ["prepared"]


def test_confirmed_at_once(alias: str, sender: str, in_log: Any) -> None:
    with paid(sender, wait=True):
        pass
    assert len(in_log()) == 1


def test_the_time_limit_of_a_task_ends_it_after_the_commit(
    alias: str, sender: str, in_log: Any, states: Any, monkeypatch: Any
) -> None:
    """It was logged as an error of the keeper, and the task went on past its limit."""
    ends, decide = iter([SoftTimeLimitExceeded()]), keeper.decide

    def decide_late(*args: Any, **options: Any) -> Any:
        for error in ends:
            raise error
        return decide(*args, **options)

    monkeypatch.setattr(keeper, "decide", decide_late)
    with pytest.raises(SoftTimeLimitExceeded), paid(sender, wait=True):
        pass
    assert states() == ["confirmed"]
    assert len(in_log()) == 1


def test_in_a_transaction_of_the_keeper(
    alias: str, sender: str, told: Any, states: Any, in_log: Any, monkeypatch: Any
) -> None:
    """What is prepared stays, whatever becomes of a transaction that is open there."""
    if connections[alias].vendor == "sqlite":  # has one writer at a time
        monkeypatch.setattr(keeper, "LOCK_SECONDS", 0.2)
        unavailable = pytest.raises(KeeperUnavailable)
        with transaction.atomic(using=alias), unavailable, paid(sender):
            raise AssertionError("never begun")
        return
    with transaction.atomic(using=alias):
        with paid(sender):
            pass
        told()
        transaction.set_rollback(True, using=alias)
    assert states() == ["confirmed"]
    assert len(in_log()) == 1


def test_the_same_id_again(alias: str, sender: str, told: Any, in_log: Any) -> None:
    with paid(sender) as event:
        pass
    told()
    confirmed = pytest.raises(PreparedConflict, match="is confirmed already")
    with confirmed, paid(sender, event_id=event.event_id):
        raise AssertionError("never begun")
    refused = pytest.raises(PreparedConflict, match="belongs to an event")
    with refused, prepared("order-17", "order.lost", using=sender, event_id=event.event_id):
        raise AssertionError("never begun")
    assert len(in_log()) == 1


def test_on_the_keepers_own_alias(alias: str) -> None:
    with pytest.raises(InvalidPrepared, match="in the same transaction"), paid(alias):
        raise AssertionError("never begun")
    assert not PreparedEvent.objects.using(alias).exists()
    assert not Fence.objects.using(alias).exists()
