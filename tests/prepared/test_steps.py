"""The steps without a block, their refusals, and the decisions that they leave to others."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import OperationalError, connections, transaction

from outbox_app.events.models import Event
from outbox_app.exceptions import NotAtomic
from outbox_app.models import Incident
from outbox_app.prepared import (
    NewPrepared,
    acancel,
    aconfirm,
    aprepare,
    aprepare_many,
    cancel,
    confirm,
    confirm_on_commit,
    fence,
    keeper,
    prepare,
    prepare_many,
    prepared,
    request,
)
from outbox_app.prepared import sender as senders
from outbox_app.prepared.exceptions import (
    Contradiction,
    FencedOut,
    InvalidPrepared,
    KeeperUnavailable,
    PreparedConflict,
    PreparedError,
)
from outbox_app.prepared.local import LocalKeeper
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.process.background import Background
from tests.faults.tools import on
from tests.patience import eventually, patience

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


def test_step_by_step(
    alias: str, sender: str, make: Any, pay: Any, states: Any, in_log: Any
) -> None:
    event = make()
    pay(event)
    assert in_log() == []
    confirm(event)
    confirm(event)
    assert (states(), len(in_log())) == (["confirmed"], 1)
    with pytest.raises(FencedOut, match="says committed"):
        cancel(event)
    withdrawn = make()
    cancel(withdrawn)
    cancel(withdrawn)
    assert states() == ["confirmed", "cancelled"]
    with pytest.raises(FencedOut, match="says rolled_back"):
        confirm(withdrawn)
    with pytest.raises(FencedOut):
        pay(withdrawn)


@pytest.mark.usefixtures("short_waits")
def test_confirm_inside_the_transaction(alias: str, sender: str, make: Any, states: Any) -> None:
    """Its own fence is not committed yet: it is in progress."""
    event = make()
    with transaction.atomic(using=sender):
        fence(event)
        with pytest.raises(FencedOut, match="in_progress"):
            confirm(event)
        with pytest.raises(FencedOut, match="in_progress"):
            cancel(event)
    assert states() == ["prepared"]
    confirm(event)
    assert states() == ["confirmed"]


def test_confirm_of_a_transaction_that_had_no_fence(alias: str, make: Any, states: Any) -> None:
    with pytest.raises(FencedOut, match=r"Call fence\(event\) inside the transaction"):
        confirm(make())
    assert states() == ["prepared"]


def test_a_person_or_a_policy_was_first(alias: str, make: Any, pay: Any, in_log: Any) -> None:
    cancelled, confirmed = make(), make()
    for event, state in ((cancelled, "cancelled"), (confirmed, "confirmed")):
        decision = {event.event_id: state}
        name = LocalKeeper(event.using).sender
        keeper.decide(name, decision, by="ann", using=alias)
    pay(cancelled)
    with pytest.raises(Contradiction, match=r"by ann\), so it cannot be confirmed"):
        confirm(cancelled)
    with pytest.raises(Contradiction, match=r"by ann\), so it cannot be cancelled"):
        cancel(confirmed)
    assert Incident.objects.using(alias).count() == 2
    assert len(in_log()) == 1


def test_a_confirm_that_publishes_nothing_says_so(
    alias: str, make: Any, pay: Any, states: Any
) -> None:
    event = make()
    PreparedEvent.objects.using(alias).update(content={"data": 1, "metadata": {}})
    pay(event)
    with pytest.raises(PreparedError, match=r"undecided: .*edited by hand"):
        confirm(event)
    assert states() == ["undecided"]


@pytest.mark.parametrize("times", [1, 2])
def test_the_keeper_was_restored_to_before_the_prepare(
    alias: str, make: Any, pay: Any, states: Any, in_log: Any, times: int
) -> None:
    """Twice at once as well, as where a call waits in the queue beside the same call."""
    event = make()
    pay(event)
    PreparedEvent.objects.using(alias).all().delete()
    confirm(*[event] * times)
    assert (states(), len(in_log())) == (["confirmed"], 1)


def test_the_keeper_was_restored_to_before_the_confirm(
    alias: str, make: Any, pay: Any, states: Any, in_log: Any, ask: Any
) -> None:
    """The log, which was not, takes it once."""
    event = make()
    pay(event)
    confirm(event)
    rows = PreparedEvent.objects.using(alias)
    rows.update(state="prepared", decided_at=None, next_check_at=rows.get().prepared_at)
    ask()
    assert (states(), len(in_log())) == (["confirmed"], 1)


def test_the_senders_database_was_restored(
    alias: str, sender: str, make: Any, pay: Any, ask: Any, states: Any
) -> None:
    """Without its business rows the event is cancelled, too."""
    event = make()
    pay(event)
    Fence.objects.using(sender).all().delete()
    ask()
    assert states() == ["cancelled"]
    with pytest.raises(FencedOut):
        pay(event)


@pytest.mark.parametrize("commits", [True, False])
def test_confirm_on_commit(
    alias: str, sender: str, commits: bool, make: Any, told: Any, states: Any
) -> None:
    with transaction.atomic(using=sender):
        event = make()
        fence(event)
        confirm_on_commit(event)
        told()
        assert states() == ["prepared"]
        transaction.set_rollback(not commits, using=sender)
    told()
    assert states() == ["confirmed" if commits else "prepared"]


def test_confirm_on_commit_outside_a_transaction(alias: str, make: Any, states: Any) -> None:
    with pytest.raises(NotAtomic):
        confirm_on_commit(make())
    assert states() == ["prepared"]


def test_a_request_with_a_transaction_on_the_keeper(
    alias: str, sender: str, told: Any, states: Any, ask: Any
) -> None:
    """``ATOMIC_REQUESTS``: the request fails after the commit of the business transaction."""
    if connections[alias].vendor == "sqlite":  # has one writer: see test_block
        return

    def request() -> None:
        with transaction.atomic(using=alias):
            Group.objects.using(alias).create(name="session")
            with prepared("order-17", "order.paid", using=sender):
                Group.objects.using(sender).create(name="business")
            raise ValueError("the response")

    with pytest.raises(ValueError, match="the response"):
        request()
    told()
    assert states() == ["confirmed"]
    assert not Group.objects.using(alias).exists()
    assert Group.objects.using(sender).exists()


def test_where_autocommit_is_off(alias: str, make: Any, states: Any, monkeypatch: Any) -> None:
    """What is prepared is committed when the call returns."""
    if connections[alias].vendor == "sqlite":
        return
    connection = connections[alias]
    connection.set_autocommit(False)
    try:
        make()
        connection.rollback()
    finally:
        connection.set_autocommit(True)
    assert states() == ["prepared"]


def test_from_coroutines(alias: str, sender: str, pay: Any, states: Any) -> None:
    async def run() -> None:
        event = await aprepare("order-17", "order.paid", {}, using=sender)
        await sync_to_async(pay)(event)
        await aconfirm(event)
        [other] = await aprepare_many([NewPrepared("order-18", "order.paid")], using=sender)
        await acancel(other)
        await sync_to_async(connections.close_all)()

    asyncio.run(run())
    assert states() == ["confirmed", "cancelled"]


# One-way calls


def send(call: Callable[[Any], object], items: list[Any]) -> None:
    senders.calls.send(senders._attempt, items, call)


@pytest.fixture
def stuck(monkeypatch: Any) -> Any:
    """All threads for one-way calls are busy until the test ends."""
    go = threading.Event()
    calls = Background("stuck", threads=2, longest=3, together=100, at_exit=0)
    monkeypatch.setattr(senders, "calls", calls)
    for _ in range(calls.most_threads):
        entered = threading.Event()

        def hang(items: Any, entered: Any = entered) -> None:
            entered.set()
            go.wait(patience(60))

        send(hang, [None])
        assert entered.wait(patience(20))
    yield go
    go.set()
    assert senders.calls.drain(patience(10))


def test_a_keeper_that_hangs_holds_up_no_request(
    alias: str, sender: str, stuck: Any, states: Any, in_log: Any, ask: Any
) -> None:
    """The queue fills, and what is too much is dropped: the check-back finds all."""
    begin = time.monotonic()
    for n in range(6):
        with prepared(f"order-{n}", "order.paid", {}, using=sender, immune=0):
            pass
    assert time.monotonic() - begin < patience(10)
    assert senders.calls.waiting.full()
    assert states() == ["prepared"] * 6
    ask()
    assert (states(), len(in_log())) == (["confirmed"] * 6, 6)


def test_exit_waits_for_a_short_time(stuck: Any) -> None:
    send(lambda items: None, [None])
    begin = time.monotonic()
    assert not senders.calls.drain(0.2)
    assert time.monotonic() - begin < patience(2)
    stuck.set()
    assert senders.calls.drain(patience(10))


def test_a_call_that_fails_costs_no_thread(stuck: Any) -> None:
    stuck.set()
    done: list[int] = []

    def fail(items: Any) -> None:
        raise OSError("refused")

    assert senders.calls.drain(patience(10))
    for call in (fail, fail, done.extend):
        send(call, [1])
    assert senders.calls.drain(patience(10))
    assert done == [1]


def test_calls_that_wait_are_made_as_one(stuck: Any) -> None:
    made: list[list[int]] = []
    for number in range(3):
        send(made.append, [number, number])
    stuck.set()
    assert senders.calls.drain(patience(10))
    assert sorted(item for items in made for item in items) == [0, 0, 1, 1, 2, 2]
    assert len(made) < 3


def test_a_process_that_can_start_no_thread(stuck: Any, monkeypatch: Any) -> None:
    """At its end, for example: the call is lost without an error."""

    def start(thread: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    stuck.set()
    assert senders.calls.drain(patience(10))
    monkeypatch.setattr(senders.calls, "threads", set())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        send(lambda items: None, [None])
    assert senders.calls.threads == set()
    send(lambda items: None, [None])


def test_a_fork_has_threads_of_its_own(stuck: Any) -> None:
    """And leaves the calls of its parent to its parent."""
    send(lambda items: None, [None])
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            empty = not senders.calls.waiting.qsize()
            send(partial(os.writev, writing), [b"sent" if empty else b"twice"])
            senders.calls.drain(10)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 10) == b"sent"
    os.close(reading)
    assert senders.calls.waiting.qsize() == 1


def test_a_call_that_goes_on_in_a_fork() -> None:
    """As one of a greenlet does, which the child has, too: the queue begins anew beside it."""
    calls = Background("forked", threads=1, longest=3, together=100, at_exit=0)
    going: list[threading.Thread] = []
    failed: list[Any] = []

    def fork(items: Any) -> None:
        going.append(threading.current_thread())
        calls._begin()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failed.append)
        calls.send(fork, [None])
        eventually(lambda: going)
        going[0].join(patience())
    assert failed == []


# Bad input

BAD: dict[str, dict[str, Any]] = {
    "no stream": {"stream": ""},
    "stream is no text": {"stream": 17},
    "long stream": {"stream": "x" * 256},
    "no type": {"type": ""},
    "NUL": {"type": "a\x00"},
    "surrogate": {"topic": "\ud800"},
    "NaN": {"data": {"n": float("nan")}},
    "no JSON": {"data": object()},
    "large": {"data": "x" * 300_000},
    "metadata": {"metadata": {1, 2}},
    "metadata are a list": {"metadata": [1]},
    "log": {"log": "no_such_log"},
    "log is no log": {"log": PreparedEvent},
    "log is a number": {"log": 5},
    "event id": {"event_id": "17"},
    "event id is a number": {"event_id": 17},
    "event id of zeros": {"event_id": UUID(int=0)},
    "policy": {"policy": "guess"},
    "no policy": {"policy": None},
    "list of policies": {"policy": ["ask"]},
    "decide_by in the past": {"decide_by": -1},
    "decide_by now": {"decide_by": 0},
    "decide_by beyond the fences": {"decide_by": 15 * 86400},
    "decide_by is a text": {"decide_by": "1"},
    "decide_by is NaN": {"decide_by": float("nan")},
    "decide_by is no float": {"decide_by": 10**400},
    "decide_by is True": {"decide_by": True},
    "immune before": {"immune": -0.1},
    "immune after decide_by": {"immune": 11, "decide_by": 10},
    "args of an event": {"args": [1]},
    "kwargs of an event": {"kwargs": {"a": 1}},
    "event and job": {"job": "celery.accumulate"},
    "no such task": {"job": "no.such", "stream": "", "type": ""},
    "task is no text": {"job": 5, "stream": "", "type": ""},
    "args are a text": {"job": "celery.accumulate", "stream": "", "type": "", "args": "abc"},
    "args are a number": {"job": "celery.accumulate", "stream": "", "type": "", "args": 5},
    "kwargs are a list": {"job": "celery.accumulate", "stream": "", "type": "", "kwargs": [1]},
    "no such keeper": {"to": "nowhere"},
    "no such alias": {"using": "nowhere"},
}


def test_bad_input(alias: str, sender: str) -> None:
    """Nothing is sent, and nothing is written."""
    for name, bad in BAD.items():
        options = {"stream": "s", "type": "t", "using": sender, **bad}
        with pytest.raises(InvalidPrepared) as refused:
            prepare(**options)
        assert 10 < len(str(refused.value)) < 400, name
    with pytest.raises(InvalidPrepared, match="NewPrepared"):
        prepare_many([{"stream": "s"}], using=sender)  # type: ignore[list-item]
    with pytest.raises(InvalidPrepared, match="same event_id"):
        prepare_many([NewPrepared("s", "t", event_id=UUID(int=5))] * 2, using=sender)
    assert not PreparedEvent.objects.using(alias).exists()


def test_a_log_of_another_database_than_the_keepers(monkeypatch: Any) -> None:
    new = NewPrepared("s", "t")
    assert request.checked(new, using="default").log == "outbox_event"
    monkeypatch.setattr(request, "model_alias", lambda log: "elsewhere")
    with pytest.raises(InvalidPrepared, match="is not on the keeper's 'default'"):
        request.checked(new, using="default")


def test_of_many_one_is_known(alias: str, sender: str, make: Any, ask: Any, states: Any) -> None:
    """It is an error for all; the check-back cancels the rest."""
    known = make()
    cancel(known)
    new = [
        NewPrepared("order-1", "order.paid", immune=0),
        NewPrepared("order-17", "order.paid", {"total": 30}, event_id=known.event_id),
    ]
    with pytest.raises(PreparedConflict, match="is cancelled already"):
        prepare_many(new, using=sender)
    ask()
    assert states() == ["cancelled", "cancelled"]


def test_a_log_by_its_name(alias: str, sender: str, settings: Any, told: Any) -> None:
    for log in ("outbox_event", "outbox_events.Event", Event):
        with prepared("s", "t", using=sender, log=log, event_id=uuid4()):
            pass
    told()
    assert Event.objects.using(alias).count() == 3


@on("postgres", "mariadb")
def test_the_keepers_database_is_away(alias: str, sender: str, make: Any, monkeypatch: Any) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(keeper, "prepare", fail)
        away = pytest.raises(KeeperUnavailable, match="gave no answer: connection refused")
        with away, prepared("s", "t", using=sender):
            raise AssertionError("never begun")
    event = make()
    cancelled = pytest.raises(KeeperUnavailable)
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "decide", fail)
        with cancelled:
            cancel(event)
        # After a commit no error is raised: the transaction would be taken for rolled back.
        with prepared("s", "t", using=sender, wait=True):
            pass
        with transaction.atomic(using=alias):  # of the caller, and goes on
            with pytest.raises(KeeperUnavailable):
                cancel(event)
            assert PreparedEvent.objects.using(alias).count() == 2


@on("postgres", "mariadb")
def test_a_session_of_the_keeper_that_was_lost_is_replaced(alias: str, make: Any) -> None:
    is_postgres = connections[alias].vendor == "postgresql"
    end = "SELECT pg_terminate_backend(pg_backend_pid())" if is_postgres else "KILL CONNECTION_ID()"
    with pytest.raises(OperationalError), connections[alias].cursor() as cursor:
        cursor.execute(end)
    with pytest.raises(KeeperUnavailable):
        make()
    make()


# In a test's transaction


@pytest.mark.django_db(databases=["default", "postgres", "mariadb"])
def test_in_a_test_leaving_the_block_is_the_commit(
    alias: str, sender: str, in_log: Any, states: Any
) -> None:
    with prepared("order-1", "order.paid", {}, using=sender):
        pass
    with pytest.raises(ValueError, match="no"), prepared("order-2", "order.paid", {}, using=sender):
        raise ValueError("no")
    with prepared("order-3", "order.paid", {}, using=sender):
        transaction.set_rollback(True, using=sender)
    assert states() == ["confirmed", "cancelled", "cancelled"]
    assert len(in_log()) == 1


@pytest.mark.django_db(databases=["default", "postgres", "mariadb"])
def test_in_a_test_a_transaction_of_the_code_is_not_the_tests(
    alias: str, sender: str, make: Any, states: Any
) -> None:
    """Nothing is written outside the test's transaction, which is rolled back."""
    with transaction.atomic(using=alias):  # as ATOMIC_REQUESTS opens it
        event = make()
    with transaction.atomic(using=sender):
        fence(event)
        with pytest.raises(FencedOut, match="in_progress"):
            confirm(event)
    confirm(event)
    assert states() == ["confirmed"]
    other = connections.create_connection(alias)
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM outbox_prepared")
            assert cursor.fetchone() == (0,)
    finally:
        other.close()
