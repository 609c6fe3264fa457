"""What a push applies to a row, and what it leaves to the pull."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections.push import receive
from outbox_app.events.signals import events_published
from tests.events.projections.declared import StatusOf, declare
from tests.events.projections.models import Status
from tests.faults.tools import on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def test_a_view_that_has_not_caught_up_is_left_to_the_pull(alias, published, run, status):
    published("a", "a", "b")
    declare(StatusOf, "status", push=True)
    published("a", "c")
    assert status() == {"c": ("1", 1)}
    run("status")
    assert status() == {"a": ("1 2 3", 3), "b": ("1", 1), "c": ("1", 1)}
    published("a")
    assert status()["a"] == ("1 2 3 4", 4)


def test_types_that_are_not_asked_for_do_not_hold_it_up(alias, published, status):
    declare(StatusOf, "status", types=["made"], push=True)
    for type in ("other", "made", "other", "made"):
        published("a", type=type)
    with transaction.atomic(using=alias):
        publish_many(NewEvent("a", type) for type in ("other", "made", "other", "made"))
    assert status() == {"a": ("2 4 6 8", 8)}


def test_a_key_that_is_not_the_stream_is_not_pushed(alias, published, status, caplog):
    declare(StatusOf, "status", push=True, key=lambda self, event: event.stream[0])
    published("ab")
    assert "so they cannot be pushed. Leave push out" in caplog.text
    assert status() == {}


def test_the_pull_touches_no_row_that_is_applied(alias, published, run, status):
    applied = []

    def apply(self, event, row):
        applied.append(event.version)
        return StatusOf.apply(self, event, row)

    declare(StatusOf, "status", push=True, apply=apply)
    published("a", "a")
    run("status")
    assert applied == [1, 2]
    assert Cursor.objects.using(alias).get().handled == 2


@on("mariadb")
def test_an_event_that_is_newer_than_the_snapshot_of_the_writer(
    alias, published, run, status, in_thread, monkeypatch
):
    """It was published by a process whose code has no projection yet."""
    declare(StatusOf, "status", types=["made"], push=True)
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


def test_a_row_that_was_there_before_its_stream(alias, published, status):
    declare(StatusOf, "status", push=True)
    Status.objects.using(alias).create(stream="a", path="0 ")
    published("a")
    assert status() == {"a": ("0 1", 1)}


def test_a_handler_with_a_method_push_is_no_projection(alias, published, caplog):
    class Search:
        __qualname__ = "Search"

        def push(self, event): ...

        def __call__(self, events): ...

    subscriber("search")(Search())
    published("a")
    assert caplog.text == ""
