"""The counters of commands in a process: their values, when they are written, and their cost."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import DatabaseError, DataError, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.entities import Command, Rejected, counting
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.batch import Moved
from outbox_app.entities.exceptions import EntityContended
from outbox_app.entities.queue import queues
from outbox_app.entities.series import NAMES
from outbox_app.events.signals import events_published
from outbox_app.models import Statistic
from outbox_app.process import counters
from tests.entities.models import Account, Person, PersonVersion
from tests.process.counters.planted import totals

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def written(alias, monkeypatch):
    """``written()``: write the counters, and return the rows of the table, by name and label."""

    def read():
        monkeypatch.setattr(counters, "EVERY", 0)
        counting.write_if_due(alias)
        monkeypatch.setattr(counters, "EVERY", 1000)
        return totals(alias)

    monkeypatch.setattr(counters, "EVERY", 1000)
    return read


def without_times(found):
    return {key: value for key, value in found.items() if "commit_time" not in key}


def test_what_is_counted(alias, account, ask, written):
    ask("withdraw", {"amount": 1})
    ask("withdraw", {"amount": 99})
    ask("open", {"owner": "bob"}, id="b")
    ask("open", {"owner": "bob"})
    commands = [Command("a", "withdraw", {"amount": 99}, command_id=f"x{n}") for n in range(7)]
    Account.execute_many(commands, using=alias)
    with pytest.raises(ZeroDivisionError):
        ask("fail")
    assert ask("withdraw", {"amount": 1}, command_id="c1").replayed
    found = written()
    times = [value for key, value in found.items() if "commit_time" in key]
    assert sum(times) == 6
    assert without_times(found) == {
        "commands": 12,
        "rejected_commands balance": 8,
        "rejected_commands exists": 1,
        "command_batch_size 1": 5,
        "command_batch_size 10": 1,
        "commands_waiting": 0,
    }
    ask("withdraw", {"amount": 1})
    assert written()["commands"] == 13
    assert set(Statistic.objects.using(alias).values_list("name", flat=True)) <= {*NAMES}


def test_they_are_written_every_ten_seconds_after_the_answer(alias, account, ask, monkeypatch):
    ask("withdraw", {"amount": 1})
    assert totals(alias) == {}
    [counted] = counters._shared.values()
    monkeypatch.setattr(counted, "_tried_at", float("-inf"))
    with CaptureQueriesContext(connections[alias]) as seen:
        ask("withdraw", {"amount": 1})
    at = [number for number, query in enumerate(seen) if "outbox_statistic" in query["sql"]]
    assert len(at) == 1
    assert "account_version" not in "".join(
        query["sql"] for query in seen.captured_queries[at[0] :]
    )
    assert totals(alias)["commands"] == 3


def test_what_the_callers_transaction_takes_back_is_not_counted(alias, account, ask, written):
    with transaction.atomic(using=alias):
        ask("withdraw", {"amount": 1})
        with transaction.atomic(using=alias):
            ask("withdraw", {"amount": 1})
            transaction.set_rollback(True, using=alias)
        savepoint = transaction.get_connection(alias).savepoint()
        ask("withdraw", {"amount": 1})
        transaction.savepoint_rollback(savepoint, using=alias)
        assert written() == {}
    found = written()
    assert found["commands"] == 2
    assert found["command_batch_size 1"] == 2
    assert sum(value for key, value in found.items() if "commit_time" in key) == 1


def test_a_transaction_that_commits_writes_what_is_due(alias, account, ask, monkeypatch):
    monkeypatch.setattr(counters, "EVERY", 0)
    with transaction.atomic(using=alias):
        ask("withdraw", {"amount": 1})
        assert totals(alias) == {}
    assert totals(alias)["commands"] == 2


def test_conflicts(alias, account, ask, written, monkeypatch):
    original, left = entity_transaction.Batch._write, [2]

    def moved(self):
        if left[0]:
            left[0] -= 1
            raise Moved
        original(self)

    monkeypatch.setattr(entity_transaction.Batch, "_write", moved)
    ask("withdraw", {"amount": 1})
    assert written()["command_conflicts"] == 2
    left[0] = 99
    with pytest.raises(EntityContended):
        ask("withdraw", {"amount": 1})
    found = written()
    assert found["command_conflicts"] == 2 + entity_transaction.ATTEMPTS
    assert found["commands"] == 2


def test_a_row_that_an_index_refuses_is_no_conflict(alias, written):
    for id in "ab":
        answer = Person.execute(id, "enter", {"email": "x"}, command_id="x", using=alias)
    assert answer.rejected.code == "email"
    found = written()
    assert found["rejected_commands email"] == 1
    assert "command_conflicts" not in found


def test_what_an_index_refused_before_a_batch_was_halved_takes_no_conflict_away(alias, written):
    def refuse(events, **kwargs):
        if any(event.command_id == "c0" for event in events):
            raise DataError("out of range")

    for id, state in (("b", {"email": "x"}), ("a", {})):
        Person.execute(id, "enter", state, command_id="enter", using=alias)
    commands = [
        Command("a", "change", state, command_id=f"c{number}")
        for number, state in enumerate(({"age": 1}, {"email": "x"}))
    ]
    events_published.connect(refuse, sender=PersonVersion)
    try:
        answers = Person.execute_many(commands, using=alias, return_exceptions=True)
    finally:
        events_published.disconnect(refuse, sender=PersonVersion)
    assert (type(answers[0]), answers[1].rejected.code) == (DataError, "email")
    assert "command_conflicts" not in written()


@pytest.fixture
def one_minute(monkeypatch):
    """Count everything in a test's first minute, because labels are per minute."""
    original, begun = counters.Counters.at, []

    def at(self, now, source):
        begun.append(now)
        return original(self, begun[0], source)

    monkeypatch.setattr(counters.Counters, "at", at)


