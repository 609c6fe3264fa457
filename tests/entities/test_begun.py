"""Commands that may have been executed: no error says that they were not.

A batch of three is committed, and its leader ends before the answers. The other callers do the
rest of its work, one at a time.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import InternalError, OperationalError, connections

from outbox_app.entities import Command, queue
from outbox_app.entities.batch import Batch, Moved
from outbox_app.entities.exceptions import DamagedEntity, OutcomeUnknown
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account
from tests.patience import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]


@pytest.fixture
def broken_off(account, withdraw, held, fresh, monkeypatch):
    """The second command of the batch is in progress again, up to ``go``; the third one waits."""
    there, go = threading.Event(), threading.Event()

    def end():
        monkeypatch.setattr(Account, "batch_size", 1)
        set_failpoint("entity_committed", None)
        set_failpoint("entity_loaded", hold)
        raise SystemExit

    def hold():
        there.set()
        assert go.wait(60)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        calls = []
        for number in range(3):
            calls.append(pool.submit(withdraw, f"c{number}"))
            eventually(lambda: fresh.waiting == len(calls))
        set_failpoint("entity_committed", lambda: set_failpoint("entity_committed", end))
        held.go.set()
        first.result()
        assert there.wait(60)
        yield calls[1:], go
        go.set()
    set_failpoint("entity_loaded", None)


def test_a_process_that_ends(broken_off, fresh, rows):
    [second, third], go = broken_off
    closing = threading.Thread(target=fresh.close)
    closing.start()
    assert isinstance(third.exception(), OutcomeUnknown)
    go.set()
    assert second.result().replayed
    closing.join()
    assert len(rows()) == 5


@pytest.mark.parametrize("error", [Moved, OperationalError, InternalError])
def test_an_attempt_that_could_not_look(broken_off, rows, monkeypatch, error):
    def fail(*args):
        raise error

    calls, go = broken_off
    monkeypatch.setattr(Batch, "_look_up", fail)
    go.set()
    assert [type(call.exception()) for call in calls] == [OutcomeUnknown] * 2
    assert len(rows()) == 5


def test_an_entity_that_was_edited_by_hand(account, withdraw, alias):
    withdraw("x")
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE account SET version = 7 WHERE id = 'a'")
    asked = [Command("a", "withdraw", {"amount": 1}, command_id=id) for id in "xy"]
    calls = [queue.Call(each, queue.deadline_after(60, 60)) for each in asked]
    for call in calls:
        call.begun = True
    queue.answer(Account, calls, using=alias)
    assert calls[0].answer.replayed
    assert isinstance(calls[1].answer, DamagedEntity)


def test_an_answer_is_found(broken_off):
    [second, third], go = broken_off
    go.set()
    assert [call.result().replayed for call in (second, third)] == [True, True]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_commit_that_is_still_under_way(
    alias, account, withdraw, held, fresh, declare, rows, break_off
):
    """It is waited for: what a handler raises before is no answer to what is about to be there."""

    def give(self):
        self.state["given"] = True

    def take(self):
        if not self.state.pop("given", False):
            raise ZeroDivisionError

    def ask(command):
        try:
            return Account.execute("a", command, command_id=command, using=alias)
        finally:
            connections.close_all()

    def lead():
        break_off(b"SELECT pg_sleep(0.5); COMMIT")
        return ask("give")

    declare(give)
    declare(take)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        leader = pool.submit(lead)
        eventually(lambda: fresh.waiting == 1)
        other = pool.submit(ask, "take")
        eventually(lambda: fresh.waiting == 2)
        held.go.set()
        first.result()
        assert type(leader.exception()) is SystemExit
        assert other.result().replayed
    assert len(rows()) == 4
