"""``on_error="park"`` and an error that comes at COMMIT, as of a deferred foreign key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connections

from outbox_app.events import subscriber
from outbox_app.events.models import Cursor, ParkedStream
from outbox_app.events.subscriptions.control import release
from tests.faults.tools import on

pytestmark = pytest.mark.django_db(transaction=True)

STREAMS = [f"s{number}" for number in range(11)]
#: The runs in which two streams of one page are parked, and the rest is handled.
RUNS = 8


@pytest.fixture
def owner(alias: str) -> Iterator[ContentType]:
    """Declares "grants": an event makes a row, whose foreign key is this row, or one that misses.

    The key is deferred to COMMIT on PostgreSQL and SQLite, as Django makes it; MariaDB has no such
    keys.
    """
    row = ContentType.objects.using(alias).create(app_label="test", model="owner")

    @subscriber("grants", on_error="park")
    def handle(events):
        for event in events:
            Permission.objects.using(alias).create(
                content_type_id=event.data.get("owner", row.pk),
                codename=f"{event.stream}@{event.version}",
            )

    yield row
    Permission.objects.using(alias).filter(content_type_id__gte=row.pk).delete()
    ContentType.objects.using(alias).filter(id__gte=row.pk).delete()


@pytest.fixture
def missing(owner: ContentType) -> int:
    """A key of no row."""
    return owner.pk + 100


@pytest.fixture
def granted(alias: str, owner: ContentType) -> Callable[[], list[str]]:
    """``granted()``: the effects that are committed."""
    rows = Permission.objects.using(alias).order_by().filter(content_type_id__gte=owner.pk)
    return lambda: sorted(rows.values_list("codename", flat=True))


def parked(alias: str) -> list[tuple[str, int]]:
    rows = ParkedStream.objects.using(alias).order_by("stream")
    return list(rows.values_list("stream", "version"))


@pytest.mark.parametrize("at", [[0], [4, 7], [10]], ids=["first", "two", "last"])
def test_the_streams_at_fault_are_parked(alias, published, run, missing, granted, at):
    bad = [STREAMS[number] for number in at]
    for stream in STREAMS:
        published(stream, data={"owner": missing} if stream in bad else {})
    for _ in range(RUNS):
        run("grants")
    assert parked(alias) == [(stream, 1) for stream in bad]
    assert granted() == sorted(f"{stream}@1" for stream in STREAMS if stream not in bad)
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.error, cursor.failures, cursor.failed_event) == ("", 0, None)
    assert cursor.handled == len(STREAMS) - len(bad)
    row = ParkedStream.objects.using(alias).first()
    assert row.error.startswith("IntegrityError")
    assert row.failed_event["stream"] == bad[0]
    assert "IntegrityError" in row.failed_event["traceback"]


def test_a_released_stream_that_fails_again_stays_parked(alias, published, run, missing, granted):
    published("a", data={"owner": missing})
    published("b")
    for _ in range(RUNS):
        run("grants")
    published("a", "b")
    run("grants")
    release("grants", using=alias)
    run("grants")
    assert parked(alias) == [("a", 1)]
    ContentType.objects.using(alias).create(id=missing, app_label="test", model="late")
    release("grants", using=alias)
    run("grants")
    assert parked(alias) == []
    assert granted() == ["a@1", "a@2", "b@1", "b@2"]


@on("default")
def test_a_row_that_was_damaged_before_parks_nothing(alias, published, run, missing, granted):
    """The database has a broken key already: no event of this page is at fault for that one."""
    with connections[alias].constraint_checks_disabled():
        Permission.objects.using(alias).create(content_type_id=missing + 1, codename="damaged")
    published("s0", data={"owner": missing})
    published("s1", "s2")
    for _ in range(RUNS):
        run("grants")
    assert parked(alias) == [("s0", 1)]
    assert granted() == ["damaged", "s1@1", "s2@1"]
