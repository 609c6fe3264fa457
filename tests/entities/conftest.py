"""Fixtures of entities."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from outbox_app.entities import queue
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account


@pytest.fixture
def ask(alias):
    """``ask("withdraw", {"amount": 5}, id="a")``: a command of account a, with a new id."""
    numbers = iter(range(10**6))

    def execute(command, arguments=None, *, id="a", **options):
        options.setdefault("command_id", f"c{next(numbers)}")
        return Account.execute(id, command, arguments, using=alias, **options)

    return execute


@pytest.fixture
def account(ask):
    """Account a, with 10."""
    ask("open", {"owner": "ann", "balance": 10}, command_id="open")


@pytest.fixture
def rows(alias):
    """``rows()``: the version, command, rejection and state of each version of account a."""

    def read(id="a"):
        found = Account.history(id, using=alias)
        return list(found.values_list("version", "command", "rejected", "state"))

    return read


@pytest.fixture
def withdraw(alias):
    """``withdraw("x")``: 1 from account a; closes its connection."""

    def execute(command_id, amount=1, **options):
        try:
            return Account.execute(
                "a", "withdraw", {"amount": amount}, command_id=command_id, using=alias, **options
            )
        finally:
            connections.close_all()

    return execute


@pytest.fixture
def held():
    """``held.wait()``: wait for the first batch, which stops at a point until ``held.go``."""

    class Held:
        def __init__(self):
            self.go, self.there = threading.Event(), threading.Event()

        def wait(self):
            assert self.there.wait(60)

    held = Held()

    def hold():
        set_failpoint("entity_loaded", None)
        held.there.set()
        assert held.go.wait(60)

    set_failpoint("entity_loaded", hold)
    yield held
    held.go.set()
    set_failpoint("entity_loaded", None)


@pytest.fixture
def break_off(alias):
    """``break_off(b"COMMIT")``: at its next COMMIT this thread sends it, and ends before the reply.

    It ends as by a signal. Django hides the cause: its broken connection raises another error.
    """

    def prepare(sql):
        connection = connections[alias]

        def end():
            connection.connection.pgconn.send_query(sql)
            raise SystemExit

        connection._commit = end

    return prepare


@pytest.fixture
def batches():
    """The number of commands of each batch that was committed."""
    sizes = []
    original = queue.answer

    def note(entity, calls, *, using):
        sizes.append(len(calls))
        return original(entity, calls, using=using)

    queue.answer = note
    yield sizes
    queue.answer = original
