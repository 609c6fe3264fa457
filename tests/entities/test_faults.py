"""Faults around the queue and the transaction: each affects only its own caller, or none."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, connections, transaction
from django.utils import translation

from outbox_app.entities import Command, queue
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import (
    EntityContended,
    InvalidCommand,
    OutcomeUnknown,
    Overloaded,
    UnknownEntity,
)
from outbox_app.events.models import StreamHead
from outbox_app.events.signals import events_published
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account, AccountVersion, Person, Stock
from tests.faults.tools import on
from tests.patience import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]
servers = on("postgres", "mariadb")


def waiting(fresh, count):
    eventually(lambda: fresh.waiting == count)


@pytest.fixture
def receive():
    """``receive(function)``: call it with versions of accounts while they are written."""
    receivers = []

    def connect(function):
        receivers.append(function)
        events_published.connect(function, sender=AccountVersion)

    yield connect
    for function in receivers:
        events_published.disconnect(function, sender=AccountVersion)


@servers
def test_a_connection_that_waits_for_an_answer_costs_no_command(alias, account, ask):
    """A time limit or a time-out interrupted a statement of its thread, or its connecting."""
    raw = connections[alias].connection
    if alias == "postgres":
        raw.pgconn.send_query(b"SELECT 1")
    else:
        raw.query("SELECT 1")
    assert ask("withdraw", {"amount": 1}).version == 2


@on("postgres")
def test_a_conflict_of_the_callers_transaction_keeps_its_cause(alias, account, ask, withdraw):
    """Callers tell by it that they may do their transaction anew."""

    def run():
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            Account.objects.using(alias).count()  # takes the snapshot
            with ThreadPoolExecutor(1) as pool:
                pool.submit(withdraw, "x").result()
            ask("withdraw", {"amount": 1})

    with pytest.raises(OperationalError) as caught:
        run()
    assert caught.value.__cause__.sqlstate == "40001"


def test_an_operational_error_is_the_fault_of_its_command(alias, account, receive, rows):
    """As a trigger's SIGNAL on MySQL: the connection lives."""

    def refuse(events, **kwargs):
        if any(event.command_id == "c3" for event in events):
            raise OperationalError(1644, "no")

    receive(refuse)
    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(8)]
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    failed = [n for n, answer in enumerate(answers) if isinstance(answer, Exception)]
    assert failed == [3]
    assert len(rows()) == 8


@pytest.mark.parametrize(
    "fail", [lambda: 1 / 0, partial(divmod, 1, 0)], ids=["function", "partial"]
)
def test_a_callback_of_a_receiver_costs_no_answer(alias, account, receive, ask, fail):
    def order(events, **kwargs):
        transaction.on_commit(fail, using=alias)

    receive(order)
    outcome = ask("withdraw", {"amount": 1})
    assert (outcome.version, outcome.replayed) == (2, False)


@servers
def test_a_short_time_of_the_oldest_ends_no_other(alias, account, ask, fresh):
    ask("withdraw", {"amount": 1}, command_id="replay")

    def blocked():
        with transaction.atomic(using=alias):
            StreamHead.objects.using(alias).select_for_update().get(stream="a")
            there.set()
            assert go.wait(60)
        connections.close_all()

    there, go = threading.Event(), threading.Event()
    ids = ("c0", "c1", "c2", "replay")
    asked = [Command("a", "withdraw", {"amount": 1}, command_id=each) for each in ids]
    with ThreadPoolExecutor(1) as pool:
        lock = pool.submit(blocked)
        assert there.wait(60)
        calls = [
            queue.Call(each, queue.deadline_after(seconds, 60))
            for each, seconds in zip(asked, (0.01, 60, 60, 0.01), strict=True)
        ]
        left = queue.answer(Account, calls, using=alias)
        again = queue.Call(asked[3], queue.deadline_after(0.01, 60))
        again.begun = again.is_replay = True  # the thread that had its answer has ended
        queue.answer(Account, [again], using=alias)
        go.set()
        lock.result()
    assert list(left) == calls[1:3]
    assert isinstance(calls[0].answer, EntityContended)
    assert calls[3].answer.replayed
    assert isinstance(again.answer, OutcomeUnknown)


