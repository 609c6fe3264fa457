"""Entities in a project's own tests, inside the transaction of a test and outside."""

from __future__ import annotations

import asyncio
from unittest.mock import ANY

import pytest
from asgiref.sync import async_to_sync
from django.db import connections
from django.test import TestCase

from outbox_app.entities import Command, queue
from outbox_app.entities.testing import (
    assert_executed,
    assert_rejected,
    at_once,
    commands,
    in_one_thread,
)
from outbox_app.events.exceptions import VersionConflict
from tests.entities.models import Account


@pytest.fixture
def account(alias):
    Account.execute("a", "open", {"owner": "ann", "balance": 10}, command_id="open", using=alias)


def withdraw(alias, command_id, amount=1, **options):
    arguments = {"amount": amount}
    return Account.execute(
        "a", "withdraw", arguments, command_id=command_id, using=alias, **options
    )


def test_looking(account, alias):
    withdraw(alias, "some", 4)
    withdraw(alias, "some", 4)  # again: no command of its own
    withdraw(alias, "more", 100)
    found = commands(Account, "a", using=alias)
    assert [version.command_id for version in found] == ["open", "some", "more"]

    [version] = assert_executed(Account, "a", "withdraw", {"amount": 4}, using=alias)
    assert (version.version, version.response, version.state["balance"]) == (2, {"balance": 6}, 6)
    assert_executed(Account, "a", "open", {"owner": "ann", "balance": ANY}, using=alias)
    assert_executed(Account, "a", "withdraw", {"amount": 100}, count=0, using=alias)
    [version] = assert_rejected(Account, "a", "withdraw", code="balance", using=alias)
    assert version.version == 3
    assert_rejected(Account, "a", "withdraw", using=alias)
    assert_rejected(Account, "a", "withdraw", code="other", count=0, using=alias)


def test_a_failure_lists_what_was_asked(account, alias):
    withdraw(alias, "more", 100)
    with pytest.raises(AssertionError) as failure:
        assert_executed(Account, "a", "withdraw", using=alias)
    assert str(failure.value).splitlines() == [
        "Expected 1 executed withdraw; found 0. It was asked:",
        "  account.open a@1 {'owner': 'ann', 'balance': 10} None",
        "  account.withdrawn.rejected a@2 {'amount': 100} "
        "{'code': 'balance', 'text': 'There is not enough on the account.'}",
    ]
    with pytest.raises(AssertionError, match=r"Expected 2 rejected open exists; found 0\."):
        assert_rejected(Account, "a", "open", code="exists", count=2, using=alias)
    with pytest.raises(AssertionError, match="It was asked: nothing"):
        assert_executed(Account, "b", "open", using=alias)


def test_the_fixture_lets_coroutines_use_the_transaction_of_the_test(account, alias, outbox):
    async def ask(number):
        arguments = {"amount": 1}
        return await Account.aexecute(
            "a", "withdraw", arguments, command_id=f"c{number}", using=alias
        )

    async def ask_all():
        return await asyncio.gather(*map(ask, range(5)))

    outcomes = async_to_sync(ask_all)()
    assert sorted(outcome.version for outcome in outcomes) == [2, 3, 4, 5, 6]
    outbox.assert_executed(Account, "a", "withdraw", count=5, using=alias)


def test_the_flag_is_as_it_was_after_an_error():
    def fail():
        with in_one_thread(), in_one_thread():
            raise ZeroDivisionError

    assert not queue.in_one_thread
    with pytest.raises(ZeroDivisionError):
        fail()
    assert not queue.in_one_thread


class InTestCase(TestCase):
    """As a project without pytest has it."""

    def setUp(self):
        self.enterContext(in_one_thread())

    async def test_commands_of_coroutines(self):
        await Account.aexecute("t", "open", {"owner": "ann", "balance": 1}, command_id="open")
        outcome = await Account.aexecute("t", "withdraw", {"amount": 2}, command_id="w")
        assert outcome.rejected.code == "balance"
        assert await Account.objects.filter(pk="t").aexists()

    def test_what_coroutines_did_is_gone(self):
        assert not Account.objects.filter(pk="t").exists()
        Account.execute_many([Command("t", "open", {"owner": "ann"}, command_id="open")])
        assert_executed(Account, "t", "open", {"owner": "ann"})


@pytest.mark.django_db(transaction=True)
def test_callers_at_one_moment(account, alias):
    answers = at_once(
        *[lambda n=n: withdraw(alias, f"c{n}", expected_version=1) for n in range(8)], using=alias
    )
    conflicts = [answer for answer in answers if isinstance(answer, VersionConflict)]
    assert len(conflicts) == 7
    [outcome] = [answer for answer in answers if answer not in conflicts]
    assert outcome.version == 2
    answers = at_once(*[lambda: withdraw(alias, "same", 2)] * 8, using=alias)
    assert {(answer.version, answer.response["balance"]) for answer in answers} == {(3, 7)}
    assert sum(not answer.replayed for answer in answers) == 1


@pytest.mark.django_db(transaction=True)
def test_callers_have_connections_of_their_own(alias):
    def look():
        return connections[alias]

    assert len({id(connection) for connection in at_once(look, look, using=alias)}) == 2


def test_callers_cannot_see_a_transaction(alias):
    with pytest.raises(AssertionError, match="cannot see this transaction"):
        at_once(lambda: None, using=alias)
