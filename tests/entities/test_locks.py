"""Locks that other sessions hold: only the command that needs one of them waits, or fails."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.database.lock_wait import is_conflict
from outbox_app.entities import Command, command
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import EntityContended
from outbox_app.events.models import StreamHead
from outbox_app.events.signals import events_published
from tests.entities.models import Account, AccountVersion, Person, Stock
from tests.faults.tools import on
from tests.patience import eventually, patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]
servers = on("postgres", "mariadb")


@pytest.fixture
def needed(alias):
    """``with needed(): ...``: a row of this test, which another session locks for the block."""
    StreamHead.objects.using(alias).create(log="outbox_event", stream="row", version=1)

    @contextmanager
    def locked():
        def lock():
            with transaction.atomic(using=alias):
                row(alias).get()
                there.set()
                assert go.wait(60)
            connections.close_all()

        there, go = threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(lock)
            try:
                assert there.wait(60)
                yield go.set
            finally:
                go.set()
                other.result()

    return locked


def row(alias, **options):
    return StreamHead.objects.using(alias).select_for_update(**options).filter(log="outbox_event")


@pytest.fixture
def together(alias, account, withdraw, held, fresh):
    """``together(call, "x", …)``: answers of calls and of withdrawals with ids, in a batch."""

    @contextmanager
    def run(*calls):
        with ThreadPoolExecutor(len(calls) + 1) as pool:
            first = pool.submit(withdraw, "first")
            held.wait()
            futures = []
            for call in calls:
                each = call if callable(call) else partial(withdraw, call)
                futures.append(pool.submit(each))
                eventually(lambda: fresh.waiting == len(futures))
            held.go.set()
            first.result()
            yield futures

    return run


def ask(alias, name, **options):
    try:
        return Account.execute("a", name, command_id=name, using=alias, **options)
    finally:
        connections.close_all()


@pytest.fixture
def visit(alias, declare):
    """A command that needs the row at once."""

    def visit(self):
        row(alias, nowait=True).get()

    declare(visit, atomic=True)


@servers
@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_locked_row_fails_its_command_and_no_other_of_the_batch(
    alias, needed, visit, together, rows, at
):
    calls = [f"c{number}" for number in range(8)]
    calls.insert(at, lambda: ask(alias, "visit"))
    with needed(), together(*calls) as futures:
        failed = futures.pop(at).exception()
        answers = [future.result() for future in futures]
    assert type(failed) is OperationalError
    assert is_conflict(failed)
    assert sorted(answer.version for answer in answers) == list(range(3, 11))
    assert not any(answer.replayed for answer in answers)
    assert len(rows()) == 10
    assert ask(alias, "visit").version == 11


@servers
def test_a_locked_row_fails_its_command_if_it_is_alone(alias, account, needed, visit):
    runs = []

    def note(execute, sql, *args):
        runs.append(sql)
        return execute(sql, *args)

    with needed(), connections[alias].execute_wrapper(note), pytest.raises(OperationalError):
        Account.execute("a", "visit", command_id="x", using=alias)
    assert sum("NOWAIT" in sql for sql in runs) == 1


@servers
@pytest.mark.parametrize("inside", [False, True])
def test_a_locked_row_fails_its_command_among_those_of_one_caller(
    alias, account, needed, visit, inside
):
    commands = [Command("a", "withdraw", {"amount": 1}, command_id=f"c{n}") for n in range(4)]
    commands.insert(2, Command("a", "visit", command_id="visit"))
    execute = partial(Account.execute_many, commands, using=alias, return_exceptions=True)
    with needed():
        if inside:
            with transaction.atomic(using=alias):
                answers = execute()
        else:
            answers = execute()
    assert type(answers.pop(2)) is OperationalError
    assert [answer.response["balance"] for answer in answers] == [9, 8, 7, 6]


@servers
def test_a_locked_row_fails_its_coroutine_and_no_other(alias, account, needed, visit):
    async def gather():
        calls = [
            Account.aexecute("a", "withdraw", {"amount": 1}, command_id=f"c{n}", using=alias)
            for n in range(4)
        ]
        calls.insert(2, Account.aexecute("a", "visit", command_id="visit", using=alias))
        return await asyncio.gather(*calls, return_exceptions=True)

    with needed():
        answers = asyncio.run(gather())
    assert type(answers.pop(2)) is OperationalError
    assert sorted(answer.version for answer in answers) == [2, 3, 4, 5]


@servers
@pytest.mark.parametrize("released", [True, False])
def test_a_command_that_waits_for_a_lock_holds_up_no_other(
    alias, declare, needed, together, monkeypatch, released
):
    """It has its time, in a transaction of its own; the others are answered before."""

    def wait(self):
        row(alias).get()

    monkeypatch.setattr(entity_transaction, "SHARED_WAIT", 0.1)  # a second, on MariaDB
    declare(wait, atomic=True)
    waits = partial(ask, alias, "wait", timeout=patience(30) if released else 4)
    with needed() as release, together("x", waits, "y") as futures:
        waiting = futures.pop(1)
        assert [future.result().version for future in futures] == [3, 4]
        assert ask(alias, "date").version == 5  # those that come later are not held up, either
        assert not waiting.done()
        if released:
            release()
            assert waiting.result().version == 6
        else:
            failed = waiting.exception()
            assert type(failed) is OperationalError
            assert is_conflict(failed)


@servers
def test_many_commands_that_wait_for_a_lock_hold_up_no_other(
    alias, declare, needed, together, monkeypatch
):
    """Of one batch only the first waits; then each waits alone, and all others go in between."""
    waited, seen = [], []

    def wait(self):
        waited.append(1)
        row(alias).get()

    def look(self):
        seen.append(len(waited))

    def call(name, id):
        try:
            return Account.execute("a", name, command_id=id, using=alias, timeout=patience(30))
        finally:
            connections.close_all()

    monkeypatch.setattr(entity_transaction, "SHARED_WAIT", 0.1)  # a second, on MariaDB
    declare(wait, atomic=True)
    declare(look)
    calls = [partial(call, "wait", f"w{number}") for number in range(6)]
    calls = [partial(call, "look", "x"), *calls, partial(call, "look", "y")]
    with needed() as release, together(*calls) as futures:
        assert [futures[0].result().version, futures[-1].result().version] == [3, 4]
        assert seen == [0, 1, 1]
        for number in range(3):
            before = len(waited)
            assert call("look", f"z{number}").version == 5 + number
            assert seen[-1] <= before + 1
        release()
        assert sorted(each.result().version for each in futures[1:-1]) == list(range(8, 14))


@servers
def test_a_stream_that_another_session_publishes_to_holds_up_no_other(
    alias, account, declare, needed, together, monkeypatch, settings
):
    """An event of one command waits for it, when the whole batch is written."""

    def tell(self):
        self.publish("told", stream="row")

    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    monkeypatch.setattr(entity_transaction, "SHARED_WAIT", 0.1)
    declare(tell)
    tells = partial(ask, alias, "tell", timeout=patience(30))
    with needed() as release, together("x", "y", tells, "z") as futures:
        telling = futures.pop(2)
        assert sorted(future.result().version for future in futures) == [3, 4, 5]
        assert not telling.done()
        release()
        assert telling.result().version == 6


@servers
def test_a_row_that_waits_for_an_index_holds_up_no_other(alias, held, fresh, monkeypatch):
    """Another session has inserted the value of a unique column, and not committed."""

    def change(id, timeout=60, **state):
        try:
            return Person.execute("a", "change", state, command_id=id, using=alias, timeout=timeout)
        finally:
            connections.close_all()

    def insert():
        with transaction.atomic(using=alias):
            Person.execute("b", "enter", {"email": "taken"}, command_id="enter", using=alias)
            there.set()
            assert go.wait(60)
        connections.close_all()

    monkeypatch.setattr(entity_transaction, "SHARED_WAIT", 0.1)
    there, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(5) as pool:
        held.go.set()
        Person.execute("a", "enter", {}, command_id="enter", using=alias)
        other = pool.submit(insert)
        assert there.wait(60)
        late = pool.submit(change, "late", timeout=5, email="taken")
        others = [pool.submit(change, f"c{n}", age=n) for n in range(3)]
        assert sorted(each.result().version for each in others) == [2, 3, 4]
        assert not late.done()
        assert type(late.exception()) is EntityContended
        go.set()
        other.result()
        assert change("again", email="taken").rejected.code == "email"


@servers
def test_a_receiver_that_meets_a_locked_row_fails_one_command(alias, account, needed, rows):
    def look(events, **kwargs):
        if any(event.command_id == "c3" for event in events):
            row(alias, nowait=True).get()

    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(8)]
    events_published.connect(look, sender=AccountVersion)
    try:
        with needed():
            answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    finally:
        events_published.disconnect(look, sender=AccountVersion)
    failed = {n: type(a) for n, a in enumerate(answers) if isinstance(a, Exception)}
    assert failed == {3: EntityContended}
    assert isinstance(answers[3].__cause__, OperationalError)
    assert len(rows()) == 8


@servers
def test_a_conflict_of_another_session_is_an_error_like_any_other(alias, declare, needed, together):
    """The handler has it from a thread, a driver or another database."""
    runs = []

    def plain(self):
        runs.append(1)
        look_elsewhere(alias)

    declare(plain)
    with needed(), together("x", lambda: ask(alias, "plain"), "y") as futures:
        failed = futures.pop(1).exception()
        assert [future.result().version for future in futures] == [3, 4]
    assert type(failed) is OperationalError
    assert len(runs) == 1


def look_elsewhere(alias):
    """Need the row at once, in a session of another thread."""

    def look():
        try:
            with transaction.atomic(using=alias):
                row(alias, nowait=True).get()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look).result()


@servers
def test_a_conflict_in_a_handler_of_batches_is_of_one_command(alias, needed, monkeypatch):
    def sell(self, requests):
        if any(each["pieces"] == 3 for each in requests):
            look_elsewhere(alias)
        return [None for _ in requests]

    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    commands = [Command("a", "sell", {"pieces": n}, command_id=f"c{n}") for n in range(8)]
    with needed():
        answers = Stock.execute_many(commands, using=alias, return_exceptions=True)
    spec_of.cache_clear()
    assert type(answers.pop(3)) is OperationalError
    assert [answer.version for answer in answers] == list(range(2, 9))


@pytest.fixture
def conflict(alias, declare):
    """A command that the database ends with a deadlock each time; on MariaDB with any of these."""

    def end(self, number=1213):
        runs.append(number)
        connection = connections[alias]
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("DO $$ BEGIN RAISE deadlock_detected; END $$")
            connection.connection.rollback()  # as the server does
            cursor.execute(f"SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = {number}")

    runs = []
    declare(end, atomic=True)
    return runs


@servers
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_command_that_always_undoes_its_transaction_goes_alone(
    alias, conflict, together, rows, at
):
    calls = ["x", "y"]
    calls.insert(at, lambda: ask(alias, "end"))
    with together(*calls) as futures:
        failed = futures.pop(at).exception()
        assert sorted(future.result().version for future in futures) == [3, 4]
    assert type(failed) is OperationalError
    assert len(conflict) == 1 + entity_transaction.ATTEMPTS
    assert len(rows()) == 4


@on("mariadb")
@pytest.mark.parametrize("number", [1020, 1205, 1213])
def test_the_errors_with_which_mariadb_undoes_a_transaction(alias, account, conflict, number):
    """1205 if ``innodb_rollback_on_timeout`` is on."""
    commands = [Command("a", "withdraw", {"amount": 1}, command_id=f"c{n}") for n in range(4)]
    commands.insert(2, Command("a", "end", {"number": number}, command_id="end"))
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert answers.pop(2).args[0] == number
    assert [answer.response["balance"] for answer in answers] == [9, 8, 7, 6]


@servers
def test_a_deadlock_is_repeated(alias, account, declare, together):
    """Another session waits for what a handler has locked, and has locked what it needs next."""
    for stream in "12":
        StreamHead.objects.using(alias).create(log="outbox_event", stream=stream, version=1)
    heads = StreamHead.objects.using(alias)
    runs, there = [], threading.Event()

    def visit(self):
        runs.append(1)
        list(row(alias).filter(stream="1"))
        if len(runs) == 1:
            assert go.wait(60)
        list(row(alias).filter(stream="2"))

    def cross():
        with transaction.atomic(using=alias):
            # The heavier transaction on MariaDB; on PostgreSQL the one that waits last.
            StreamHead.objects.using(alias).bulk_create(
                StreamHead(log="ballast", stream=f"{n}", version=1) for n in range(100)
            )
            list(row(alias).filter(stream="2"))
            there.set()
            eventually(lambda: runs)
            go.set()
            eventually(partial(waits, alias))
            list(row(alias).filter(stream="1"))
        connections.close_all()

    go = threading.Event()
    declare(visit, atomic=True)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cross)
        assert there.wait(60)
        with together("x", lambda: ask(alias, "visit"), "y") as futures:
            versions = sorted(future.result().version for future in futures)
        other.result()
    assert versions == [3, 4, 5]
    assert len(runs) >= 2
    assert heads.filter(log="ballast").count() == 100


def waits(alias):
    """Return whether a session waits for a lock."""
    sql = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    if connections[alias].vendor == "mysql":
        sql = "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]