@servers
def test_many_entities_have_time_each(alias):
    """An import of thousands takes longer than one command may."""
    Account.execute("b", "open", {"owner": "b"}, command_id="x", using=alias)

    def block():
        with transaction.atomic(using=alias):
            StreamHead.objects.using(alias).select_for_update().get(stream="b")
            there.set()
            assert go.wait(60)
        connections.close_all()

    def slow():
        set_failpoint("entity_loaded", None)
        threading.Event().wait(0.6)
        threading.Timer(0.2, go.set).start()

    there, go = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        lock = pool.submit(block)
        assert there.wait(60)
        set_failpoint("entity_loaded", slow)
        commands = [
            Command("a", "open", {"owner": "a"}, command_id="x"),
            Command("b", "withdraw", {"amount": 0}, command_id="y"),
        ]
        answers = Account.execute_many(commands, using=alias, timeout=0.5)
        lock.result()
    assert [answer.version for answer in answers] == [1, 2]


@servers
def test_callbacks_that_execute_commands_of_one_another_do_not_wait(alias, declare, ask):
    """Each has the lead of what the other would wait for."""
    together = threading.Barrier(2)

    def order(self, other):
        def callback():
            together.wait(60)
            ask("withdraw", {"amount": 0}, id=other, command_id=f"{other}-inner", timeout=30)

        transaction.on_commit(callback, using=alias)

    declare(order)
    for id in "ab":
        ask("open", {"owner": id}, id=id)

    def run(id, other):
        try:
            return ask("order", {"other": other}, id=id, command_id="x")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run, *pair) for pair in ("ab", "ba")]
        assert [call.result(timeout=20).version for call in calls] == [2, 2]
    assert ask("withdraw", {"amount": 0}, command_id="a-inner").replayed
    assert ask("withdraw", {"amount": 0}, id="b", command_id="b-inner").replayed


def test_a_receiver_may_execute_a_command_of_another_entity(alias, account, receive, ask):
    ask("open", {"owner": "b", "balance": 0}, id="b")

    def book(events, **kwargs):
        for event in events:
            if event.stream == "a":
                name = f"for {event.command_id}"
                ask("withdraw", {"amount": -1}, id="b", command_id=name)

    receive(book)
    commands = [Command("a", "withdraw", {"amount": 1}, command_id=f"c{n}") for n in range(3)]
    assert [o.version for o in Account.execute_many(commands, using=alias)] == [2, 3, 4]
    assert Account.objects.using(alias).get(pk="b").state["balance"] == 3


@pytest.mark.parametrize("inside", [False, True])
def test_a_receiver_that_executes_a_command_of_the_same_entity_comes_to_an_end(
    alias, account, receive, ask, rows, inside
):
    """The batch has another command to write, and finds the entity ahead of it: each is alone."""
    given = []

    def follow(events, **kwargs):
        given.extend(event.command for event in events)
        assert len(given) < 100
        if given[-1] == "withdraw":
            ask("date", command_id=f"after-{len(given)}")

    receive(follow)
    commands = [
        Command("a", "withdraw", {"amount": 1}, command_id="x"),
        Command("a", "look_around", {"using": alias}, command_id="y"),
    ]
    with transaction.atomic(using=alias) if inside else nullcontext():
        answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert [answer.version for answer in answers] == [2, 4]
    assert [command for _, command, *_ in rows()] == ["open", "withdraw", "date", "look_around"]


def test_a_coroutine_below_a_transaction_of_synchronous_code_belongs_to_it(alias, account, rows):
    def execute():
        return async_to_sync(Account.aexecute)(
            "a", "withdraw", {"amount": 1}, command_id="x", using=alias, timeout=5
        )

    with transaction.atomic(using=alias):
        assert execute().version == 2
        transaction.set_rollback(True, using=alias)
    assert len(rows()) == 1
    assert execute().version == 2


def test_a_handler_executes_no_command_as_a_coroutine_either(alias, account, ask, declare):
    def order(self):
        async_to_sync(Account.aexecute)("b", "date", command_id="x", using=alias, timeout=1)

    declare(order)
    with pytest.raises(InvalidCommand, match="may not execute another command"):
        ask("order")


class End(BaseException):
    """Ends a thread, and no event loop."""


def test_a_batch_handler_that_ends_its_thread(alias, monkeypatch, fresh):
    from outbox_app.entities import command

    runs = []

    def sell(self, requests):
        runs.append(len(requests))
        if any(each["pieces"] == 3 for each in requests):
            raise End
        return [None for each in requests]

    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)

    async def run():
        return await asyncio.gather(
            *(
                Stock.aexecute("a", "sell", {"pieces": n}, command_id=f"c{n}", using=alias)
                for n in range(6)
            ),
            return_exceptions=True,
        )

    answers = asyncio.run(run())
    spec_of.cache_clear()
    assert [type(answer).__name__ for answer in answers] == ["Outcome"] * 3 + ["End"] + [
        "Outcome"
    ] * 2
    assert len(runs) < 12


