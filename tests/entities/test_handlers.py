"""Handlers that misbehave: the effect is limited to their own commands, or refused."""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox_app import idempotent
from outbox_app.entities import Command, Rejected, command, rule
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.batch import Moved
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import InvalidCommand, StatementRefused
from outbox_app.events.exceptions import InvalidEvent
from outbox_app.exceptions import CallbackFailed, TransactionEnded, UnsafeCallback
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.staging import detector
from tests.database.endings import each_ending, end
from tests.entities.models import Account
from tests.jobs.inbox.worker import deliver

commits = pytest.mark.django_db(transaction=True)


@pytest.fixture
def moved_once(monkeypatch):
    """The first attempt of each command conflicts with a command that was faster."""
    monkeypatch.setattr(entity_transaction, "PAUSE", 0)

    def move():
        set_failpoint("entity_handled", None)
        raise Moved

    set_failpoint("entity_handled", move)
    yield
    set_failpoint("entity_handled", None)


@commits
def test_arguments_that_a_handler_changes_are_whole_in_the_next_attempt(
    alias, account, ask, declare, moved_once
):
    def add(self, items):
        items.append("more")
        self.state = {"items": items}
        return items

    declare(add)
    assert ask("add", {"items": [1]}).response == [1, "more"]
    assert Account.history("a", using=alias).last().data == {"items": [1]}


@commits
@pytest.mark.parametrize("atomic", [False, True])
def test_callbacks_of_a_rejected_command_are_dropped(alias, account, ask, declare, atomic):
    called = []

    def order(self, no):
        transaction.on_commit(lambda: called.append(no), using=alias)
        if no:
            raise Rejected("No.")

    declare(order, atomic=atomic)
    ask("order", {"no": True})
    ask("order", {"no": False})
    assert called == [False]
    with transaction.atomic(using=alias):
        transaction.on_commit(lambda: called.append("caller"), using=alias)
        ask("order", {"no": True})
    assert called == [False, "caller"]


@commits
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Rejected("\x00"), "the rejection holds a NUL"),
        (Rejected("no", code="\ud800"), "the rejection cannot be stored as JSON"),
    ],
)
def test_a_rejection_that_cannot_be_stored(account, ask, rows, declare, error, expected):
    def refuse(self):
        raise error

    declare(refuse)
    with pytest.raises(InvalidCommand, match=expected):
        ask("refuse")
    assert len(rows()) == 1


@commits
def test_a_rejection_without_a_code(account, ask, declare):
    def refuse(self):
        raise Rejected("no", code=None)

    declare(refuse)
    assert ask("refuse").rejected.code == ""


@commits
def test_a_decorator_above_the_command_runs_with_it(alias, account, ask, monkeypatch):
    def doubled(handler):
        @functools.wraps(handler)
        def run(self, amount):
            return handler(self, amount * 2)

        return run

    monkeypatch.setattr(Account, "take", doubled(Account.withdraw), raising=False)
    spec_of.cache_clear()
    assert ask("take", {"amount": 2}).response == {"balance": 6}
    assert Account.history("a", using=alias).last().command == "take"
    spec_of.cache_clear()


@pytest.mark.parametrize("event", ["x" * 247, "\x00", "$tombstone"])
def test_a_type_that_no_event_can_have(event):
    with pytest.raises(InvalidEvent, match="event"):
        command(event=event)


@pytest.mark.parametrize("declared", [command(), rule])
def test_a_method_that_only_begins_when_it_is_awaited(declared):
    """What it returns is true: the rule would always hold."""

    async def later(self):
        return False

    def one_by_one(self):
        yield False

    async def both(self):
        yield False

    for method in (later, one_by_one, both):
        with pytest.raises(TypeError, match="must be a plain method"):
            declared(method)


