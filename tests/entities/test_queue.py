"""The queue of a hot entity: which caller leads, which callers wait, and all ways to end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery.exceptions import SoftTimeLimitExceeded
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.utils import translation
from django.utils.functional import lazy

from outbox_app.entities import Command, Rejected, queue, request
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.exceptions import (
    CommandTimeout,
    DamagedEntity,
    InvalidCommand,
    OutcomeUnknown,
    Overloaded,
)
from outbox_app.entities.request import Call
from outbox_app.exceptions import NotAtomic
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account, Person
from tests.patience import eventually, patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]


def waiting(fresh, count):
    eventually(lambda: fresh.waiting == count)


def in_turn(pool, fresh, *calls):
    """Queue calls, the next one when the one before waits."""
    found = []
    for call in calls:
        found.append(pool.submit(call))
        waiting(fresh, len(found))
    return found


def test_those_that_gather_while_a_batch_is_written_are_the_next_one(
    account, withdraw, held, fresh, batches, rows
):
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        others = [pool.submit(withdraw, f"c{number}", 0) for number in range(8)]
        waiting(fresh, 8)
        held.go.set()
        assert first.result().version == 2
        assert sorted(other.result().version for other in others) == list(range(3, 11))
    assert batches == [1, 8]


def test_a_batch_has_so_many_characters_at_most(alias, monkeypatch):
    monkeypatch.setattr(queue, "BATCH_SIZE", 60)
    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, "a"))
    sizes = [100, 20, 20, 9, 50]
    calls = [Call(Command("a", "open", {"o": "x" * (n - 8)}, command_id=f"{n}")) for n in sizes]
    entity_queue.waiting = OrderedDict.fromkeys(calls)
    taken = [[call.command_id for call in entity_queue.take()] for _ in range(4)]
    assert taken == [["100"], ["20", "20", "9"], ["50"], []]


def test_those_who_wait_on_another_alias_are_counted_there(fresh):
    for using, count in (("one", 2), ("two", 1)):
        entity_queue = queue.EntityQueue(queue.QueueKey(Account, using, "a"))
        entity_queue.waiting = OrderedDict.fromkeys(range(count))
        fresh.by_key[entity_queue.key] = entity_queue
    assert [fresh.waiting_on(each) for each in ("one", "two", "three")] == [2, 1, 0]
    fresh.by_key.clear()


def test_too_many_wait_in_the_process(account, withdraw, monkeypatch):
    monkeypatch.setattr(queue, "MAX_WAITING", 0)
    with pytest.raises(Overloaded, match="0 for all entities"):
        withdraw("x")


def test_a_call_that_is_to_lead_is_not_taken_out_as_late(alias, fresh):
    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, "a"))
    calls = [Call(Command("a", "open", command_id=each)) for each in "xy"]
    for call in calls:
        call.waits = threading.Event()
        entity_queue.waiting[call] = None
    fresh.by_key[entity_queue.key], fresh.waiting, entity_queue.led_by = entity_queue, 2, calls[0]
    assert not fresh._leave(entity_queue, calls[0])
    assert (list(entity_queue.waiting), entity_queue.led_by) == (calls, calls[0])
    assert fresh._leave(entity_queue, calls[0], ends=True)
    assert (list(entity_queue.waiting), entity_queue.led_by) == ([calls[1]], calls[1])
    assert fresh._leave(entity_queue, calls[1], ends=True)


def test_who_has_gone_costs_no_other_of_the_batch_an_answer(alias):
    """A coroutine was cancelled; or its loop is closed."""

    async def waits():
        return asyncio.get_running_loop().create_future()

    async def resolve():
        gone, there = await waits(), await waits()
        gone.cancel()
        request._resolve([gone, there])
        return there.done()

    assert asyncio.run(resolve())
    calls = [Call(Command("a", "open", command_id=each)) for each in "xyz"]
    calls[0].waits = asyncio.run(waits())
    calls[1].waits, calls[2].waits = threading.Event(), threading.Event()
    request.deliver(calls)
    assert calls[1].waits.is_set()
    assert calls[2].waits.is_set()


def test_a_line_waits_where_another_thread_of_the_pool_will_come(alias, fresh, monkeypatch):
    def refuse(self):
        raise RuntimeError("no more threads")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, "a"))
    fresh.threads = 1
    fresh.to_lead.append(entity_queue)
    fresh._start()
    assert fresh.to_lead.pop() is entity_queue
    fresh.threads = 0


def test_a_thread_of_the_pool_closes_its_connections(account, alias, fresh, monkeypatch):
    closed, close_all = [], queue.connections.close_all

    def close():
        closed.append(threading.current_thread().name)
        close_all()

    monkeypatch.setattr(queue.connections, "close_all", close)
    asyncio.run(Account.aexecute("a", "date", command_id="x", using=alias))
    eventually(lambda: "outbox-entities" in closed)  # a thread of another test may end, too


def test_an_idle_entity_is_led_by_its_caller(account, withdraw, fresh):
    assert withdraw("x").version == 2
    assert not fresh.threads


def test_other_entities_go_on(account, alias, withdraw, held, ask):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        if connections[alias].vendor != "sqlite":  # one writer at a time
            assert ask("open", {"owner": "bob"}, id="b").version == 1
        held.go.set()
        first.result()


def test_one_that_times_out_in_the_queue_was_not_executed(account, withdraw, held, rows):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        with pytest.raises(CommandTimeout, match="before it was begun"):
            withdraw("y", timeout=0.05)
        held.go.set()
        first.result()
    assert len(rows()) == 2


@pytest.mark.slow
def test_one_whose_batch_is_under_way_does_not_know(account, withdraw, held, fresh, rows):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        again, there = threading.Event(), threading.Event()

        def hold():
            set_failpoint("entity_loaded", None)
            there.set()
            assert again.wait(60)

        leader = pool.submit(withdraw, "y")
        waiting(fresh, 1)
        set_failpoint("entity_loaded", hold)
        late = threading.Thread(target=lambda: errors.append(error_of(withdraw, "z", timeout=1)))
        errors: list[Exception | None] = []
        late.start()
        waiting(fresh, 2)
        held.go.set()
        first.result()
        assert there.wait(60)
        late.join()
        again.set()
        leader.result()
    assert [type(error) for error in errors] == [OutcomeUnknown]
    assert withdraw("z").replayed
    assert len(rows()) == 4


def error_of(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        return error


def test_too_many_wait(account, withdraw, held, fresh, settings):
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_QUEUE": 2}
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(withdraw, "x")]
        held.wait()
        futures += [pool.submit(withdraw, "y"), pool.submit(withdraw, "z")]
        waiting(fresh, 2)
        with pytest.raises(Overloaded, match="2 commands wait for Account 'a'") as caught:
            withdraw("w")
        assert caught.value.retry_after > 0
        held.go.set()
        assert {future.result().version for future in futures} == {2, 3, 4}


@pytest.mark.parametrize("point", ["entity_loaded", "entity_written", "entity_committed"])
@pytest.mark.parametrize("error", [SystemExit, SoftTimeLimitExceeded, ZeroDivisionError])
def test_a_leader_that_ends_leaves_its_batch_to_the_next(
    account, withdraw, held, fresh, rows, point, error
):
    """By a signal, or a greenlet's time-out. Ids tell what was committed."""
    passed = [] if point == "entity_loaded" else [error]  # the first batch passes the others

    def end():
        if passed:
            passed.clear()
            return
        set_failpoint(point, None)
        raise error

    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        others = []
        for number in range(5):
            others.append(pool.submit(withdraw, f"c{number}"))
            waiting(fresh, number + 1)
        set_failpoint(point, end)
        held.go.set()
        assert first.result().version == 2
        errors = [type(other.exception()) for other in others]
    leader = type(None) if error is ZeroDivisionError else error
    assert errors == [leader] + [type(None)] * 4
    assert sorted(withdraw(f"c{number}").version for number in range(5)) == list(range(3, 8))
    assert len(rows()) == 7


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_ends_the_thread_is_its_callers_alone(
    account, withdraw, held, fresh, alias, declare, rows, error
):
    def end(self):
        raise error

    def ask_end():
        try:
            return Account.execute("a", "end", command_id="end", using=alias)
        finally:
            connections.close_all()

    declare(end)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        calls = in_turn(pool, fresh, lambda: withdraw("x"), ask_end, lambda: withdraw("y"))
        held.go.set()
        first.result()
        assert type(calls[1].exception()) is error
        assert type(calls[0].exception()) in (error, type(None))
        assert calls[2].result().version in (3, 4)
    assert withdraw("x").version in (3, 4)
    assert len(rows()) == 4


