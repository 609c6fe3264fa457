"""Writers that race for one message id or one expected version, at any isolation level."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.events import ANY, NO_STREAM, NewEvent, publish, publish_many
from outbox_app.events.exceptions import MessageIdConflict, VersionConflict
from outbox_app.events.log import heads
from outbox_app.events.models import Event, StreamHead
from tests.faults.tools import on
from tests.patience import eventually, patience
from tests.servers.mysql import MARIADB

from .sessions import Session, execute

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.fixture
def isolated(alias):
    """``isolated("repeatable read")``: set the level as OPTIONS["isolation_level"] does."""
    options = connections.settings[alias]["OPTIONS"]
    before = dict(options)

    def make(level: str) -> None:
        if level and alias == "postgres":
            from psycopg import IsolationLevel

            options["isolation_level"] = IsolationLevel[level.upper().replace(" ", "_")]
        elif level:
            options["isolation_level"] = level

    yield make
    options.clear()
    options.update(before)


def both(alias, first, second, look=lambda: None):
    """Run ``second`` in a thread's transaction that has looked, while the one of ``first`` is open.

    Returns what became of ``second``.
    """
    found, looked, ready = [], threading.Event(), threading.Event()

    def run():
        try:
            with transaction.atomic(using=alias):
                look()
                looked.set()
                ready.wait(patience())
                found.append(second())
        except Exception as error:
            found.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run)
    thread.start()
    assert looked.wait(patience())
    with transaction.atomic(using=alias):
        first()
        ready.set()
        thread.join(0.3)
    thread.join(patience())
    return found[0]


#: Sessions that wait for a lock.
WAITING = {
    "postgres": "SELECT pid FROM pg_locks WHERE NOT granted",
    MARIADB: "SELECT id FROM information_schema.processlist "
    "WHERE db = DATABASE() AND command = 'Query' AND info LIKE 'INSERT%%outbox_stream%%'",
}
LEVELS = ["", "repeatable read"]


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("expected", [ANY, NO_STREAM])
def test_one_message_at_the_same_moment(alias, isolated, level, expected):
    """The second one is given the event of the first, as if it had come a moment later."""
    isolated(level)
    id = uuid4()
    options = {"message_id": id, "expected_version": expected, "using": alias}
    result = both(
        alias,
        lambda: publish("a", "made", **options),
        lambda: publish("a", "made", **options),
        lambda: StreamHead.objects.using(alias).exists(),
    )
    if not level or (alias == MARIADB and expected is ANY):
        assert result == Event.objects.using(alias).get()
    elif alias == MARIADB:  # its view of the events is older
        assert isinstance(result, VersionConflict)
        assert result.current == 1
    else:
        assert isinstance(result, OperationalError)  # "could not serialize access"
    assert StreamHead.objects.using(alias).get().version == 1
    assert Event.objects.using(alias).get().message_id == id


@on("postgres", "mariadb")
def test_one_message_at_the_same_moment_outside_a_transaction(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    id = uuid4()
    with Session(alias) as other, Session(alias) as mine:
        other.begin().publish("a", message_id=id)
        ours = mine.thread.submit(
            lambda: publish("a", "happened", {"n": 0}, message_id=id, using=alias)
        )
        eventually(lambda: execute(alias, WAITING[alias]))
        other.commit()
        assert ours.result(patience()) == Event.objects.using(alias).get()
    assert StreamHead.objects.using(alias).get().version == 1


@on("postgres", "mariadb")
def test_some_messages_at_the_same_moment(alias):
    """Only what is new is written, behind what the other one has written."""
    first, second = (NewEvent("a", "made", message_id=uuid4()) for _ in range(2))
    result = both(
        alias,
        lambda: publish_many([first], using=alias),
        lambda: publish_many([first, second], using=alias),
    )
    assert [event.version for event in result] == [1, 2]
    assert len({event.pk for event in result}) == 2
    assert Event.objects.using(alias).count() == 2


@on("postgres", "mariadb")
def test_one_message_id_for_two_events_at_the_same_moment(alias):
    id = uuid4()
    result = both(
        alias,
        lambda: publish("a", "made", message_id=id, using=alias),
        lambda: publish("b", "made", message_id=id, using=alias),
    )
    assert isinstance(result, MessageIdConflict)
    assert StreamHead.objects.using(alias).get().stream == "a"  # the other head went back


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", LEVELS)
def test_of_two_with_one_expectation_one_wins(alias, isolated, level):
    """The other one gets the version that there is, and not the one in its view."""
    with transaction.atomic(using=alias):
        publish("a", "made", using=alias)
    isolated(level)
    result = both(
        alias,
        lambda: publish("a", "made", expected_version=1, using=alias),
        lambda: publish("a", "made", expected_version=1, using=alias),
        lambda: StreamHead.objects.using(alias).exists(),
    )
    if level and alias == "postgres":
        assert isinstance(result, OperationalError)
    else:
        assert isinstance(result, VersionConflict)
        assert result.current == 2
    assert Event.objects.using(alias).count() == 2


@on("mariadb")
@pytest.mark.parametrize("level", LEVELS)
def test_two_that_expect_no_stream_where_there_is_one(alias, isolated, level, monkeypatch):
    """Each gets its conflict, and continues in its transaction with the version it was told."""
    with transaction.atomic(using=alias):
        publish("a", "made", using=alias)
    isolated(level)
    refused, look = threading.Barrier(2), heads.current_version

    def current_version(*args, **options):
        with suppress(threading.BrokenBarrierError):  # the other one may wait for this one
            refused.wait(0.3)
        return look(*args, **options)

    monkeypatch.setattr("outbox_app.events.log.publish.current_version", current_version)

    def create():
        try:
            with transaction.atomic(using=alias):
                with pytest.raises(VersionConflict) as conflict:
                    publish("a", "made", expected_version=NO_STREAM, using=alias)
                at = conflict.value.current
                return publish("a", "made", expected_version=at, using=alias).version
        finally:
            connections[alias].close()

    with ThreadPoolExecutor() as threads:
        versions = [threads.submit(create) for _ in range(2)]
        assert sorted(each.result(patience()) for each in versions) == [2, 3]


@on("postgres")
def test_an_event_that_waited_for_its_stream_has_the_time_at_which_it_was_written(alias):
    def one():
        with transaction.atomic(using=alias):
            publish("s", "made", using=alias)

    with Session(alias) as ahead, Session(alias) as behind:
        ahead.begin().publish("s")
        published = behind.thread.submit(one)
        eventually(lambda: execute(alias, WAITING[alias]))
        [(now,)] = execute(alias, "SELECT clock_timestamp()")
        ahead.commit()
        published.result(patience())
    assert Event.objects.using(alias).latest("id").recorded_at > now
