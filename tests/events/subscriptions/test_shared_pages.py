"""Partitions of one process share a page: each event is handled once, in order, if any one is late.

Each test counts the rows that handlers have committed, so it sees lost and doubled effects. The
tests run on each database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import pytest
from django.db import connections

from outbox_app.events import subscriber
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.cursors import SharedPages
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.failpoints import set_failpoint
from outbox_app.models import Incident
from tests.events.log.sessions import Session
from tests.faults.tools import on

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]

PARTS = 4


def part_of(stream: str, parts: int = PARTS) -> int:
    return slice_of(stream) % parts


def streams(part: int, wanted: int = 1) -> list[str]:
    """Streams of one partition of four."""
    ours = (f"s{n}" for n in count() if part_of(f"s{n}") == part)
    return list(islice(ours, wanted))


ALL = [stream for part in range(PARTS) for stream in streams(part, 2)]


class Handled:
    """A subscription with four partitions, whose handler writes down what it is given."""

    def __init__(self, alias: str, **options: Any) -> None:
        self.alias = alias
        self.pages: list[list[str]] = []
        #: Called with each page, by the stream of its first event; may raise.
        self.before: dict[str, Callable[[], None]] = {}
        options = {"partitions": PARTS, **options}
        subscriber("shared", **options)(self.handle)
        self.runner = Runner([subscriber_named("shared")], lease_seconds=600.0)
        self.worker = self.runner.workers[0]

    def handle(self, events: list[Any]) -> None:
        rows = [
            Incident(kind="unknown", detail=e.stream, first_id=e.version, last_id=e.id)
            for e in events
        ]
        Incident.objects.using(self.alias).bulk_create(rows)
        for stream in dict.fromkeys(event.stream for event in events):
            if step := self.before.get(stream):
                step()
        self.pages.append([event.stream for event in events])

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.runner.run_once()

    def drop(self, part: int) -> None:
        self.worker._drop([part])

    def take(self, part: int) -> None:
        self.worker.partitions[part] = Partition(
            self.worker.subscriber,
            part,
            batch_size=self.worker.batch_size,
            shared=self.worker._shared,
        )

    def wait(self) -> None:
        """Nobody rests any longer."""
        for partition in self.worker.partitions.values():
            partition._rest_until = float("-inf")

    def finish(self) -> None:
        while self.runner.run_once():
            pass

    def assert_exact(self) -> None:
        """Every committed event has its effect once, in the order of its stream."""
        rows = Incident.objects.using(self.alias).order_by("id").values_list("detail", "first_id")
        wanted = Event.objects.using(self.alias).values_list("stream", "version")
        assert Counter(rows) == Counter(wanted)
        latest: dict[str, int] = {}
        for stream, version in rows:
            assert version > latest.get(stream, 0), (stream, version)
            latest[stream] = version


@pytest.fixture
def handled(alias, request):
    made: list[Handled] = []

    def make(**options: Any) -> Handled:
        made.append(Handled(alias, **options))
        return made[-1]

    yield make
    set_failpoint("committed", None)
    for each in made:
        each.runner._leave()


@pytest.fixture
def asked(alias):
    """``asked(Model)``: how many statements have read the model's table."""
    sent: list[str] = []

    def note(execute, sql, params, many, context):
        sent.append(sql)
        return execute(sql, params, many, context)

    def count_of(model: Any) -> int:
        table = connections[alias].ops.quote_name(model._meta.db_table)
        return sum(f"FROM {table} WHERE" in each.replace("\n", " ") for each in sent)

    with connections[alias].execute_wrapper(note):
        yield count_of


@pytest.fixture
def pages_read(monkeypatch):
    """A list with the partitions of each page that was read from a log."""
    read: list[Any] = []
    page = LogReader.page

    def counting(self, state, limit, *, columns, only):
        read.append(only.part)
        return page(self, state, limit, columns=columns, only=only)

    monkeypatch.setattr(LogReader, "page", counting)
    return read


def test_one_page_is_read_for_all(handled, published, pages_read):
    shared = handled()
    published(*ALL)
    shared.turn()
    assert pages_read == [tuple(range(PARTS))]
    published(*ALL, *ALL)
    shared.turn()
    assert len(pages_read) == 2
    shared.assert_exact()


def test_no_page_is_longer_than_asked_for(handled, published, pages_read):
    """Nearly all events are of one partition: the shared page is shortened."""
    shared = handled(batch_size=5)
    published(*streams(1) * 23, *ALL)
    shared.finish()
    assert max(map(len, shared.pages)) == 5
    shared.assert_exact()


