"""Idempotent tasks that end their transaction are detected, and their id is deleted."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connections, transaction

from outbox_app import idempotent
from outbox_app.exceptions import InboxError, TransactionEnded
from outbox_app.models import InboxEntry
from tests.database.endings import each_ending, end
from tests.faults.tools import on
from tests.jobs.inbox.worker import deliver, effect
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)


def execute(alias, *statements):
    with connections[alias].cursor() as cursor:
        for sql in statements:
            cursor.execute(sql)


@each_ending
@pytest.mark.parametrize("then", ["raises", "swallows", "returns"])
def test_a_transaction_that_was_ended(alias, task, effects, noted, way, then):
    calls = []

    @task
    @idempotent
    def work():
        calls.append(1)
        effect("first")
        if len(calls) == 1:
            end(way, alias)
            if then == "raises":
                raise ValueError("halfway")
            if then == "swallows":
                with suppress(DatabaseError):
                    execute(alias, "SELECT nothing FROM nowhere")
                return
        effect("second")

    InboxEntry.objects.using(alias).create(job_id="another", task="work", result="")
    delivery = deliver(work, "job")
    assert isinstance(delivery.value, TransactionEnded)
    assert "job id was deleted" in str(delivery.value.__notes__)
    assert noted() == ["another"]
    assert "first" in effects()
    assert deliver(work, "job").state == "SUCCESS"  # all of it, and once
    assert deliver(work, "job").state == "SUCCESS"
    assert (len(calls), noted()) == (2, ["another", "job"])
    assert effects().count("first") == 2


@on("postgres")
def test_an_error_that_is_swallowed_around_a_raw_cursor(alias, task, effects, noted):
    """PostgreSQL would take its COMMIT for a ROLLBACK, and the job would be lost in silence."""

    @task
    @idempotent
    def work():
        effect("work")
        try:
            execute(alias, "SELECT nothing FROM nowhere")
        except Exception:
            return "done"

    delivery = deliver(work, "job")
    assert isinstance(delivery.value, InboxError)
    assert "caught an error" in str(delivery.value)
    assert (effects(), noted()) == ([], [])


@on("mariadb")
def test_a_deadlock_that_is_swallowed_around_a_raw_cursor(alias, task, effects, noted):
    """It undoes the id; what the task writes after it must not be committed without it."""
    ids = [Group.objects.using(alias).create(name=name).pk for name in ("one", "two")]
    locked, swallowed = threading.Barrier(2, timeout=patience()), []
    update = "UPDATE auth_group SET name = CONCAT(name, ' x') WHERE id = {}"

    def other():
        try:
            with transaction.atomic(using=alias):
                Group.objects.using(alias).bulk_create(
                    Group(name=f"weight {number}") for number in range(200)
                )
                execute(alias, update.format(ids[1]))
                locked.wait()
                execute(alias, update.format(ids[0]))
        finally:
            connections[alias].close()

    @task
    @idempotent
    def work():
        if not swallowed:
            execute(alias, update.format(ids[0]))
            locked.wait()
            try:
                execute(alias, update.format(ids[1]))
            except Exception as error:
                swallowed.append(error)
        effect("work")

    thread = threading.Thread(target=other)
    thread.start()
    try:
        delivery = deliver(work, "job")
    finally:
        thread.join()
    assert swallowed[0].args[0] == 1213
    assert isinstance(delivery.value, InboxError)
    assert ("work" in effects(), noted()) == (False, [])
    assert deliver(work, "job").state == "SUCCESS"
    assert (effects().count("work"), noted()) == (1, ["job"])


@pytest.mark.parametrize("then", ["returns", "asks"])
def test_a_connection_that_was_closed(alias, task, effects, noted, then):
    """The drivers say that it is lost, or that an error came before. The task did it."""

    @task
    @idempotent
    def work():
        effect("first")
        connections[alias].close()
        if then == "asks":
            execute(alias, "SELECT 1")

    delivery = deliver(work, "job")
    assert isinstance(delivery.value, InboxError)
    assert "[job] closed the connection of its transaction" in str(delivery.value)
    assert (effects(), noted()) == ([], [])