@pytest.mark.parametrize("other", ["postgres", "mariadb"])
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.django_db(transaction=True, databases="__all__")
def test_another_database_is_refused_and_not_left_half_open(declare, settings, other, atomic):
    """A session that lacks its SET statements has another isolation level, or another role."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": "default"}

    def look(self):
        return Account.objects.using(other).count()

    declare(look, atomic=atomic)
    Account.execute("a", "open", {"owner": "ann"}, command_id="open")
    connections[other].close()
    with pytest.raises(StatementRefused, match="may not query a database"):
        Account.execute("a", "look", command_id="x")
    assert connections[other].connection is None
    assert Account.objects.using(other).count() == 0


@commits
@each_ending
def test_a_handler_that_ends_its_transaction_gets_no_answer(
    account, ask, rows, declare, alias, way
):
    before = rows()

    def finish(self):
        end(way, alias)

    declare(finish, atomic=True)
    with pytest.raises(
        TransactionEnded, match=r"The command Account\.finish ended its transaction"
    ):
        ask("finish", command_id="x")
    assert rows() == before


@commits
def test_a_database_whose_driver_is_not_installed_stops_no_command(account, ask, monkeypatch):
    missing = {**connections.settings["default"], "ENGINE": "django.db.backends.missing"}
    monkeypatch.setitem(connections.settings, "reports", missing)
    assert ask("withdraw", {"amount": 4}).response == {"balance": 6}


@commits
@pytest.mark.parametrize("error", [OperationalError, IntegrityError, ZeroDivisionError])
def test_an_error_of_a_callback_is_logged_and_costs_no_answer(
    account, ask, rows, declare, alias, caplog, error
):
    runs = []

    def order(self):
        runs.append(1)

        def call():
            raise error("a callback's own")

        transaction.on_commit(call, using=alias)

    declare(order)
    assert ask("order", command_id="x").version == 2
    [record] = [each for each in caplog.records if each.name == "outbox_app.callbacks"]
    assert record.of == "commands of Account"
    assert "order.<locals>.call" in record.callback
    assert "a callback's own" in record.error
    assert len(runs) == 1
    assert len(rows()) == 2
    assert ask("order", command_id="x").replayed


@commits
@pytest.mark.parametrize("atomic", [False, True])
def test_a_callback_is_named_before_the_commit(
    account, ask, rows, declare, alias, settings, monkeypatch, atomic
):
    settings.OUTBOX = {**settings.OUTBOX, "DETECT": "raise"}
    monkeypatch.setattr(detector, "late", Counter())
    called = []

    def order(self, robust):
        self.publish("ordered")
        transaction.on_commit(partial(called.append, robust), using=alias, robust=robust)

    declare(order, atomic=atomic)
    commands = [
        Command("a", "order", {"robust": robust}, command_id=str(robust))
        for robust in (True, False)
    ]
    done, refused = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert done.version == 2
    with pytest.raises(UnsafeCallback, match=r"Account\.order leaves builtins\.list\.append to"):
        raise refused
    assert (len(rows()), called) == (2, [True])


@commits
def test_a_callback_of_a_command_inside_an_idempotent_task(account, rows, declare, alias, make_app):
    """The task's transaction is the command's, and its error is the callback's."""

    def order(self):
        transaction.on_commit(lambda: 1 / 0, using=alias)

    declare(order)
    app = make_app()

    @app.task(shared=False, lazy=False)
    @idempotent
    def pay():
        Account.execute("a", "order", command_id="x", using=alias)

    for _ in range(2):
        with pytest.raises(CallbackFailed, match=r"order\.<locals>\.<lambda>.*ZeroDivisionError"):
            raise deliver(pay, "job").value
    assert len(rows()) == 2


@pytest.mark.django_db(transaction=True)
def test_a_command_executes_no_other(alias, account, ask, rows):
    with pytest.raises(InvalidCommand, match=r"Account\.ask_itself may not execute another"):
        ask("ask_itself", {"using": alias})
    assert len(rows()) == 1
