"""A rebuild builds a new view beside the live one; no event is missed or counted twice."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from random import Random

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, models, transaction
from django.test.utils import isolate_apps

from outbox_app.database.lock_wait import atomic_with_lock_wait
from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events.exceptions import RebuildFailed, RebuildRefused
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.projections.rebuild import Rebuild, rebuild
from outbox_app.events.projections.shadow_table import shadow_table
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.exceptions import TransactionEnded
from outbox_app.failpoints import set_failpoint
from tests import forking
from tests.database.endings import each_ending, end
from tests.events.log.sessions import Session, execute
from tests.events.projections.declared import SoldOf, StatusOf, declare
from tests.events.projections.models import Pointed, Sold, Status
from tests.faults.tools import ROOT, eventually, on
from tests.patience import patience
from tests.servers.mysql import MARIADB

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def sell(alias, count, *, seed=0, size=3):
    """Publish ``count`` transactions of sales; every fourth is rolled back."""
    random = Random(seed)
    for n in range(count):
        with transaction.atomic(using=alias):
            publish_many(
                NewEvent(f"order-{random.randrange(20)}", "made", {"article": random.randrange(5)})
                for _ in range(size)
            )
            if n % 4 == 3:
                transaction.set_rollback(True, using=alias)


def expected_sold(alias):
    events = Event.objects.using(alias).values_list("data", flat=True)
    return dict(Counter(data["article"] for data in events))


def expected_status(alias):
    rows = {}
    for stream, version in Event.objects.using(alias).values_list("stream", "version"):
        rows.setdefault(stream, []).append(version)
    return {s: (" ".join(map(str, sorted(vs))), max(vs)) for s, vs in rows.items()}


def tables_left(alias):
    names = connections[alias].introspection.table_names()
    return [name for name in names if "__rebuild_" in name]


def indexes(alias, model):
    with connections[alias].cursor() as cursor:
        found = connections[alias].introspection.get_constraints(cursor, model._meta.db_table)
    return {name: each["columns"] for name, each in found.items()}


def test_a_damaged_view_is_made_anew(alias, run, sold):
    declare(SoldOf, "sold", batch_size=7)
    sell(alias, 12)
    run("sold")
    Sold.objects.using(alias).update(count=99)
    Sold.objects.using(alias).create(article=77, count=1)
    before, lines = indexes(alias, Sold), []
    assert rebuild("sold", write=lines.append) == 5
    assert sold() == expected_sold(alias)
    assert run("sold") == 0
    assert indexes(alias, Sold) == before
    assert tables_left(alias) == []
    assert lines[0] == "rebuild started name=sold table=projections_sold"
    assert lines[-1] == "rebuild done name=sold events=27 rows=5"
    sell(alias, 3, seed=1)
    assert run("sold") == 9
    assert sold() == expected_sold(alias)


def test_rows_with_versions_and_deleted_ones(alias, published, run, status):
    declare(StatusOf, "status", push=True)
    published("a", "b", "a")
    published("b", type="gone")
    before = list(Status.objects.using(alias).order_by("pk").values())
    Status.objects.using(alias).update(path="wrong")
    before_indexes = indexes(alias, Status)
    rebuild("status")
    assert list(Status.objects.using(alias).order_by("pk").values()) == before
    assert indexes(alias, Status) == before_indexes
    published("a", "b")
    assert status() == {"a": ("1 2 3", 3), "b": ("3", 3)}
    run("status")
    assert status() == {"a": ("1 2 3", 3), "b": ("3", 3)}


def test_a_subscription_that_never_ran(alias, run, sold):
    declare(SoldOf, "sold", partitions=3)
    sell(alias, 4)
    rebuild("sold")
    assert sold() == expected_sold(alias)
    assert run("sold") == 0
    sell(alias, 4, seed=2)
    run("sold")
    assert sold() == expected_sold(alias)
    assert Cursor.objects.using(alias).count() == 3


@on("mariadb")
def test_it_waits_where_too_many_gaps_are_open(alias, sold, settings, monkeypatch):
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.5}
    monkeypatch.setattr("outbox_app.events.log.windows.mysql.MAX_RUNS", 3)
    declare(SoldOf, "sold", batch_size=7)
    sell(alias, 30)
    rebuild("sold")
    assert sold() == expected_sold(alias)


@on("postgres", "mariadb")
def test_it_ends_though_there_are_always_more_events(alias, run, sold, in_thread):
    declare(SoldOf, "sold")
    sell(alias, 2)
    pages = []

    def write():
        pages.append(1)
        if len(pages) < 50:
            in_thread(lambda: sell(alias, 1, seed=len(pages))).join(patience())

    set_failpoint("rebuild_page", write)
    rebuild("sold")
    assert len(pages) < 10
    run("sold")
    assert sold() == expected_sold(alias)


@pytest.mark.parametrize("kind", ["counted", "pushed"])
def test_while_writers_write_and_the_subscription_runs(alias, run, sold, status, in_thread, kind):
    """Two rebuilds, one after the other, in the midst of it all."""
    if kind == "counted":
        declare(SoldOf, "view", partitions=2, batch_size=20)
        equals = lambda: sold() == expected_sold(alias)  # noqa: E731
    else:
        declare(StatusOf, "view", batch_size=20, push=True)
        equals = lambda: status() == expected_status(alias)  # noqa: E731
    sell(alias, 10)
    runner = Runner([subscriber_named("view")], interval=0.02)
    running = in_thread(runner.run)
    stop = threading.Event()

    def write(seed):
        while not stop.is_set():
            sell(alias, 1, seed=seed)
            seed += 2
            stop.wait(0.005)

    writers = [in_thread(lambda seed=seed: write(seed)) for seed in (1, 2)]
    try:
        for _ in range(2):
            seen = Event.objects.using(alias).count()
            rebuild("view")
            eventually(lambda seen=seen: Event.objects.using(alias).count() > seen + 10)
    finally:
        stop.set()
        for writer in writers:
            writer.join(patience())
        eventually(equals, "the view equals the events")
        # It rests for a moment where a takeover had its cursors.
        eventually(lambda: not runner.trouble, "the subscription runs without trouble")
        runner.stop()
        running.join(patience())
    run("view")
    assert equals()


@on("postgres")
def test_what_is_pushed_right_before_the_takeover_at_repeatable_read(
    alias, published, status, in_thread
):
    declare(StatusOf, "status", push=True)
    published("a")

    def push(execute, sql, *arguments):
        if sql.startswith("LOCK TABLE"):
            in_thread(lambda: published("b")).join(patience())
        return execute(sql, *arguments)

    level = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ"
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(level)
        with connections[alias].execute_wrapper(push):
            assert rebuild("status") == 2
    finally:
        connections[alias].close()
    assert status() == {"a": ("1", 1), "b": ("1", 1)}


@pytest.mark.parametrize("when", ["page_read", "advanced", "handled"])
def test_a_page_in_flight_is_not_committed_on_the_new_rows(
    alias, sold, run, in_thread, when, caplog
):
    declare(SoldOf, "sold")
    sell(alias, 4)
    there, go, lines = threading.Event(), threading.Event(), []

    def hold():
        if threading.current_thread().name == "pull" and not there.is_set():
            there.set()
            assert go.wait(patience())

    def pull():
        threading.current_thread().name = "pull"
        run("sold")

    set_failpoint(when, hold)
    pulling = in_thread(pull)
    assert there.wait(patience())
    rebuilding = in_thread(lambda: rebuild("sold", write=lines.append))
    rebuilding.join(0.5)  # it is done, or waits for the cursor
    go.set()
    pulling.join(patience())
    rebuilding.join(patience())
    assert "eadlock" not in caplog.text + "".join(lines)
    run("sold")
    assert sold() == expected_sold(alias)


@pytest.mark.parametrize("point", ["rebuild_page=kill@2", "rebuild_copied=kill"])
def test_a_killed_rebuild_leaves_the_view_and_can_be_started_again(
    alias, environment, run, sold, point
):
    declare(SoldOf, "sold", batch_size=10)
    sell(alias, 20)
    run("sold")
    Sold.objects.using(alias).update(count=99)
    cursor = Cursor.objects.using(alias).values().get()
    done = forking.run(
        [sys.executable, "-m", "tests.events.projections.declared", "outbox_rebuild", "sold"],
        cwd=ROOT,
        env={**environment(alias), "OUTBOX_FAILPOINT": point},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    assert "rebuild started name=sold" in done.stdout
    assert set(sold().values()) == {99}
    assert Cursor.objects.using(alias).values().get() == cursor
    assert len(tables_left(alias)) == 1
    sell(alias, 2, seed=5)
    call_command("outbox_rebuild", "sold")
    assert sold() == expected_sold(alias)
    assert run("sold") == 0
    assert tables_left(alias) == []


@isolate_apps("tests.events.projections")
def test_a_killed_rebuild_of_a_table_whose_letters_have_two_bytes(alias):
    """PostgreSQL cut off the end of the shadow table's name, by which the next run finds it."""

    class Sales(models.Model):  # noqa: DJ008
        class Meta:
            app_label = "projections"
            db_table = "продажи_по_регионам_и_складам"

    with connections[alias].schema_editor() as editor:
        editor.create_model(Sales)
    killed = shadow_table(Sales, using=alias)
    try:
        with killed as left, shadow_table(Sales, using=alias) as shadow:
            assert tables_left(alias) == [shadow._meta.db_table] != [left._meta.db_table]
    finally:
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Sales)


