"""Code that ends its transaction is detected, even if it raises any error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import InternalError, OperationalError, connections, transaction

from outbox_app.database.transaction_guard import (
    guarded,
    is_lost,
    raise_what_ends_the_thread,
)
from outbox_app.exceptions import TransactionEnded


class Column:
    """Like an array: whether it equals a number is no truth value."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("argument", [{"not": "hashable"}, Column()], ids=["dict", "column"])
def test_code_that_has_ended_its_transaction_may_raise_anything(alias: str, argument: Any) -> None:
    def end_and_raise() -> None:
        with transaction.atomic(using=alias), guarded("It", using=alias):
            connections[alias].connection.cursor().execute("COMMIT")
            raise ValueError(argument)

    with pytest.raises(TransactionEnded, match="It ended its transaction"):
        end_and_raise()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("code", ["25P03", "25P04"])
def test_a_session_that_the_server_ends_as_its_transaction_takes_long(alias, code, monkeypatch):
    """The driver has them for internal errors. The code has caught nothing, and is not told so."""
    ended = type("Ended", (Exception,), {"sqlstate": code})

    def commit(savepoint):
        raise InternalError("terminating connection") from ended()

    def idle():
        with transaction.atomic(using=alias), guarded("It", using=alias):
            pass

    monkeypatch.setattr(connections[alias], "savepoint_commit", commit)
    with pytest.raises(OperationalError, match="terminating connection"):
        idle()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("step", "raises"), [("commit", False), ("rollback", True)])
def test_the_time_limit_of_a_task_is_no_fault_of_the_code(alias, step, raises, monkeypatch):
    """It comes at any moment: also while the savepoint around the code ends."""

    def limited(savepoint):
        raise SoftTimeLimitExceeded

    def run():
        with transaction.atomic(using=alias), guarded("It", using=alias):
            if raises:
                raise ValueError

    monkeypatch.setattr(connections[alias], f"savepoint_{step}", limited)
    with pytest.raises(SoftTimeLimitExceeded):
        run()


def test_errors_that_have_caused_each_other_end_no_thread() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    raise_what_ends_the_thread(one, None)


def test_a_timeout_of_asyncio_ends_no_thread() -> None:
    """As one of a transport's library, or of a project's serializer: it hides a CancelledError."""

    async def ask() -> None:
        async with asyncio.timeout(0):
            await asyncio.sleep(9)

    with pytest.raises(TimeoutError) as caught:
        asyncio.run(ask())
    raise_what_ends_the_thread(caught.value, None)


@pytest.mark.unit
@pytest.mark.parametrize("number", [0, 1040, 1053, 1158, 1205, 1290, 1317, 2006, 2013, 4031])
def test_errors_of_a_server_of_mysql_are_of_no_row(number: int) -> None:
    assert is_lost(OperationalError(number, "…"))


@pytest.mark.unit
@pytest.mark.parametrize("number", [1366, 1644, 3000, 3151, 3157, 3751, 3752, 3903, 3907])
def test_all_others_are_of_the_row(number: int) -> None:
    assert not is_lost(OperationalError(number, "…"))