def test_labels_are_bounded(alias, account, ask, written, declare, one_minute, monkeypatch):
    def refuse(self, code):
        raise Rejected("No.", code=code)

    declare(refuse, creates=True)
    monkeypatch.setattr(counting, "CODES", 3)
    for number in range(30):
        ask("withdraw", {"amount": 0})
        ask("refuse", {"code": f"code{number % 6}"}, id=f"e{number}")
    found = written()
    codes = {key.split()[-1]: n for key, n in found.items() if "rejected" in key}
    assert codes == {"code0": 5, "code1": 5, "code2": 5, "other": 15}


def test_a_write_that_fails_costs_no_answer(alias, account, ask, monkeypatch, caplog):
    monkeypatch.setattr(counters, "EVERY", 0)
    with monkeypatch.context() as broken:
        for error in (DatabaseError("away"), ZeroDivisionError()):

            def fail(*args, error=error, **options):
                raise error

            broken.setattr(counters, "write_figures", fail)
            assert ask("withdraw", {"amount": 1}).version
    assert "away" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    ask("withdraw", {"amount": 1})
    assert totals(alias)["commands"] == 4


def test_threads_lose_no_count(alias, account, monkeypatch):
    monkeypatch.setattr(counters, "EVERY", 0)

    def work(thread):
        try:
            for number in range(20):
                Account.execute(
                    f"e{thread % 3}",
                    "refuse_to_open",
                    command_id=f"{thread}-{number}",
                    using=alias,
                    timeout=60,
                )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    counting.write_if_due(alias)
    found = totals(alias)
    assert found["commands"] == 161
    assert found["rejected_commands"] == 160


def test_what_waits_is_a_sample(alias, account, ask, written, monkeypatch):
    monkeypatch.setattr(type(queues), "waiting_on", lambda self, using: 7)
    ask("withdraw", {"amount": 1})
    assert written()["commands_waiting"] == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_counts_anew(alias, account):
    [parent] = counters._shared.values()
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, str(len(counters._shared)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 9) == b"0"
    assert list(counters._shared.values()) == [parent]


def test_a_test_case_has_no_callback_of_it(alias):
    """Its own transaction never commits, and captureOnCommitCallbacks would list it."""
    block = transaction.atomic(using=alias)
    block._from_testcase = True
    with block:
        Account.execute("a", "open", {"owner": "a"}, command_id="1", using=alias)
        assert connections[alias].run_on_commit == []