def test_an_error_about_what_was_rolled_back_is_not_said(account, withdraw, held, fresh):
    """A batch is broken off after a command has raised for what another one had done in it."""

    def end():
        set_failpoint("entity_handled", None)
        raise SystemExit

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        at = {"expected_version": 2}
        asked = [partial(withdraw, f"c{n}", **at) for n in range(2)]
        calls = in_turn(pool, fresh, *asked)
        set_failpoint("entity_handled", lambda: set_failpoint("entity_handled", end))
        held.go.set()
        first.result()
        assert type(calls[0].exception()) is SystemExit
        assert calls[1].result().version == 3


def test_a_command_that_a_callback_executes_does_not_wait_for_itself(alias, account, ask, declare):
    """Neither for the lead, which this thread has, nor for a lock, which is released."""
    seen = []

    def order(self):
        transaction.on_commit(
            lambda: seen.append(ask("withdraw", {"amount": 1}, timeout=5)), using=alias
        )

    declare(order)
    assert ask("order").version == 2
    assert [outcome.version for outcome in seen] == [3]


user = contextvars.ContextVar("user", default="nobody")


def tenant():
    return user.get()


def test_each_handler_and_callback_runs_in_the_context_of_its_caller(
    alias, account, held, fresh, declare, withdraw
):
    seen = []

    def note(self):
        name = user.get(), translation.get_language()
        user.set("a handler's own")
        transaction.on_commit(lambda: seen.append((*name, user.get())), using=alias)
        return list(name)

    declare(note)

    def execute(number):
        user.set(f"user {number}")
        try:
            with translation.override(["de", "fr"][number % 2]):
                return Account.execute("a", "note", command_id=f"c{number}", using=alias)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(7) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        calls = [pool.submit(execute, number) for number in range(6)]
        waiting(fresh, 6)
        held.go.set()
        first.result()
        answers = [call.result().response for call in calls]
    expected = [[f"user {number}", ["de", "fr"][number % 2]] for number in range(6)]
    assert answers == expected
    assert sorted(seen) == sorted((*each, each[0]) for each in expected)


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_an_error_of_the_batch_reaches_each_caller_as_its_own(
    account, withdraw, held, fresh, alias
):
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        calls = [pool.submit(withdraw, f"c{number}") for number in range(3)]
        waiting(fresh, 3)
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE account SET version = 7 WHERE id = 'a'")
        held.go.set()
        errors = [call.exception() for call in [first, *calls]]
    assert {type(error) for error in errors} == {DamagedEntity}
    assert len({id(error) for error in errors}) == 4