def test_one_is_behind(handled, published, pages_read):
    """Its handler fails: the others continue, together; then it reads what they have passed."""
    shared, [slow] = handled(), streams(2)
    shared.before[slow] = lambda: (_ for _ in ()).throw(ValueError("not now"))
    published(*ALL)
    shared.turn()
    shared.worker.partitions[2]._rest_until = float("inf")
    pages_read.clear()
    published(*ALL)
    shared.turn(2)
    done = set(Incident.objects.using(shared.alias).values_list("detail", "first_id"))
    assert done == {(s, v) for s in ALL for v in (1, 2) if part_of(s) != 2}
    assert set(pages_read) == {(0, 1, 3)}
    shared.before.clear()
    shared.wait()
    shared.finish()
    shared.assert_exact()


def test_one_has_a_parked_stream(handled, published):
    shared, [bad] = handled(on_error="park"), streams(3)

    def fail() -> None:
        raise ValueError("bad")

    shared.before[bad] = fail
    published(*ALL)
    for _ in range(5):
        shared.wait()
        shared.turn()
    parked = ParkedStream.objects.using(shared.alias).get()
    assert (parked.stream, parked.version) == (bad, 1)
    published(*ALL)
    shared.turn(2)
    assert Incident.objects.using(shared.alias).count() == 2 * (len(ALL) - 1)
    shared.before.clear()
    control.release(parked.subscription, [parked.stream], using=shared.alias)
    shared.finish()
    shared.assert_exact()


def test_a_parked_stream_that_fills_pages_is_passed(handled, published):
    """No event of them is handled, and their state is stored all the same."""
    shared, [bad] = handled(on_error="park", batch_size=5), streams(3)
    shared.before[bad] = lambda: (_ for _ in ()).throw(ValueError("bad"))
    for _ in range(2):
        published(*ALL)
        for _ in range(5):
            shared.wait()
            shared.turn()
    published(*[bad] * 30, *ALL)
    shared.turn(10)
    assert Incident.objects.using(shared.alias).count() == 3 * (len(ALL) - 1)


def test_one_is_taken_by_another_process_in_the_middle(handled, published):
    """Partition 3 lost its lease while the handler of partition 0 ran; it comes back later."""
    shared = handled()

    def lose() -> None:
        set_failpoint("committed", None)
        shared.drop(3)
        other = Partition(shared.worker.subscriber, 3)
        other.run_once()
        other.close()

    set_failpoint("committed", lose)
    published(*ALL)
    shared.turn()
    shared.assert_exact()
    published(*ALL)
    shared.take(3)
    shared.finish()
    shared.assert_exact()


def test_one_that_has_lost_its_lease_is_not_run(handled, published):
    """Partition 3 lost it while the handler of partition 0 ran."""
    shared = handled()
    set_failpoint("committed", lambda: (set_failpoint("committed", None), shared.drop(3)))
    published(*ALL)
    shared.turn()
    assert {part_of(s) for page in shared.pages for s in page} == {0, 1, 2}


def test_one_is_handled_by_two(handled, published):
    """The lease has failed, and nothing says so: the cursor does, and the page is dropped."""
    shared = handled()

    def overtake() -> None:
        set_failpoint("committed", None)
        other = Partition(shared.worker.subscriber, 3)
        other.run_once()
        other.close()

    set_failpoint("committed", overtake)
    published(*ALL)
    shared.turn()
    shared.assert_exact()
    published(*ALL)
    shared.finish()
    shared.assert_exact()


def test_one_is_new_and_one_comes_back_in_the_same_turn(handled, published):
    shared, [first] = handled(), streams(0)
    published(*ALL)
    shared.turn()

    def restart() -> None:
        shared.before.clear()
        for part in (1, 2):
            shared.drop(part)
            shared.take(part)

    shared.before[first] = restart
    published(*ALL)
    shared.turn()
    shared.finish()
    shared.assert_exact()


def test_one_without_events_is_not_written_and_loses_none(handled, published, pages_read):
    """It moves with the others in memory, and reads together with them."""
    shared, ours = handled(), [s for s in ALL if part_of(s) != 1]
    shared.turn()
    published(*ALL)
    shared.turn()
    cursors = Cursor.objects.using(shared.alias)
    before = cursors.get(partition=1).revision
    for _ in range(3):
        published(*ours)
        shared.turn()
    assert cursors.get(partition=1).revision == before
    pages_read.clear()
    published(*ALL)
    shared.turn()
    assert pages_read == [tuple(range(PARTS))]
    shared.assert_exact()
    published(*ALL)
    for part in range(PARTS):  # as after a crash: from the rows
        shared.drop(part)
    for part in range(PARTS):
        shared.take(part)
    shared.finish()
    shared.assert_exact()


