"""A transaction waits for each lock up to its limit, and leaves the session's settings alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, connections, transaction

from outbox_app.database.lock_wait import atomic_with_lock_wait, is_conflict, is_lock_timeout
from outbox_app.events.models import StreamHead
from tests.faults.tools import on
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
SETTING = {"postgresql": "SHOW lock_timeout", "mysql": "SELECT @@innodb_lock_wait_timeout"}
#: Servers wait longer by themselves.
LONG = 40.0


@pytest.fixture
def held(alias: str) -> Iterator[None]:
    """Another session holds the head of the stream ``a``."""
    StreamHead.objects.using(alias).create(log="log", stream="a", version=1)
    there, go = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with transaction.atomic(using=alias):
                StreamHead.objects.using(alias).select_for_update().get()
                there.set()
                go.wait(patience(60))
        finally:
            connections[alias].close()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert there.wait(patience())
    yield
    go.set()
    thread.join(patience())


@pytest.fixture
def mysql_session(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MySQL has no ``SET STATEMENT``: the limit is set on the session, and must be restored."""
    monkeypatch.setattr(connections[alias], "mysql_is_mariadb", False)
    before = session(alias)
    yield
    assert session(alias) == before


def session(alias: str) -> object:
    with connections[alias].cursor() as cursor:
        cursor.execute(SETTING[connections[alias].vendor])
        return cursor.fetchone()


def wait_twice(alias: str) -> None:
    """By a statement that writes, and by one that reads."""
    before, began = session(alias), time.monotonic()
    heads = StreamHead.objects.using(alias)
    for ask in (lambda: heads.update(version=2), lambda: list(heads.select_for_update())):
        with pytest.raises(OperationalError) as caught, atomic_with_lock_wait(1, using=alias):
            ask()
        assert is_conflict(caught.value)
    assert time.monotonic() - began < LONG
    assert session(alias) == before


@on("postgres", "mariadb")
def test_a_lock_that_is_not_waited_for(alias: str, held: None) -> None:
    """MySQL has a number of its own for it."""
    heads = StreamHead.objects.using(alias)
    with pytest.raises(OperationalError) as caught, transaction.atomic(using=alias):
        list(heads.select_for_update(nowait=True))
    assert is_conflict(caught.value)
    assert is_lock_timeout(caught.value)


@on("postgres", "mariadb")
def test_a_wait_is_bounded(alias: str, held: None) -> None:
    wait_twice(alias)


@on("mariadb")
@pytest.mark.usefixtures("held", "mysql_session")
def test_a_wait_is_bounded_by_the_session_on_mysql(alias: str) -> None:
    wait_twice(alias)


@on("mariadb")
@pytest.mark.usefixtures("mysql_session")
def test_a_session_is_as_it_was_where_the_callers_transaction_is_undone(alias: str) -> None:
    """As by a deadlock, after which Django refuses statements until the caller's block ends."""

    def fail() -> None:
        with transaction.atomic(using=alias), atomic_with_lock_wait(1, using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute("ROLLBACK")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


@on("postgres")
def test_a_callers_transaction_waits_on_as_it_did(alias: str) -> None:
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET LOCAL lock_timeout = '7s'")
        with atomic_with_lock_wait(1, using=alias):
            assert session(alias) == ("1s",)
        assert session(alias) == ("7s",)
        with pytest.raises(ZeroDivisionError), atomic_with_lock_wait(1, using=alias):
            raise ZeroDivisionError
        assert session(alias) == ("7s",)


@on("mariadb")
@pytest.mark.usefixtures("mysql_session")
def test_a_session_is_as_it_was_where_a_time_limit_comes_at_its_bound(alias: str) -> None:
    """The driver returns to Python, and to the limit of a task, once the server has answered."""

    def limited(execute: Any, sql: Any, *rest: Any) -> Any:
        execute(sql, *rest)
        if "SESSION innodb_lock_wait_timeout = 1" in sql:
            raise SoftTimeLimitExceeded

    with (
        connections[alias].execute_wrapper(limited),
        pytest.raises(SoftTimeLimitExceeded),
        atomic_with_lock_wait(1, using=alias),
    ):
        pass


@pytest.mark.parametrize("argument", [{"email": "taken"}, ["taken"]])
def test_an_error_of_the_project_with_any_argument_is_no_conflict(argument: Any) -> None:
    assert not is_conflict(OperationalError(argument))
