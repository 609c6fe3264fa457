"""What ends a thread, raised by the code of one caller: it reaches that caller, and no other."""

from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from django.db import connections, transaction

from outbox_app.entities import Command, command, forwarding, queue
from outbox_app.entities.declaration import spec_of
from outbox_app.events.signals import events_published
from tests.entities.models import Account, AccountVersion, Stock
from tests.patience import eventually, patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]


class End(BaseException):
    """As the panic of a library in Rust."""


ENDS = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, End]


def ask(alias, name, entity=Account, arguments=None):
    try:
        return entity.execute("a", name, arguments, command_id=name, using=alias)
    finally:
        connections.close_all()


def error_of(call):
    """Return what a call raises. A pool would make a cancelled future of a CancelledError."""
    try:
        call()
    except BaseException as error:
        return error


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(Account, "timeout", patience(60))


@pytest.fixture
def together(withdraw, held, fresh):
    """``together(*calls)``: what threads are answered whose calls are of one batch."""

    @contextmanager
    def run(*calls):
        with ThreadPoolExecutor(len(calls) + 1) as pool:
            first = pool.submit(withdraw, "first")
            held.wait()
            futures = []
            for call in calls:
                futures.append(pool.submit(call))
                eventually(lambda: fresh.waiting == len(futures))
            held.go.set()
            first.result()
            yield futures

    return run


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("error", ENDS)
def test_what_a_handler_raises_is_the_answer_of_its_call(
    alias, account, declare, withdraw, together, batches, rows, error, atomic
):
    """The caller that leads is another one, and so is the one behind it."""

    def end(self):
        self.state["balance"] = 0
        raise error

    declare(end, atomic=atomic)
    ends = partial(error_of, partial(ask, alias, "end"))
    with together(partial(withdraw, "x"), ends, partial(withdraw, "y")) as [x, ended, y]:
        assert [x.result().version, y.result().version] == [3, 4]
        assert [x.result().response, y.result().response] == [{"balance": 8}, {"balance": 7}]
        assert type(ended.result()) is error
    assert batches == [1, 3]
    assert len(rows()) == 4


@pytest.mark.parametrize("error", ENDS)
def test_what_a_handler_of_batches_raises_is_the_answer_of_one_call(
    alias, account, held, fresh, monkeypatch, withdraw, error
):
    def sell(self, requests):
        if any(each["pieces"] == 3 for each in requests):
            raise error
        return [None for _ in requests]

    def sells(number):
        try:
            arguments = {"pieces": number}
            return Stock.execute("a", "sell", arguments, command_id=f"c{number}", using=alias)
        except BaseException as caught:
            return caught
        finally:
            connections.close_all()

    held.go.set()
    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    entity_queue = queue.EntityQueue(queue.QueueKey(Stock, alias, "a"))
    with ThreadPoolExecutor(6) as pool:
        with fresh.lock:  # all wait for a leader, which there is then
            fresh.by_key[entity_queue.key] = entity_queue
        futures = []
        for number in range(6):
            futures.append(pool.submit(sells, number))
            eventually(lambda: fresh.waiting == len(futures))
        with fresh.lock:
            fresh._pass_lead(entity_queue)
        answers = [future.result() for future in futures]
    spec_of.cache_clear()
    assert type(answers.pop(3)) is error
    assert sorted(answer.version for answer in answers) == [2, 3, 4, 5, 6]


def test_a_coroutine_gets_what_its_handler_raises(alias, account, declare):
    def end(self):
        raise End

    async def gather():
        calls = [
            Account.aexecute("a", "withdraw", {"amount": 1}, command_id=f"c{n}", using=alias)
            for n in range(4)
        ]
        calls.insert(2, Account.aexecute("a", "end", command_id="end", using=alias))
        return await asyncio.gather(*calls, return_exceptions=True)

    declare(end)
    answers = asyncio.run(gather())
    assert type(answers.pop(2)) is End
    assert not any(answer.replayed for answer in answers)
    assert sorted(answer.version for answer in answers) == [2, 3, 4, 5]