def test_one_without_events_waits_where_nothing_was_stored(handled, published):
    """The only one with events fails: the state after its page is on no disk."""
    shared, [only] = handled(), streams(0)
    published(*ALL)
    shared.turn()
    before = {part: each.cursors[0].state for part, each in shared.worker.partitions.items()}
    shared.before[only] = lambda: (_ for _ in ()).throw(ValueError("not now"))
    published(only)
    shared.turn(2)
    others = {part: shared.worker.partitions[part].cursors[0].state for part in (1, 2, 3)}
    assert all(others[part] == before[part] for part in others)
    shared.before.clear()
    shared.wait()
    published(*ALL)
    shared.finish()
    shared.assert_exact()


def test_a_filter_that_drops_all_is_passed(handled, published, alias, monkeypatch):
    """Nobody has an event in a page that has more after it: all are moved, and written."""
    for name in ("sqlite.MAX_POSITIONS", "postgres.MAX_POSITIONS", "mysql.MAX_ROWS"):
        monkeypatch.setattr(f"outbox_app.events.log.windows.{name}", 10)
    shared = handled(types=["wanted"], batch_size=1)
    published(*ALL * 10)
    published(*ALL, type="wanted")
    shared.finish()
    assert Incident.objects.using(alias).count() == len(ALL)


def test_those_beside_a_busy_one_are_not_written(handled, published, alias, pages_read):
    shared = handled(batch_size=5)
    published(*streams(1) * 23)
    shared.turn(4)
    revisions = dict(Cursor.objects.using(alias).values_list("partition", "revision"))
    assert revisions == {0: 0, 1: 4, 2: 0, 3: 0}
    assert set(pages_read) == {tuple(range(PARTS))}
    shared.finish()
    shared.assert_exact()


@on("postgres", "mariadb")
def test_late_commits(handled, published, alias):
    """Positions commit out of order, and some never: of several partitions, in one transaction."""
    shared = handled()
    published(*ALL)
    shared.turn()
    with Session(alias) as late, Session(alias) as never:
        late.begin()
        never.begin()
        for part in range(PARTS):
            late.publish(f"late{part}")
            never.publish(f"never{part}")
        published(*ALL)
        shared.turn(2)
        published(*streams(1))
        shared.turn(2)
        never.rollback()
        published(*streams(2))
        shared.turn(2)
        late.commit()
    published(*ALL)
    shared.finish()
    shared.assert_exact()


def test_repartition(handled, published, alias):
    shared = handled()
    published(*ALL)
    shared.turn()
    published(*ALL)
    shared.worker.leave()
    eight = Handled(alias, partitions=2 * PARTS)
    control.repartition("shared", using=alias)
    eight.finish()
    eight.assert_exact()
    published(*ALL)
    eight.finish()
    eight.assert_exact()
    eight.runner._leave()


def test_an_ended_transaction_stops_its_own_partition(handled, published, alias):
    shared, [ending] = handled(), streams(1)
    shared.before[ending] = lambda: connections[alias].connection.commit()
    if alias == "default":
        shared.before[ending] = lambda: connections[alias].connection.execute("COMMIT")
    published(*ALL)
    shared.turn(2)
    published(*ALL)
    shared.turn(2)
    stopped = Cursor.objects.using(alias).get(partition=1)
    assert stopped.error.startswith("TransactionEnded")
    rows = Incident.objects.using(alias).values_list("detail", "first_id")
    others = [(s, v) for s in ALL for v in (1, 2) if part_of(s) != 1]
    assert Counter(row for row in rows if part_of(row[0]) != 1) == Counter(others)


def test_a_pause_in_the_middle_of_a_turn(handled, published, alias):
    shared = handled()
    published(*ALL)
    set_failpoint(
        "committed",
        lambda: (set_failpoint("committed", None), control.pause("shared", using=alias)),
    )
    shared.turn()
    assert Subscription.objects.using(alias).get().paused
    assert len({part_of(s) for page in shared.pages for s in page}) == 1
    control.resume("shared", using=alias)
    shared.worker.paused = False
    shared.finish()
    shared.assert_exact()