@pytest.mark.parametrize("coroutines", [False, True])
def test_an_error_between_the_answers_costs_none(alias, account, withdraw, held, fresh, coroutines):
    def end():
        set_failpoint("entity_answered", None)
        raise SystemExit

    async def gather():
        return await asyncio.gather(
            *(
                Account.aexecute(
                    "a", "withdraw", {"amount": 0}, command_id=f"c{n}", using=alias, timeout=5
                )
                for n in range(4)
            )
        )

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        if coroutines:
            calls = pool.submit(asyncio.run, gather())
            waiting(fresh, 4)
        else:
            calls = [pool.submit(withdraw, f"c{n}", 0, timeout=5) for n in range(4)]
            waiting(fresh, 4)
        set_failpoint("entity_answered", lambda: set_failpoint("entity_answered", end))
        held.go.set()
        first.result()
        if coroutines:
            assert [outcome.version for outcome in calls.result()] == [3, 4, 5, 6]
        else:
            errors = {type(call.exception()) for call in calls}
            assert errors == {type(None), SystemExit}


def test_no_thread_can_be_started(alias, account, monkeypatch, fresh, rows):
    class NoThread:
        def __init__(self, **options):
            pass

        def start(self):
            raise RuntimeError("can't start new thread")

    async def run():
        return await Account.aexecute(
            "a", "withdraw", {"amount": 1}, command_id="x", using=alias, timeout=5
        )

    with monkeypatch.context() as patch:
        patch.setattr(queue.threading, "Thread", NoThread)
        with pytest.raises(Overloaded):
            asyncio.run(run())
    assert (fresh.threads, fresh.waiting, fresh.by_key) == (0, 0, {})
    assert asyncio.run(run()).version == 2


def test_rows_of_a_command_whose_answer_cannot_be_stored_are_gone(alias, account, declare, rows):
    def write(self):
        StreamHead.objects.using(alias).create(log="x", stream="written", version=1)
        return object()

    declare(write, atomic=True)
    commands = [
        Command("a", "write", command_id="x"),
        Command("a", "withdraw", {"amount": 1}, command_id="y"),
    ]
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert isinstance(answers[0], InvalidCommand)
    assert len(rows()) == 2
    assert not StreamHead.objects.using(alias).filter(log="x").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_rows_of_a_command_that_an_index_refuses_are_gone(alias, monkeypatch, inside):
    from outbox_app.entities import command

    def write(self, email):
        StreamHead.objects.using(alias).create(log="x", stream="written", version=1)
        self.state = {**self.state, "email": email}

    monkeypatch.setattr(Person, "write", command(atomic=True)(write), raising=False)
    spec_of.cache_clear()
    for id, email in ("a", "x"), ("b", "y"):
        Person.execute(id, "enter", {"email": email}, command_id="x", using=alias)
    if inside:
        with transaction.atomic(using=alias):
            outcome = Person.execute("b", "write", {"email": "x"}, command_id="w", using=alias)
    else:
        outcome = Person.execute("b", "write", {"email": "x"}, command_id="w", using=alias)
    spec_of.cache_clear()
    assert (outcome.rejected.code, outcome.version) == ("email", 2)
    assert not StreamHead.objects.using(alias).filter(log="x").exists()
    assert StreamHead.objects.using(alias).get(stream="b").version == 2


@pytest.fixture
def person(alias):
    """``person("a", "enter", nick="x")``: execute a command of a person."""
    numbers = iter(range(10**6))

    def execute(id, command, **state):
        name = f"c{next(numbers)}"
        return Person.execute(id, command, state, command_id=name, using=alias)

    return execute


def test_the_index_that_refuses_is_named_where_others_hold_nulls(alias, person):
    person("a", "enter", nick="x")
    person("b", "enter")
    assert person("b", "change", nick="x").rejected.code == "nick"


def test_a_foreign_key_without_a_constraint_is_a_column(alias, person):
    person("a", "enter")
    person("b", "enter", friend_id="a")
    assert Person.objects.using(alias).get(pk="b").friend_id == "a"
    assert person("c", "enter", friend_id="a").rejected.code == "friend"
    person("b", "change", friend_id="b")
    assert Person.objects.using(alias).get(friend="b").pk == "b"