def test_a_type_without_batches_is_not_queued(account, withdraw, monkeypatch, fresh):
    monkeypatch.setattr(Account, "batch_size", 1)
    monkeypatch.setattr(queue, "queues", None)
    assert withdraw("x").version == 2
    monkeypatch.setattr(queue, "queues", fresh)


def test_a_timeout_is_a_number_above_zero(account, withdraw):
    for timeout in (0, -1, "1", True):
        with pytest.raises(InvalidCommand, match="timeout must be"):
            withdraw("x", timeout=timeout)
    assert withdraw("x", timeout=None).version == 2


def test_sessions_of_two_tenants_do_not_share_a_batch(
    account, withdraw, held, fresh, batches, settings
):
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_SCOPE": "tests.entities.test_queue.tenant"}

    def execute(tenant, command_id):
        user.set(tenant)
        return withdraw(command_id)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(execute, "one", "x")
        held.wait()
        second = pool.submit(execute, "one", "y")
        waiting(fresh, 1)
        other = pool.submit(execute, "two", "z")
        eventually(lambda: len(fresh.by_key) == 2)
        held.go.set()
        assert {future.result().version for future in (first, second, other)} == {2, 3, 4}
    assert batches == [1, 1, 1]


def test_below_async_to_sync_a_tenant_has_a_line_of_its_own(
    account, alias, fresh, settings, monkeypatch
):
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_SCOPE": "tests.entities.test_queue.tenant"}
    enter, scopes = fresh.enter, []

    def note(call, key):
        scopes.append(key.scope)
        return enter(call, key)

    monkeypatch.setattr(fresh, "enter", note)
    user.set("one")
    ask = async_to_sync(Account.aexecute)
    assert ask("a", "withdraw", {"amount": 0}, command_id="x", using=alias).version == 2
    assert scopes == [("one", None)]


def test_coroutines_share_batches_and_threads_end(account, alias, fresh, batches, rows):
    async def ask_all():
        calls = [
            Account.aexecute("a", "withdraw", {"amount": 0}, command_id=f"c{n}", using=alias)
            for n in range(200)
        ]
        return await asyncio.gather(*calls)

    outcomes = asyncio.run(ask_all())
    assert [outcome.version for outcome in outcomes] == list(range(2, 202))
    assert sum(batches) == 200
    assert len(batches) <= 50  # how many gather depends on the machine
    assert 1 <= fresh.threads <= 4


