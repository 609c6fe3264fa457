"""Inline: the view and the business rows commit together or not at all."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import InvalidSubscriber
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections.push import receive
from outbox_app.events.signals import events_published
from outbox_app.failpoints import set_failpoint
from tests.events.projections.declared import StatusOf, declare
from tests.events.projections.models import Status
from tests.faults.tools import on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def test_a_row_changes_inside_the_transaction(alias, published, run, status):
    declare(StatusOf, "status", inline=True)
    with transaction.atomic(using=alias):
        published("a", "b", "a")
        assert status() == {"a": ("1 2", 2), "b": ("1", 1)}
        published("b", type="gone")
        assert status() == {"a": ("1 2", 2)}
    run("status", batch_size=1)
    assert status() == {"a": ("1 2", 2)}


def test_a_rollback_undoes_it(alias, published, run, status):
    declare(StatusOf, "status", inline=True)
    published("a")
    with transaction.atomic(using=alias):
        published("a")
        with transaction.atomic(using=alias):
            published("a")
            transaction.set_rollback(True, using=alias)
        published("a")
        assert status() == {"a": ("1 2 3", 3)}
        transaction.set_rollback(True, using=alias)
    assert status() == {"a": ("1", 1)}
    published("a")
    run("status")
    assert status() == {"a": ("1 2", 2)}


def test_what_apply_raises_fails_the_publish(alias, published, status):
    declare(StatusOf, "status", inline=True)
    with transaction.atomic(using=alias):
        published("a")
        with pytest.raises(ValueError, match="b@1"):
            published("b", type="bad")
        transaction.set_rollback(True, using=alias)
    assert status() == {}
    assert not Event.objects.using(alias).exists()


def test_a_view_that_has_not_caught_up_is_left_to_the_pull(alias, published, run, status):
    published("a", "a", "b")
    declare(StatusOf, "status", inline=True)
    published("a", "c")
    assert status() == {"c": ("1", 1)}
    run("status")
    assert status() == {"a": ("1 2 3", 3), "b": ("1", 1), "c": ("1", 1)}
    published("a")
    assert status()["a"] == ("1 2 3 4", 4)


def test_types_that_are_not_asked_for_do_not_hold_it_up(alias, published, status):
    declare(StatusOf, "status", types=["made"], inline=True)
    for type in ("other", "made", "other", "made"):
        published("a", type=type)
    with transaction.atomic(using=alias):
        publish_many(NewEvent("a", type) for type in ("other", "made", "other", "made"))
    assert status() == {"a": ("2 4 6 8", 8)}


def test_a_key_that_is_not_the_stream_fails_the_publish(alias, published):
    declare(StatusOf, "status", inline=True, key=lambda self, event: event.stream[0])
    with pytest.raises(InvalidSubscriber, match="can be neither pushed nor inline"):
        published("ab")
    assert not Event.objects.using(alias).exists()


def test_the_pull_touches_no_row_that_is_applied(alias, published, run, status):
    applied = []

    def apply(self, event, row):
        applied.append(event.version)
        return StatusOf.apply(self, event, row)

    declare(StatusOf, "status", inline=True, apply=apply)
    published("a", "a")
    run("status")
    assert applied == [1, 2]
    assert Cursor.objects.using(alias).get().handled == 2


@on("mariadb")
def test_an_event_that_is_newer_than_the_snapshot_of_the_writer(
    alias, published, run, status, in_thread, monkeypatch
):
    """It was published by a process whose code has no projection yet."""
    declare(StatusOf, "status", types=["made"], inline=True)
    published("a")
    monkeypatch.setitem(
        connections.settings[alias]["OPTIONS"], "isolation_level", "repeatable read"
    )
    looked, written = threading.Event(), threading.Event()

    def write():
        with transaction.atomic(using=alias):
            assert Event.objects.using(alias).count() == 1
            looked.set()
            written.wait(patience())
            published("a")

    thread = in_thread(write)
    assert looked.wait(patience())
    events_published.disconnect(receive)
    published("a")
    events_published.connect(receive)
    written.set()
    thread.join(patience())
    assert status() == {"a": ("1", 1)}
    run("status")
    assert status() == {"a": ("1 2 3", 3)}

    def write_more():
        with transaction.atomic(using=alias):
            for type in ("made", "other", "other", "made"):
                published("a", type=type)

    in_thread(write_more).join(patience())
    assert status() == {"a": ("1 2 3 4 7", 7)}


@on("mariadb")
def test_a_writer_at_repeatable_read_locks_no_other_stream(
    alias, published, in_thread, monkeypatch
):
    declare(StatusOf, "status", types=["made"], inline=True)
    published("l", "m")
    monkeypatch.setitem(
        connections.settings[alias]["OPTIONS"], "isolation_level", "repeatable read"
    )
    written, done = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic(using=alias):
            published("m")
            written.set()
            done.wait(patience())

    in_thread(hold)
    try:
        assert written.wait(patience())
        with connections[alias].cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        published("l")
    finally:
        done.set()
        connections[alias].close()


@on("mariadb")
def test_streams_that_begin_side_by_side_at_repeatable_read(
    alias, published, status, in_thread, monkeypatch
):
    declare(StatusOf, "status", inline=True)
    with connections[alias].cursor() as cursor:
        cursor.execute("TRUNCATE TABLE projections_status")  # no deleted rows stand between
    published("a", "z")
    monkeypatch.setitem(
        connections.settings[alias]["OPTIONS"], "isolation_level", "repeatable read"
    )
    both = threading.Barrier(2, timeout=patience())
    set_failpoint("view_read", both.wait)
    for thread in [in_thread(lambda s=s: published(s, s)) for s in ("m", "n")]:
        thread.join(patience())
    assert status() == {"a": ("1", 1), "z": ("1", 1), "m": ("1 2", 2), "n": ("1 2", 2)}


def test_a_row_that_was_there_before_its_stream(alias, published, status):
    declare(StatusOf, "status", inline=True)
    Status.objects.using(alias).create(stream="a", path="0 ")
    published("a")
    assert status() == {"a": ("0 1", 1)}
