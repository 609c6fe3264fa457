"""A small life of each capability, on a database that is migrated. Each imports what it needs."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

from django.core.management import call_command
from django.db import connection, transaction

__all__ = ["connection"]


def said(*command: str) -> str:
    """Return what a command writes. One that exits with an error has failed."""
    out = StringIO()
    try:
        call_command(*command, stdout=out)
    except SystemExit as error:
        if error.code and command[0] != "outbox_status":  # no drainer runs, which it tells
            raise AssertionError(command) from error
    return out.getvalue()


def jobs() -> None:
    from outbox_app import stage
    from outbox_app.models import DeadJob, StagedJob

    from .celery import note

    with transaction.atomic():
        note.apply_async(("gone",), task_id="gone")
        stage("shop.note", ["by name"])
    said("drain_outbox", "--once")
    assert not StagedJob.objects.exists()
    with transaction.atomic():
        stage("shop.note", ["dead"])
    StagedJob.objects.update(envelope="nonsense")
    said("drain_outbox", "--once")
    assert DeadJob.objects.count() == 1
    assert "shop.note" in said("outbox_dead", "list")
    said("outbox_dead", "discard", "--all")
    said("outbox_prune", "--inbox", "--incidents", "--counters")


def events() -> None:
    from outbox_app.events import publish

    from . import subscribers

    with transaction.atomic():
        publish("order-1", "made")
    said("run_subscriptions", "--once")
    assert subscribers.heard == ["order-1"]
    assert "shop" in said("outbox_subscriptions", "list")


def entities() -> None:
    from tests.entities.models import Account

    Account.execute("a", "open", {"owner": "ann", "balance": 3}, command_id="1")
    assert Account.objects.get(pk="a").state["balance"] == 3


def prepared() -> None:
    from outbox_app.events.models import Event
    from outbox_app.prepared import prepared
    from outbox_app.prepared.testing import assert_confirmed

    with prepared("order-2", "paid", using="business", wait=True):
        pass
    assert_confirmed("paid")
    assert Event.objects.filter(stream="order-2").exists()


def ids() -> None:
    from outbox_app.ids import snowflake

    assert snowflake() != snowflake()


def django_tasks() -> None:
    from outbox_app.testing import run_staged
    from tests.django_tasks.declared import add

    with transaction.atomic():
        result = add.enqueue(4, 4)
    run_staged()
    result.refresh()
    assert result.return_value == 8


def shadow() -> None:
    from .celery import shadowed

    with transaction.atomic():
        shadowed.delay()
    from outbox_app.shadow import producer

    producer.writer.drain(30)
    assert "early=1" in said("outbox_shadow")


LIVES: dict[str, Callable[[], None]] = {
    "outbox_app": jobs,
    "outbox_app.events": events,
    "outbox_app.entities": entities,
    "outbox_app.prepared": prepared,
    "outbox_app.ids": ids,
    "outbox_app.django_tasks": django_tasks,
    "outbox_app.shadow": shadow,
}