def test_a_coroutine_that_is_cancelled_while_it_waits_is_dropped(
    account, alias, held, fresh, rows, withdraw
):
    async def ask_and_cancel():
        waits = asyncio.create_task(
            Account.aexecute("a", "withdraw", {"amount": 1}, command_id="y", using=alias)
        )
        while not fresh.waiting:
            await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        asyncio.run(ask_and_cancel())
        held.go.set()
        first.result()
    eventually(lambda: not fresh.by_key)
    assert len(rows()) == 2


def test_coroutines_time_out(account, alias, held, rows, withdraw):
    async def ask(command_id):
        await Account.aexecute(
            "a", "withdraw", {"amount": 1}, command_id=command_id, using=alias, timeout=0.05
        )

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        with pytest.raises(CommandTimeout):
            asyncio.run(ask("y"))
        held.go.set()
        first.result()
    assert len(rows()) == 2


def test_a_coroutine_whose_batch_is_under_way_does_not_know(account, alias, held, rows):
    async def ask():
        await Account.aexecute(
            "a", "withdraw", {"amount": 1}, command_id="y", using=alias, timeout=patience(0.5)
        )

    with pytest.raises(OutcomeUnknown, match="was in progress"):
        asyncio.run(ask())
    held.go.set()
    eventually(lambda: len(rows()) == 2)


def test_errors_reach_the_coroutine(account, alias):
    async def ask():
        return await asyncio.gather(
            Account.aexecute("a", "fail", command_id="x", using=alias),
            Account.aexecute("a", "withdraw", {"amount": 1}, command_id="y", using=alias),
            return_exceptions=True,
        )

    failed, outcome = asyncio.run(ask())
    assert isinstance(failed, ZeroDivisionError)
    assert outcome.response == {"balance": 9}