def test_events_that_cannot_be_replayed_leave_the_view(alias, published, run, status):
    bad = declare(StatusOf, "status", on_error="park")
    published("a", "b")
    published("b", type="bad")
    published("b")
    for _ in range(3):
        run("status")
        Cursor.objects.using(alias).update(retry_at=None)
    assert ParkedStream.objects.using(alias).count() == 1
    with pytest.raises(RebuildFailed, match="failed with ValueError: b@2"):
        rebuild("status")
    assert tables_left(alias) == []
    assert {s: path for s, (path, _) in status().items()} == {"a": "1", "b": "1"}
    bad.apply = lambda self, event, row: StatusOf.apply(self, event._replace(type="made"), row)
    rebuild("status")
    assert {s: path for s, (path, _) in status().items()} == {"a": "1", "b": "1 2 3"}
    assert not ParkedStream.objects.using(alias).exists()
    published("b")
    assert run("status") == 1
    assert status()["b"][0] == "1 2 3 4"


@each_ending
def test_a_view_that_ends_the_transaction_is_not_taken_over(alias, published, run, status, way):
    ends = declare(StatusOf, "status")
    published("a", "b")
    run("status")
    published("b")

    def apply(self, event, row):
        end(way, alias)
        return StatusOf.apply(self, event, row)

    ends.apply = apply
    with pytest.raises((RebuildFailed, TransactionEnded), match="'status' ended its transaction"):
        rebuild("status")
    assert tables_left(alias) == []
    assert {s: path for s, (path, _) in status().items()} == {"a": "1", "b": "1"}


