"""Fixtures of entities."""

from __future__ import annotations

import pytest

from outbox_app.entities import command
from outbox_app.entities.handling import spec_of
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
def declare(monkeypatch):
    """``declare(function, atomic=True)``: one more command of accounts, by the function's name."""

    def add(handler, **options):
        monkeypatch.setattr(Account, handler.__name__, command(**options)(handler), raising=False)
        spec_of.cache_clear()

    yield add
    spec_of.cache_clear()


@pytest.fixture
def account(ask):
    """Account a, with 10."""
    ask("open", {"owner": "ann", "balance": 10}, command_id="open")


@pytest.fixture
def rows(alias):
    """``rows()``: version, command, rejected and state of each version of account a."""

    def read(id="a"):
        found = Account.history(id, using=alias)
        return list(found.values_list("version", "command", "rejected", "state"))

    return read