def test_at_the_end_of_the_process_what_waits_is_refused(
    account, withdraw, held, fresh, monkeypatch
):
    monkeypatch.setattr(queue, "IDLE", 60)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        second = pool.submit(withdraw, "y")
        waiting(fresh, 1)
        closing = pool.submit(fresh.close)
        assert isinstance(second.exception(), Overloaded)
        with pytest.raises(Overloaded, match="about to end"):
            withdraw("z")
        with pytest.raises(TimeoutError):  # the batch is under way
            closing.result(0.2)
        held.go.set()
        assert first.result().version == 2
        closing.result(patience(20))


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_child_begins_with_empty_queues(alias, account, withdraw, held, fresh):
    """It has none of its parent's threads: a queue that the parent leads would stay for ever."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(withdraw, "x")
        held.wait()
        set_failpoint("entity_loaded", None)
        child = os.fork()
        if child == 0:
            try:
                inherited = [each.connection for each in connections.all()]  # not to be closed
                for each in connections.all():
                    each.connection = None
                outcome = Account.execute(
                    "a", "withdraw", {"amount": 1}, command_id="child", using=alias, timeout=20
                )
                os._exit(outcome.version if inherited else 98)
            except BaseException:
                os._exit(99)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 2
        held.go.set()
        assert first.result().version == 3


def test_a_coroutine_is_told_to_await(account, alias, rows):
    """It would stop its loop, and fail every command of the batch that it led."""

    async def ask():
        Account.execute("a", "withdraw", {"amount": 1}, command_id="x", using=alias)

    with pytest.raises(SynchronousOnlyOperation, match="await aexecute"):
        asyncio.run(ask())
    assert len(rows()) == 1


@pytest.mark.slow
def test_what_is_put_back_is_led_though_its_caller_has_gone(alias, held, fresh):
    """The command before it changes a unique column and ends the transaction."""

    def change(command_id, timeout=60, **state):
        try:
            return Person.execute(
                "a", "change", state, command_id=command_id, using=alias, timeout=timeout
            )
        finally:
            connections.close_all()

    def hold():
        set_failpoint("entity_loaded", None)
        there.set()
        assert again.wait(60)

    held.go.set()
    Person.execute("a", "enter", {}, command_id="enter", using=alias)
    for each in held.there, held.go:
        each.clear()
    there, again = threading.Event(), threading.Event()
    set_failpoint("entity_loaded", lambda: (held.there.set(), held.go.wait(60)))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(change, "x", age=1)
        held.wait()
        leader, late = in_turn(
            pool, fresh, lambda: change("y", email="y"), lambda: change("z", 2, age=2)
        )
        set_failpoint("entity_loaded", hold)
        held.go.set()
        first.result()
        assert there.wait(60)
        assert type(late.exception()) is OutcomeUnknown
        again.set()
        leader.result()
        assert change("w", timeout=5, age=3).version in (4, 5)


def test_a_coroutine_that_is_collected_while_a_thread_has_the_lock(alias, account, held, fresh):
    """A loop that was closed leaves it, and the collector ends it where it likes."""

    async def ask():
        await Account.aexecute("a", "withdraw", {"amount": 1}, command_id="x", using=alias)

    def collect():
        with fresh.lock:
            gc.collect()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, context: None)  # it tells of the task
    task = loop.create_task(ask())
    loop.call_later(0.1, loop.stop)
    loop.run_forever()
    held.wait()
    loop.close()
    held.go.set()
    eventually(lambda: not fresh.by_key)
    gc.disable()
    del task
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(patience(10))
    gc.enable()
    assert not thread.is_alive()


def test_a_coroutine_is_told_where_nothing_would_be_committed(alias, account, rows, monkeypatch):
    """The thread that leads for it has autocommit off, too."""
    monkeypatch.setitem(connections.settings[alias], "AUTOCOMMIT", False)
    run = Account.aexecute("a", "withdraw", {"amount": 1}, command_id="x", using=alias)
    with pytest.raises(NotAtomic, match="not in an atomic"):
        asyncio.run(run)
    assert len(rows()) == 1


def test_the_text_of_a_rejection_is_in_the_language_of_its_caller(alias, account, declare):
    def refuse(self):
        raise Rejected(lazy(translation.get_language, str)())

    declare(refuse)
    with translation.override("de"):
        run = Account.aexecute("a", "refuse", command_id="x", using=alias)
        assert asyncio.run(run).rejected.text == "de"


def test_a_coroutine_of_a_tenant_is_executed_on_the_tenants_connection(
    alias, account, declare, monkeypatch
):
    """As under ASGI: a middleware, which is synchronous, has chosen the tenant in its thread."""

    def look(self):
        return connections[alias].schema_name

    def choose():
        monkeypatch.setattr(connections[alias], "schema_name", "one")

    async def ask():
        await sync_to_async(choose)()
        outcome = await Account.aexecute("a", "look", command_id="x", using=alias)
        await sync_to_async(connections.close_all)()
        return outcome

    declare(look)
    # A connection of django-tenants begins so.
    monkeypatch.setattr(type(connections[alias]), "schema_name", "public", raising=False)
    entity_transaction._has_schemas.cache_clear()
    assert asyncio.run(ask()).response == "one"
    entity_transaction._has_schemas.cache_clear()


@pytest.mark.slow
def test_what_may_be_committed_is_not_said_to_be_not_begun(
    alias, account, ask, fresh, rows, settings
):
    """Its batch was broken off after the commit, and waits for the thread, which another has."""
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_THREADS": 1}
    go = threading.Event()
    ask("open", {"owner": "bob", "balance": 9}, id="b")

    def end():
        set_failpoint("entity_committed", None)
        eventually(lambda: len(fresh.to_lead) == 1)
        set_failpoint("entity_loaded", hold)
        raise SystemExit

    def hold():
        set_failpoint("entity_loaded", None)
        assert go.wait(60)

    async def run():
        calls = [
            asyncio.create_task(
                Account.aexecute(
                    *(id, "withdraw", {"amount": 1}),
                    command_id="x",
                    using=alias,
                    timeout=timeout,
                )
            )
            for id, timeout in (("a", 2), ("b", 60))
        ]
        [answer] = await asyncio.gather(calls[0], return_exceptions=True)
        go.set()
        await calls[1]
        return answer

    set_failpoint("entity_committed", end)
    answer = asyncio.run(run())
    assert len(rows()) == 2
    assert type(answer) is OutcomeUnknown


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_commit_that_is_broken_off_ends_its_thread_alone(
    account, withdraw, held, fresh, rows, break_off
):
    def lead():
        break_off(b"COMMIT")
        return withdraw("c0")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(withdraw, "first")
        held.wait()
        calls = in_turn(pool, fresh, lead, lambda: withdraw("c1"), lambda: withdraw("c2"))
        held.go.set()
        first.result()
        assert [type(call.exception()) for call in calls] == [SystemExit, type(None), type(None)]
    assert withdraw("c0").version == 3
    assert len(rows()) == 5