def test_an_event_at_which_the_view_failed_is_over(alias, published, run):
    bad = declare(StatusOf, "status")
    published("a")
    published("b", type="bad")
    run("status")
    assert Cursor.objects.using(alias).get().failed_event is None
    run("status")
    assert Cursor.objects.using(alias).get().failed_event["stream"] == "b"
    bad.apply = lambda self, event, row: StatusOf.apply(self, event._replace(type="made"), row)
    rebuild("status")
    assert Cursor.objects.using(alias).get().failed_event is None


def test_gaps_that_nothing_waits_for_any_more_are_closed(alias, published, run, status):
    declare(StatusOf, "status", on_gap="park")
    published("a", "b", "b", "b")
    Event.objects.using(alias).filter(stream="b", version=2).delete()
    run("status")
    assert Gap.objects.using(alias).get().state == "open"
    rebuild("status")
    assert {s: path for s, (path, _) in status().items()} == {"a": "1", "b": "1 3"}
    assert not ParkedStream.objects.using(alias).exists()
    gap = Gap.objects.using(alias).get()
    assert (gap.state, gap.reason) == ("closed", "The view was rebuilt without these versions.")
    published("b")
    assert run("status") == 1


@on("postgres", "mariadb")
def test_the_takeover_waits_for_locks_and_gives_up_with_everything_as_it_was(
    alias, run, sold, in_thread, monkeypatch
):
    monkeypatch.setattr("outbox_app.events.projections.rebuild.LOCK_WAIT", 1)
    monkeypatch.setattr("outbox_app.events.projections.rebuild.ATTEMPTS", 2)
    declare(SoldOf, "sold")
    sell(alias, 4)
    run("sold")
    right = sold()
    locked, go = threading.Event(), threading.Event()

    def reader_with_a_lock():
        with transaction.atomic(using=alias):
            Sold.objects.using(alias).filter(article=right and min(right)).update(count=1)
            locked.set()
            assert go.wait(patience())
            transaction.set_rollback(True, using=alias)

    thread = in_thread(reader_with_a_lock)
    assert locked.wait(patience())
    lines = []
    with pytest.raises(RebuildFailed, match="The view and its subscription are unchanged"):
        rebuild("sold", write=lines.append)
    assert [line.split(" error=")[0] for line in lines[1:]] == ["takeover tried again name=sold"]
    go.set()
    thread.join(patience())
    assert sold() == right
    assert run("sold") == 0
    assert tables_left(alias) == []
    rebuild("sold")
    assert sold() == right


@on("postgres", "mariadb")
def test_the_takeover_waits_for_a_change_of_partitions(alias, run, sold, in_thread):
    declare(SoldOf, "sold")
    sell(alias, 4)
    run("sold")
    lines = []
    with Session(alias).begin() as person:
        person.sql("SELECT name FROM outbox_subscription WHERE name = 'sold' FOR UPDATE")
        thread = in_thread(lambda: rebuild("sold", write=lines.append))
        eventually(lambda: any(line.startswith("takeover tried again") for line in lines))
    thread.join(patience())
    assert sold() == expected_sold(alias)