def test_a_callback_of_one_command_ends_no_other(
    alias, account, declare, withdraw, together, caplog, rows
):
    """Neither the thread that leads, nor the callbacks of those behind it."""
    called = []

    def end(self):
        transaction.on_commit(fail, using=alias)

    def fail():
        raise SystemExit

    def call(self):
        transaction.on_commit(lambda: called.append(1), using=alias)

    declare(end)
    declare(call)
    calls = (partial(withdraw, "x"), partial(ask, alias, "end"), partial(ask, alias, "call"))
    with together(*calls) as futures:
        assert [future.result().version for future in futures] == [3, 4, 5]
    assert called == [1]
    assert len(rows()) == 5
    assert "A callback of the command 'end' of 'a' raised SystemExit()" in caplog.text


def test_a_callback_that_ends_its_own_thread_ends_no_other(
    alias, account, declare, withdraw, together
):
    called = []

    def end(self):
        transaction.on_commit(fail, using=alias)

    def fail():
        raise SystemExit

    def call(self):
        transaction.on_commit(lambda: called.append(1), using=alias)

    declare(end)
    declare(call)
    with together(partial(ask, alias, "end"), partial(ask, alias, "call")) as [ended, other]:
        assert type(ended.exception()) is SystemExit
        assert other.result().version == 4
    assert called == [1]
    assert ask(alias, "end").replayed


def test_a_receiver_fails_the_command_whose_version_it_refuses(
    alias, account, withdraw, together, rows
):
    def refuse(events, **kwargs):
        if any(event.command_id == "y" for event in events):
            raise SystemExit

    events_published.connect(refuse, sender=AccountVersion)
    try:
        with together(*(partial(withdraw, each) for each in "xyz")) as [x, y, z]:
            assert [x.result().version, z.result().version] == [3, 4]
            assert type(y.exception()) is SystemExit
    finally:
        events_published.disconnect(refuse, sender=AccountVersion)
    assert len(rows()) == 4


def test_a_signal_ends_the_main_thread_and_no_call_of_another(
    alias, account, declare, withdraw, held, fresh, rows, request
):
    """It leads, and so are the others in its turn; what their handlers raise does not reach it."""
    there = threading.Event()

    def block(self):
        there.set()
        eventually(lambda: False)  # one long wait would miss a signal that comes just before it

    def end(self):
        raise SystemExit

    def interrupt():
        eventually(lambda: fresh.waiting == 1)
        calls = [pool.submit(partial(withdraw, "x"))]
        eventually(lambda: fresh.waiting == 2)
        calls.append(pool.submit(partial(ask, alias, "end")))
        eventually(lambda: fresh.waiting == 3)
        calls.append(pool.submit(partial(withdraw, "y")))
        eventually(lambda: fresh.waiting == 4)
        held.go.set()
        assert there.wait(60)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return calls

    declare(block)
    declare(end)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(partial(signal.signal, signal.SIGINT, before))
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        waiting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            Account.execute("a", "block", command_id="block", using=alias)
        [x, ended, y] = waiting.result()
        assert first.result().version == 2
        assert [x.result().version, y.result().version] == [3, 4]
        assert type(ended.exception()) is SystemExit
    assert not x.result().replayed
    assert len(rows()) == 4


def test_a_command_of_another_server_ends_none_that_came_with_it(alias, account, declare, settings):
    """Its server executes it itself, where it ends its own caller."""

    def end(self):
        raise SystemExit

    declare(end)
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    asked = [Command("a", "withdraw", {"amount": 1}, command_id=each) for each in "xy"]
    asked.insert(1, Command("a", "end", command_id="end"))
    calls = [queue.Call(each) for each in asked]
    told = forwarding.answered_here(Account, calls, 30)
    assert [getattr(each, "version", type(each)) for each in told] == [2, SystemExit, 3]
