"""No loop runs inside a transaction of its caller: it would take what is not committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from outbox_app.events import publish
from outbox_app.exceptions import UnfitSession
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Process, StagedJob
from tests import tasks
from tests.jobs.dead.rows import staged_jobs

COMMANDS = ["drain_outbox", "run_outbox", "run_prepared", "run_subscriptions"]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.django_db(transaction=True)
def test_a_command_is_refused(
    alias: str, command: str, make_app: Callable[..., Any], seen_by: Callable[..., Any]
) -> None:
    """As in a view with ATOMIC_REQUESTS: what was rolled back had been sent, and handled."""
    app, seen = make_app(), seen_by("all")
    note = app.task(name="note")(tasks.note)
    for processes in [{}, {"processes": 2}][: 1 + (command != "run_outbox")]:
        with transaction.atomic(using=alias):
            note.apply_async(("", 1))
            publish("a", "made")
            with pytest.raises(CommandError, match="A transaction is open") as raised:
                call_command(command, once=True, **processes)
            assert raised.value.returncode == 2
            assert StagedJob.objects.using(alias).exists()  # the transaction goes on
            transaction.set_rollback(True, using=alias)
    with app.connection() as broker:
        assert broker.SimpleQueue(app.conf.task_default_queue).qsize() == 0
    assert seen == []


@pytest.mark.django_db(transaction=True)
def test_a_drain_of_ones_own_is_refused_with_autocommit_off(alias: str) -> None:
    connections[alias].ensure_connection()
    transaction.set_autocommit(False, using=alias)
    try:
        staged_jobs(using=alias)
        with pytest.raises(UnfitSession):
            Drain(using=alias).run(once=True)
        assert not Process.objects.using(alias).exists()
        transaction.rollback(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