@on("postgres", "mariadb")
def test_other_subscriptions_go_on_during_the_takeover(
    alias, run, sold, seen_by, in_thread, monkeypatch
):
    """MySQL walks a small table from its beginning, and locks each row that it comes by."""
    monkeypatch.setattr("outbox_app.events.projections.rebuild.LOCK_WAIT", 1)
    monkeypatch.setattr("outbox_app.events.projections.rebuild.ATTEMPTS", 1)
    seen = seen_by("other", partitions=4)
    declare(SoldOf, "sold", partitions=4)
    sell(alias, 3)
    run("sold", "other")
    analyze = "ANALYZE TABLE outbox_cursor" if alias == MARIADB else "ANALYZE outbox_cursor"
    execute(alias, analyze)
    with Session(alias).begin() as page:  # one that takes its time
        page.sql("UPDATE outbox_cursor SET error = '' WHERE subscription = 'other'")
        rebuild("sold")
    sell(alias, 2, seed=1)
    set_failpoint("rebuild_copied", lambda: in_thread(lambda: run("other")).join(patience()))
    rebuild("sold")
    assert len(seen) == 15
    assert sold() == expected_sold(alias)
    assert run("sold") == 0


def test_a_takeover_whose_outcome_was_lost(alias, run, sold, monkeypatch):
    """It may have been committed, with the new rows: nothing is applied to them again."""
    declare(SoldOf, "sold")
    sell(alias, 4)
    take_over = Rebuild._take_over

    def lost(self, states):
        sell(alias, 4, seed=1)
        take_over(self, states)
        monkeypatch.undo()
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(Rebuild, "_take_over", lost)
    with pytest.raises(RebuildFailed, match="closed the connection"):
        rebuild("sold")
    assert run("sold") == 0
    assert sold() == expected_sold(alias)


@on("postgres", "mariadb")
def test_no_row_is_inserted_during_the_takeover(alias, run, sold, in_thread):
    declare(SoldOf, "sold")
    sell(alias, 2)
    refused = []

    def insert():
        try:
            with atomic_with_lock_wait(1, using=alias):
                Sold.objects.using(alias).create(article=999)
        except OperationalError as error:
            refused.append(error)

    set_failpoint("rebuild_copied", lambda: in_thread(insert).join(patience()))
    rebuild("sold")
    assert refused
    assert sold() == expected_sold(alias)


def test_a_second_rebuild_ends_the_first(alias, sold, run, in_thread):
    declare(SoldOf, "sold", batch_size=5)
    sell(alias, 8)
    run("sold")
    passed = []

    def second():
        if not passed:
            passed.append(1)
            thread = in_thread(lambda: rebuild("sold"))
            thread.join(patience())

    set_failpoint("rebuild_page", second)
    with pytest.raises(RebuildFailed, match="The rebuild of 'sold' failed"):
        rebuild("sold")
    assert sold() == expected_sold(alias)


def test_a_log_without_its_beginning_is_refused(alias, published, run, status):
    declare(StatusOf, "status")
    published("a", "b", "b")
    run("status")
    Event.objects.using(alias).filter(stream="b", version=1).delete()
    with pytest.raises(RebuildRefused, match="has no version 1 of 'b' any more"):
        rebuild("status")
    assert {stream: path for stream, (path, _) in status().items()} == {"a": "1", "b": "1 2"}


def test_a_log_that_is_pruned_meanwhile_is_refused(alias, published, run, status):
    declare(StatusOf, "status", batch_size=2)
    published("a", "b", "b", "c", "c")
    run("status")
    before = status()

    def prune():
        set_failpoint("rebuild_page", None)
        Event.objects.using(alias).filter(stream="c", version=1).delete()

    set_failpoint("rebuild_page", prune)
    with pytest.raises(RebuildRefused, match="has no version 1 of 'c' any more"):
        rebuild("status")
    assert status() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nobody", "No subscription is named 'nobody'"),
        ("plain", "'plain' is not a projection"),
        ("pointed", r"projections.Hinting, projections.Pointing points at projections.Pointed"),
    ],
)
@pytest.mark.django_db
def test_what_cannot_be_rebuilt(name, text):
    @subscriber("plain")
    def handle(events): ...

    declare(StatusOf, "pointed", model=Pointed)
    with pytest.raises(CommandError, match=text) as caught:
        call_command("outbox_rebuild", name)
    assert caught.value.returncode == 2


def test_one_that_is_paused(alias, run, sold):
    """So that code which is wrong does no more harm until the view is made anew."""
    declare(SoldOf, "sold")
    sell(alias, 5)
    run("sold")
    control.pause("sold")
    Sold.objects.using(alias).update(count=7)
    sell(alias, 5)
    assert rebuild("sold") == len(expected_sold(alias))
    assert sold() == expected_sold(alias)
    assert Subscription.objects.using(alias).get().paused
    control.resume("sold")
    sell(alias, 5)
    run("sold")
    assert sold() == expected_sold(alias)
