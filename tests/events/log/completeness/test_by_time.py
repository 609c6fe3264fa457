"""A reader by time loses events that commit late; with the check only the last ones of a stream."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import cycle

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish, publish_many, subscriber
from outbox_app.events.exceptions import DamagedCursor, InvalidSubscriber
from outbox_app.events.log.filter import EventFilter
from outbox_app.events.log.newevent import NewEvent, slice_of
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.windows.time import TimeState, TimeWindow
from outbox_app.events.models import Cursor, DeliveredVersion, Event
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.events.subscriptions.control import repartition
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.skips import skip_event
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.events.log.conformance import read_all
from tests.events.log.sessions import Session
from tests.faults.tools import on

pytestmark = pytest.mark.django_db(transaction=True)

#: SQLite has one writer at a time: nothing commits late there.
servers = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)


def plain(alias):
    """The naive reader: by time, without the check. Returns what it reads when it is called."""
    reader = LogReader(Event, using=alias, by_time=True)
    state, found = reader.window.start(0), []

    def read():
        nonlocal state
        more = True
        while more:
            events, page = reader.read(state, 2)
            found.extend(f"{event.stream}:{event.version}" for event in events)
            state, more = page.state, page.more
        return found

    return read


@servers
def test_late_commits(alias, reading):
    read, reader = plain(alias), reading(by_time=True)
    streams = [f"s{n}" for n in range(10)]
    with Session(alias) as late, Session(alias) as soon:
        late.begin()
        for stream in streams:
            late.publish(stream)  # written first, committed last
        soon.begin().publish("t", 3)
        soon.commit()
        read()
        reader.poll()
        late.commit()
        for stream in streams[:7]:  # three of them never get another event
            soon.begin().publish(stream)
            soon.commit()
    read()
    reader.poll()
    committed = set(Event.objects.using(alias).values_list("stream", "version"))
    lost = {f"{s}:{v}" for s, v in committed}.difference(read())
    assert lost == {f"{stream}:1" for stream in streams}
    missed = {f"{s}:{v}" for s, v in committed}.difference(reader.handled)
    assert missed == {f"{stream}:1" for stream in streams[7:]}  # counted: nothing can tell
    assert len(reader.handled) == len(set(reader.handled))
    for stream in streams[:7]:
        assert reader.handled.index(f"{stream}:1") < reader.handled.index(f"{stream}:2")
    assert reader.gaps == []
    # Whenever the next event of such a stream comes, so does what was late.
    with transaction.atomic(using=alias):
        publish_many(NewEvent(stream, "made") for stream in streams[7:])
    reader.start().poll()
    assert len(reader.handled) == len(committed) + 3


@servers
def test_late_commits_of_a_whole_stream_after_a_restart(alias, reading):
    reader = reading(by_time=True, batch_size=2)
    with Session(alias) as late, Session(alias) as soon:
        soon.begin().publish("a", 2)
        soon.commit()
        reader.poll()
        late.begin().publish("a", 5)
        soon.begin().publish("b")
        soon.commit()
        reader.start().poll()
        late.commit()
        soon.begin().publish("a")
        soon.commit()
    reader.start().poll()
    assert reader.handled == [*("a:1", "a:2", "b:1"), *(f"a:{v}" for v in range(3, 9))]
    assert set(DeliveredVersion.objects.using(alias).values_list("stream", "version")) == {
        ("a", 8),
        ("b", 1),
    }


def test_pages_of_one_time_are_read_to_their_end(alias, reading):
    reader = LogReader(Event, using=alias, by_time=True)
    reading(by_time=True)
    with transaction.atomic(using=alias):
        publish_many(NewEvent(f"s{n}", "made") for n in range(5))
    Event.objects.using(alias).update(recorded_at=OLD)
    publish_one(alias, "later")
    state, bounds, sizes = reader.window.start(0), [], []
    more = True
    while more:
        events, page = reader.read(state, 2)
        state, more = page.state, page.more
        sizes.append(len(events))
        bounds.append(bool(state.until))
    # The bound is the largest time of the last page, until a page is not full.
    assert sizes == [2, 2, 1, 1]
    assert bounds == [True, True, False, False]
    assert reader.read(state, 2).events == []
    assert TimeState.load(state.dump()) == state


def test_a_filter_passes_nothing_that_a_full_page_has_left(alias, reading):
    reading(by_time=True)
    for day in range(1, 6):
        publish_one(alias, f"s{day}")
        Event.objects.using(alias).filter(stream=f"s{day}").update(
            recorded_at=OLD.replace("01-01", f"01-0{day}")
        )
    only = EventFilter(types=["made"])
    with closing(LogReader(Event, using=alias, by_time=True, only=only)) as reader:
        found, _ = read_all(reader, reader.window.start(0), 2)
    assert found == [f"s{day}1" for day in range(1, 6)]


OLD = "2020-01-01 00:00:00+00:00"


def publish_one(alias, stream):
    with transaction.atomic(using=alias):
        publish(stream, "made")


def test_a_second_behind(alias, log):
    with closing(LogReader(Event, using=alias, by_time=True)) as reader:
        assert TimeWindow.behind == 1.0
        start = reader.window.start(0)
        publish_one(alias, "old")
        old = Event.objects.using(alias).filter(stream="old")
        old.update(recorded_at=OLD)
        publish_one(alias, "young")
        # It was written this moment; were it read, it would be a second too early.
        log.age("young", 1, seconds=-3600)
        assert [event.stream for event in reader.read(start, 10).events] == ["old"]


def test_partitions_filters_and_starts(alias, reading, monkeypatch):
    reading(by_time=True)
    with closing(LogReader(Event, using=alias, by_time=True)) as reader:
        publish_one(alias, "a")
        [first] = Event.objects.using(alias).values_list("id", flat=True)
        Event.objects.using(alias).update(recorded_at=OLD)
        with monkeypatch.context() as patch:
            patch.setattr(TimeWindow, "behind", 1.0)
            begun, after = reader.window.start(None), reader.window.start(first)
        assert reader.read(after, 5).events == []
        publish_one(alias, "b")
        assert [e.stream for e in reader.read(begun, 5).events] == ["b"]
        assert [e.stream for e in reader.read(after, 5).events] == ["b"]
        assert begun.run != after.run
        none = EventFilter(parts=1024, part=(Event.objects.using(alias).first().slice + 1) % 1024)
        # The time is passed though no row was wanted: it is not looked through for ever.
        page = reader.window.read(after, columns=["id"], limit=5, only=none)
        assert page.rows == []
        assert page.state.at > after.at
        assert not page.more


def test_from_now_on_what_was_before_counts_as_handled(alias, reading, monkeypatch):
    publish_one(alias, "a")
    Event.objects.using(alias).update(recorded_at=OLD)
    reader = reading(by_time=True, start="now")
    with monkeypatch.context() as patch:
        patch.setattr(TimeWindow, "behind", 1.0)
        reader.poll()
    publish_one(alias, "a")
    assert reader.poll().handled == ["a:2"]
    assert reader.gaps == []


def test_a_replay_begins_anew(alias, reading):
    reader = reading(by_time=True)
    publish_one(alias, "a")
    publish_one(alias, "a")
    assert reader.poll().handled == ["a:1", "a:2"]
    fresh = reader.partition._readers[0].window.start(0)
    Cursor.objects.using(alias).update(state=fresh.dump(), revision=100)
    assert reader.start().poll().handled == ["a:1", "a:2", "a:1", "a:2"]
    assert DeliveredVersion.objects.using(alias).count() == 1


def test_four_partitions(alias, reading):
    reading()
    seen = []
    subscriber("four", partitions=4, by_time=True, on_gap="park")(seen.extend)
    streams = [f"s{n}" for n in range(20)]
    for _ in range(2):
        with transaction.atomic(using=alias):
            publish_many(NewEvent(stream, "made") for stream in streams)
    assert Runner([subscriber_named("four")]).run(once=True) == 40
    assert sorted((e.stream, e.version) for e in seen) == sorted(
        (s, v) for s in streams for v in (1, 2)
    )


def test_from_a_replica(alias, reading):
    """The alias that is read from differs from the one that holds the cursors and the effects."""
    connections["replica"] = connections.create_connection(alias)
    try:
        reader = reading(by_time=True, read_from="replica")
        publish_one(alias, "a")
        with CaptureQueriesContext(connections["replica"]) as queries:
            assert reader.poll().handled == ["a:1"]
        statements = [each["sql"] for each in queries]
        assert statements
        writes = ("INSERT", "UPDATE", "DELETE")
        assert not [sql for sql in statements if sql.lstrip().startswith(writes)]
        assert not any("outbox_cursor" in sql for sql in statements)
    finally:
        connections["replica"].close()
        del connections["replica"]


def test_a_damaged_state_is_refused(alias, reading):
    for field, value in (("at", "'; DROP TABLE x"), ("since_at", "now()"), ("id", -1)):
        values = {**json.loads(TimeState().dump()), field: value}
        with pytest.raises(DamagedCursor):
            TimeState.load(json.dumps(values))


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_declarations_that_cannot_work(alias):
    with pytest.raises(InvalidSubscriber, match='on_gap="park"'):
        subscriber("s", by_time=True)
    with pytest.raises(InvalidSubscriber, match="needs by_time"):
        subscriber("s", on_gap="park", read_from="replica")
    with pytest.raises(InvalidSubscriber, match="on_gap must be one of"):
        subscriber("s", on_gap="ignore")


@servers
@pytest.mark.parametrize(("before", "after"), [(4, 6), (4, 2), (2, 4)])
def test_another_number_of_partitions_with_late_commits(alias, reading, before, after):
    reading()
    seen, streams = [], [f"s{n}" for n in range(12)]

    def declare(partitions):
        declared._subscribers.pop("parts", None)
        options = {"partitions": partitions, "by_time": True, "on_gap": "park"}
        subscriber("parts", **options)(seen.extend)
        return subscriber_named("parts")

    with Session(alias) as late, Session(alias) as soon:
        Runner([declare(before)]).run(once=True)
        late.begin()
        for stream in streams:
            late.publish(stream)
        soon.begin().publish("t")
        soon.commit()
        Runner([declare(before)]).run(once=True)
        late.commit()
    declare(after)
    assert repartition("parts", using=alias) == (before, after)
    with transaction.atomic(using=alias):
        publish_many(NewEvent(stream, "made") for stream in [*streams, "t"])
    Runner([subscriber_named("parts")]).run(once=True)
    found = [(event.stream, event.version) for event in seen]
    assert sorted(found) == sorted((s, v) for s in [*streams, "t"] for v in (1, 2))


@pytest.fixture
def skipping(reading, log, alias):
    """Return a reader whose handler failed on a version of a stream, which was then skipped."""

    def skip(version):
        reader = reading(by_time=True)
        log.add("bad", version)
        log.age("bad", version, seconds=10)
        reader.broken = {"bad"}
        reader.later(5)
        failed = Cursor.objects.using(alias).get().failed_event
        assert failed["version"] == version
        skip_event("reads", failed["position"], by="ann", reason="bad", using=alias)
        reader.broken = set()
        return reader

    return skip


def test_what_was_skipped_is_not_handled_after_others_that_commit_late(skipping, log):
    reader = skipping(1)
    for stream in ("c", "d", "e"):
        log.add(stream, 1)
        log.age(stream, 1, seconds=20)
    assert reader.start().later(60).handled == ["c:1", "d:1", "e:1"]


def test_a_version_that_commits_late_before_one_that_was_skipped_is_handled(skipping, log):
    """The skip is of one event: it does not count the stream as handled up to there."""
    reader = skipping(2)
    log.add("bad", 1)
    log.age("bad", 1, seconds=20)
    log.add("bad", 3)
    assert reader.start().later(60).handled == ["bad:1", "bad:3"]


def test_a_replica_that_is_behind(alias, reading, log):
    """What was written before a page was read comes to the replica after that, in order."""
    reading(by_time=True)
    only = EventFilter(parts=2, part=slice_of("late") % 2)
    with closing(LogReader(Event, using=alias, only=only, by_time=True)) as reader:
        log.add("early", 1)
        log.age("early", 1, seconds=60)
        state = reader.read(reader.window.start(0), 10).page.state
        log.add("late", 1)
        log.age("late", 1, seconds=30)
        events, page = reader.read(state, 10)
        assert [event.stream for event in events] == ["late"]
        assert reader.read(page.state, 10).events == []


@on("postgres")
def test_an_hour_that_comes_twice(alias, reading, log):
    """In the zone of a session; that of the next process is another one."""
    reading(by_time=True)
    moments = [datetime(2025, 10, 26, 0, 30), datetime(2025, 10, 26, 0, 45)]
    moments += [datetime(2025, 10, 26, 1, 10), datetime(2025, 10, 26, 12)]
    for n, moment in enumerate(moments):
        log.add(f"s{n}", 1)
        rows = Event.objects.using(alias).filter(stream=f"s{n}")
        rows.update(recorded_at=moment.replace(tzinfo=UTC))
    zones = cycle(["Europe/Vienna", "Europe/Vienna", "America/New_York", "Asia/Tokyo"])
    try:
        with closing(LogReader(Event, using=alias, by_time=True)) as reader:
            found, state, more = [], reader.window.start(0), True
            while more:
                reader.run(f"SET TIME ZONE '{next(zones)}'", [])
                events, page = reader.read(reader.load(state.dump()), 1)
                state, more = page.state, page.more
                found += [event.stream for event in events]
    finally:
        connections[alias].close()
    assert found == ["s0", "s1", "s2", "s3"]


@on("mariadb")
@pytest.mark.parametrize("zone", ["+05:30", "-05:00"])
def test_a_project_without_time_zones(alias, log, settings, zone):
    """Its times are in the zone of the sessions, as ``DatabaseNow`` is then."""
    settings.USE_TZ = False
    try:
        with closing(LogReader(Event, using=alias, by_time=True)) as reader:
            reader.run(f"SET SESSION time_zone = '{zone}'", [])
            state = reader.window.start(0)
            log.add("old", 1)
            log.events.update(recorded_at=DatabaseNow() - timedelta(seconds=30))
            log.add("young", 1)
            log.events.filter(stream="young").update(recorded_at=DatabaseNow())
            assert [event.stream for event in reader.read(state, 10).events] == ["old"]
    finally:
        connections[alias].close()