def test_a_page_is_kept_for_one_turn(handled, published):
    """One that left meanwhile never takes its events; they must not stay in memory.

    Nor must those that were taken: a process may catch up with many subscriptions.
    """
    shared = handled()
    held: SharedPages = shared.worker._shared
    for _ in range(5):
        published(*ALL)
        shared.turn()
        [page] = held._pages
        assert sum(map(len, [page.page.rows, *page.rows.values()])) == 1
    shared.assert_exact()


def test_pages_grow_while_they_are_full_and_small(handled, published, monkeypatch):
    """Large events that begin after a restart, or after an idle time, do not fill the memory."""
    shared = handled(batch_size=4)
    held: SharedPages = shared.worker._shared
    published(*ALL)
    shared.finish()
    assert held._limits["outbox_event"] <= 2 * 4
    published(*ALL * 8, data={"text": "x" * 200})
    shared.turn(3)
    grown = held._limits["outbox_event"]
    assert grown > 2 * 4
    monkeypatch.setattr("outbox_app.events.subscriptions.cursors.MAX_SIZE", 100)
    shared.turn()
    assert held._limits["outbox_event"] < grown
    shared.finish()
    shared.assert_exact()


def test_partitions_that_begin_together_read_their_rows_together(handled, published, asked):
    shared = handled(partitions=16)
    published(*ALL)
    shared.turn()
    first = asked(Cursor), asked(ParkedStream)
    for part in range(16):
        shared.drop(part)
        shared.take(part)
    shared.turn()
    looks = 1 + connections[shared.alias].features.has_select_for_update_nowait
    assert asked(Cursor) - first[0] == looks
    assert (first[1], asked(ParkedStream)) == (1, 2)
    shared.assert_exact()


@on("postgres", "mariadb")
def test_one_of_those_that_begin_together_is_handled_elsewhere(handled, published, alias):
    """Its row is locked: the others do not wait for it."""
    shared = handled()
    shared.turn()
    published(*ALL)
    for part in range(PARTS):
        shared.drop(part)
        shared.take(part)
    with Session(alias) as other:
        other.begin()
        rows = Cursor.objects.using(alias).select_for_update().filter(partition=2)
        other.do(lambda: list(rows))
        shared.turn()
    assert {part_of(s) for page in shared.pages for s in page} == {0, 1, 3}
    assert "still handles" in shared.worker.partitions[2].error
    shared.wait()
    shared.finish()
    shared.assert_exact()


def test_a_backlog_of_small_events_is_stored_in_few_pages(handled, published, pages_read, alias):
    """What follows a full page is read at once: each partition stores a page that is full."""
    shared = handled(batch_size=8)
    published(*ALL * 4)
    shared.turn()
    assert len(pages_read) > 1
    assert Incident.objects.using(alias).count() > 20
    assert set(Cursor.objects.using(alias).values_list("revision", flat=True)) == {1}
    assert max(map(len, shared.pages)) <= 8
    shared.finish()
    shared.assert_exact()


def test_large_events_are_read_by_short_pages(handled, published, pages_read, alias, monkeypatch):
    monkeypatch.setattr("outbox_app.events.subscriptions.cursors.MAX_SIZE", 1000)
    shared = handled(batch_size=8)
    published(*ALL * 4, data={"text": "x" * 200})
    shared.turn()
    assert len(pages_read) == 1
    assert Incident.objects.using(alias).count() == 8
    shared.finish()
    shared.assert_exact()


@on("postgres", "mariadb")
def test_late_commits_between_the_reads_of_a_page(handled, published, alias, monkeypatch):
    shared, page = handled(batch_size=8), LogReader.page
    with Session(alias) as late:
        late.begin()
        for part in range(PARTS):
            late.publish(streams(part)[0])
        published(*(streams(part, 2)[1] for part in range(PARTS)), *["more"] * 30)

        def then_commit(*given, **named):
            found = page(*given, **named)
            if late.blocks:
                late.commit()
                published(*ALL)
            return found

        monkeypatch.setattr(LogReader, "page", then_commit)
        shared.finish()
    shared.assert_exact()


def test_no_partition_is_given_more_events_than_its_page_may_have(alias, published, run):
    """What follows a full page is read at once, and is all of one partition."""
    sizes = []

    @subscriber("parts", partitions=2, batch_size=10)
    def handle(events):
        sizes.append(len(events))

    some = [next(f"s{n}" for n in count() if slice_of(f"s{n}") % 2 == part) for part in (0, 1)]
    published(*some * 5, *some[:1] * 20)
    run("parts")
    assert (sum(sizes), max(sizes)) == (30, 10)