def test_what_a_failed_command_did_to_a_column_is_gone(alias, person, monkeypatch):
    from outbox_app.entities import command

    def spoil(self):
        self.tags.append("spoilt")
        raise ZeroDivisionError

    monkeypatch.setattr(Person, "spoil", command()(spoil), raising=False)
    spec_of.cache_clear()
    person("a", "enter", age=1)
    commands = [
        Command("a", "change", {"age": 2}, command_id="x"),
        Command("a", "spoil", command_id="y"),
    ]
    Person.execute_many(commands, using=alias, return_exceptions=True)
    spec_of.cache_clear()
    assert Person.objects.using(alias).get(pk="a").tags == []


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, float("nan")])
def test_a_timeout_that_no_lock_can_wait_for(account, withdraw, timeout):
    with pytest.raises(InvalidCommand, match="timeout must be"):
        withdraw("x", timeout=timeout)


@pytest.mark.parametrize("other", ["A", "a ", "á", "a\t"])
def test_ids_that_differ_in_little_are_two(alias, account, ask, rows, other):
    ask("open", {"owner": "x"}, id=other, command_id="x")
    for name in ("n", "N", "n ", "ñ"):
        assert not ask("withdraw", {"amount": 0}, command_id=name).replayed
    assert len(rows()) == 5
    assert len(rows(other)) == 1


@pytest.mark.parametrize("name", ["self", "cls", "amount"])
def test_arguments_that_are_named_as_the_handlers_own(alias, account, ask, name):
    with pytest.raises(InvalidCommand):
        ask("date", {name: 1})


def test_what_a_handler_activates_ends_with_it(alias, account, ask, declare):
    def speak(self):
        translation.activate("fr")
        return translation.get_language()

    declare(speak)
    before = translation.get_language()
    assert ask("speak").response == "fr"
    assert translation.get_language() == before


def test_a_handler_that_catches_what_refuses_its_statement(alias, account, declare, rows):
    def look_twice(self, how):
        try:
            if how == "savepoint":
                with transaction.atomic(using=alias):
                    pass
            elif how == "none":
                with transaction.atomic(using=alias, savepoint=False):
                    Account.objects.using(alias).count()
            elif how == "rollback":
                transaction.set_rollback(True, using=alias)
            elif how == "close":
                connections[alias].close()
            else:
                connections[alias].commit()
        except Exception:
            return "caught"

    declare(look_twice)
    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(6)]
    hows = ["savepoint", "none", "rollback", "close", "commit"]
    for n, how in enumerate(hows):
        commands.insert(2 * n + 1, Command("a", "look_twice", {"how": how}, command_id=how))
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    good = [a for a, c in zip(answers, commands, strict=True) if c.command == "withdraw"]
    assert not [a for a in good if isinstance(a, Exception)], answers
    versions = [version for version, *_ in rows()]
    assert versions == list(range(1, len(versions) + 1))
    there = {a.version for a in answers if not isinstance(a, Exception)}
    assert there == set(versions[1:])


def test_an_error_of_a_command_that_a_receiver_executes_is_the_fault_of_one(
    alias, account, receive, ask, rows
):
    def book(events, **kwargs):
        if any(event.command_id == "c3" for event in events):
            ask("withdraw", {"amount": 1}, id="absent")

    receive(book)
    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(8)]
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    failed = {n: type(a) for n, a in enumerate(answers) if isinstance(a, Exception)}
    assert failed == {3: UnknownEntity}
    assert len(rows()) == 8


class Short(Exception):
    def __init__(self, article):
        super().__init__(f"There is no {article}.")


def test_an_error_of_a_receiver_says_what_it_said(alias, account, receive, ask):
    def refuse(events, **kwargs):
        raise Short("bread")

    receive(refuse)
    with pytest.raises(Short, match=r"^There is no bread\.$"):
        ask("withdraw", {"amount": 1})


@pytest.mark.parametrize("given", [{"amount": "Too much."}, ["Too", "much."], 1213])
def test_an_error_of_a_handler_is_its_own_whatever_it_holds(alias, account, ask, declare, given):
    class Short(Exception):
        pass

    def refuse(self):
        raise Short(given)

    declare(refuse)
    with pytest.raises(Short) as caught:
        ask("refuse")
    assert caught.value.args == (given,)
