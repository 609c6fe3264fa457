"""A view rebuilt on Spark equals that of ``outbox_rebuild``, and no event is lost."""

from __future__ import annotations

import sys
import threading

import pytest
from django.db import connections, transaction

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import RebuildFailed, RebuildRefused
from outbox_app.events.log.filter import EventFilter
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections.rebuild import rebuild
from outbox_app.events.projections.rows import ProjectionTable
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.failpoints import set_failpoint
from outbox_app.fields import exact_collation
from outbox_app.pipeline.archive_reader import planned
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.driver.rebuild import SparkRebuild, log_of
from outbox_app.pipeline.driver.rebuild_fold import ViewFold
from outbox_app.pipeline.folding import fold
from tests import forking
from tests.emptying import cut_off
from tests.events.log.own_log.models import Ledger
from tests.events.projections.conftest import in_thread
from tests.events.projections.declared import StatusOf, declare
from tests.events.projections.models import Sold, Status
from tests.faults.tools import ROOT, eventually, on
from tests.patience import patience
from tests.pipeline.local_context import LocalContext
from tests.pipeline.rebuilds import (
    damage,
    failpoints_end_with_the_test,
    name,
    options,
    projection,
    rebuilt,
    rows,
    run,
    spark_rebuilds,
    tables_left,
    work,
)

__all__ = ["failpoints_end_with_the_test", "in_thread", "name", "options", "spark_rebuilds"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def test_spark_makes_the_rows_of_outbox_rebuild(alias, spark, spark_rebuilds):
    name = "spark_status" if alias == "postgres" else "spark_sold"
    projection(name)
    work(alias, 30)
    run(name)
    expected = rebuilt(alias, name)
    assert len(expected) > 5
    damage(alias, name)
    lines = spark_rebuilds(name, session=spark)
    assert rows(alias, name) == expected
    assert spark_rebuilds.result == len(expected)
    assert lines[0].startswith(f"rebuild started name={name} table=projections_")
    assert lines[-1].endswith(f"rows={len(expected)}")
    assert tables_left(alias) == []
    assert run(name) == 0
    work(alias, 5, seed=1)
    assert run(name)
    assert rows(alias, name) == rebuilt(alias, name)


class Rows:
    """A fold that yields the rows that it is given."""

    def __init__(self):
        self.rows = []

    def key(self, row):
        return row[0]

    def add(self, row):
        self.rows.append(row)

    def result(self):
        rows, self.rows = self.rows, []
        return rows


@pytest.mark.parametrize("use_tz", [True, False])
def test_events_are_those_of_the_log(alias, options, settings, use_tz):
    """What a fold is given is what a subscription is given, in value and type."""
    if not use_tz:
        settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    work(alias, 5)
    with transaction.atomic(using=alias):
        publish_many([NewEvent("ä", "made", {"list": [1.5, None, "\u2028"]}, {"by": "ü"})])
    reader = LogReader(Event, using=alias)
    logged, _ = reader.read(reader.window.start(0), 1000)
    view = ViewFold(ProjectionTable(declare(StatusOf, "status")(), using=alias))
    rows = fold(LocalContext(), options, EventFilter(), planned(options).parts, Rows).collect()
    events = [view._event(row) for row in rows]
    assert sorted(events, key=lambda each: each.id) == logged
    assert [*map(type, events[0])] == [*map(type, logged[0])]
    assert {each.recorded_at.utcoffset() for each in events} == {
        each.recorded_at.utcoffset() for each in logged
    }
    reader.close()


def test_while_writers_write_and_the_subscription_runs(
    alias, name, spark, spark_rebuilds, in_thread
):
    """Two rebuilds, one after the other, in the midst of it all."""
    work(alias, 10)
    runner = Runner([subscriber_named(name)], interval=0.02)
    running = in_thread(runner.run)
    stop = threading.Event()

    def write(seed):
        while not stop.is_set():
            work(alias, 1, seed=seed)
            seed += 2
            stop.wait(0.05)

    writers = [in_thread(lambda seed=seed: write(seed)) for seed in (1, 2)]
    try:
        by_spark = (alias, name) == ("postgres", "spark_sold")
        for session in (LocalContext(), spark if by_spark else LocalContext()):
            seen = Event.objects.using(alias).count()
            lines = spark_rebuilds(name, session=session)
            assert any(line.startswith(f"compared name={name} ") for line in lines)
            eventually(lambda seen=seen: Event.objects.using(alias).count() > seen + 10)
    finally:
        stop.set()
        for writer in writers:
            writer.join(patience())
        runner.stop()
        running.join(patience())
    run(name)
    assert not runner.trouble
    assert rows(alias, name) == rebuilt(alias, name)


@on("postgres", "mariadb")
def test_connections_that_are_idle_for_long_are_cut_off(alias, spark_rebuilds):
    """While Spark reads the log, which takes hours maybe, nothing of the database is held open."""
    name = "spark_sold"
    projection(name)
    work(alias, 5)
    run(name)
    set_failpoint("rebuild_folded", lambda: cut_off(alias))
    spark_rebuilds(name)
    assert rows(alias, name) == rebuilt(alias, name)


@on("postgres", "mariadb")
@pytest.mark.parametrize("point", ["rebuild_folded", "rebuild_compared", "after"])
def test_what_commits_late_is_there_once(alias, spark_rebuilds, in_thread, point):
    """A position is given out before the offset is taken, and committed at one of these points."""
    name = "spark_sold" if alias == "postgres" else "spark_status"
    projection(name)
    work(alias, 5)
    run(name)
    written, go = threading.Event(), threading.Event()

    def late():
        with transaction.atomic(using=alias):
            data = {"article": 5000, "count": 3}
            publish_many(NewEvent("late", "made", data, topic=topic) for topic in ("shop", "other"))
            written.set()
            assert go.wait(patience())

    def commit():
        go.set()
        writer.join(patience())

    writer = in_thread(late)
    assert written.wait(patience())
    work(alias, 5, seed=1)
    set_failpoint(point, commit)
    spark_rebuilds(name)
    commit()
    run(name)
    found = rows(alias, name)
    assert {row.get("article") or row["stream"] for row in found} >= {
        5000 if name == "spark_sold" else "late"
    }
    assert found == rebuilt(alias, name)


@pytest.mark.parametrize(
    ("alias", "point"),
    [
        # The rows are replaced by then, and nothing is committed.
        *((each, "rebuild_copied") for each in ("default", "postgres", "mariadb")),
        # Before that only the table beside the view is there.
        *(("default", "rebuild_folded"), ("postgres", "rebuild_loaded")),
        ("mariadb", "rebuild_compared"),
    ],
    indirect=["alias"],
)
def test_a_killed_rebuild_changes_nothing(alias, environment, spark_rebuilds, point):
    projection("spark_sold")
    work(alias, 10)
    run("spark_sold")
    right = rows(alias, "spark_sold")
    damage(alias, "spark_sold")
    before = rows(alias, "spark_sold"), Cursor.objects.using(alias).values().get()
    done = forking.run(
        [sys.executable, "-m", "tests.pipeline.rebuilt", "spark_sold"],
        cwd=ROOT,
        env={
            **environment(alias),
            "OUTBOX_FAILPOINT": f"{point}=kill",
            "PASSWORD": connections[alias].settings_dict.get("PASSWORD") or "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    assert "rebuild started name=spark_sold" in done.stdout
    assert (rows(alias, "spark_sold"), Cursor.objects.using(alias).values().get()) == before
    assert len(tables_left(alias)) == 1
    spark_rebuilds("spark_sold")
    assert rows(alias, "spark_sold") == right
    assert run("spark_sold") == 0
    assert tables_left(alias) == []


class TestArchive:
    @pytest.fixture
    def archived(self, alias, options, spark, tmp_path):
        """``archived(part)``: archive the log, and delete this part of it, from the front."""

        def make(part=1.0):
            Archiver(spark, options, str(tmp_path), write=lambda line: None).run()
            events = Event.objects.using(alias).order_by("pk")
            ids = list(events.values_list("pk", flat=True))
            events.filter(pk__in=ids[: int(len(ids) * part)]).delete()
            return str(tmp_path)

        return make

    @on("default", "postgres")
    def test_events_that_were_pruned_come_from_it(self, alias, spark, spark_rebuilds, archived):
        name = "spark_status" if alias == "postgres" else "spark_sold"
        projection(name)
        work(alias, 12)
        run(name)
        archive = archived(0.6)
        work(alias, 5, seed=1)
        run(name)
        expected = rows(alias, name)
        damage(alias, name)
        with pytest.raises(RebuildRefused, match="has no version 1 of"):
            rebuild(name)
        with pytest.raises(RebuildRefused, match="has no version 1 of"):
            spark_rebuilds(name)
        # What is left in the log is in the archive, too, or behind it.
        spark_rebuilds(name, session=spark, archive=archive)
        assert rows(alias, name) == expected
        archived()
        damage(alias, name)
        spark_rebuilds(name, session=spark, archive=archive)
        assert rows(alias, name) == expected
        assert run(name) == 0
        work(alias, 5, seed=2)
        assert run(name)

    @on("postgres")
    def test_what_was_removed_and_not_archived_is_missed(
        self, alias, spark, spark_rebuilds, archived
    ):
        projection("spark_sold")
        work(alias, 5)
        archive = archived(0.5)
        with transaction.atomic(using=alias):
            publish_many([NewEvent("new", "other"), NewEvent("new", "other")])
        Event.objects.using(alias).filter(stream="new", version=1).delete()
        with pytest.raises(RebuildRefused, match="has version 1 of 'new'") as caught:
            spark_rebuilds("spark_sold", session=spark, archive=archive)
        assert caught.value.returncode == 2
        assert not Sold.objects.using(alias).exists()
        assert not Cursor.objects.using(alias).exists()

    @on("postgres")
    def test_a_log_that_is_pruned_behind_its_archive_meanwhile_is_refused(
        self, alias, spark, spark_rebuilds, archived, monkeypatch
    ):
        projection("spark_sold")
        work(alias, 5)
        run("spark_sold")
        archive = archived(0.5)
        work(alias, 5, seed=1)
        run("spark_sold")
        right, fold = rows(alias, "spark_sold"), SparkRebuild._fold

        def folded(self):
            archived()
            return fold(self)

        monkeypatch.setattr(SparkRebuild, "_fold", folded)
        damage(alias, "spark_sold")
        before = rows(alias, "spark_sold")
        with pytest.raises(RebuildFailed, match=r"Position \d+ was removed from outbox_event"):
            spark_rebuilds("spark_sold", session=spark, archive=archive)
        assert rows(alias, "spark_sold") == before
        assert tables_left(alias) == []
        monkeypatch.undo()
        spark_rebuilds("spark_sold", session=spark, archive=archive)
        assert rows(alias, "spark_sold") == right
        assert run("spark_sold") == 0

    @pytest.mark.parametrize("point", ["rebuild_folded", "rebuild_loaded"])
    def test_rows_that_are_made_again_of_a_pruned_log_are_refused(
        self, alias, spark_rebuilds, monkeypatch, point
    ):
        """An executor is lost after its rows were made, and the log was pruned meanwhile."""
        projection("spark_sold")
        work(alias, 5)
        run("spark_sold")
        before = rows(alias, "spark_sold")
        set_failpoint(point, lambda: Event.objects.using(alias).filter(version=1).delete())
        with pytest.raises(RebuildRefused, match="has no version 1 of"):
            spark_rebuilds("spark_sold")
        assert rows(alias, "spark_sold") == before
        assert tables_left(alias) == []


@on("mariadb")
def test_a_view_that_compares_bytes(alias, options, spark_rebuilds):
    projection("spark_status")
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@collation_database")
        [collation] = cursor.fetchone()
        # By hand: the field is a plain one.
        cursor.execute(
            "ALTER TABLE projections_status CONVERT TO CHARACTER SET utf8mb4 "
            f"COLLATE {exact_collation(connection)}"
        )
    try:
        with transaction.atomic(using=alias):
            publish_many(NewEvent(stream, "made") for stream in ("a", "A", "a ", "a"))
        run("spark_status")
        expected = rows(alias, "spark_status")
        assert len(expected) == 3
        assert rebuilt(alias, "spark_status") == expected
        lines = spark_rebuilds("spark_status")
        assert lines[3].endswith(" rows=3 old=0 new=0")
        assert rows(alias, "spark_status") == expected
    finally:
        Status.objects.using(alias).all().delete()
        with connection.cursor() as cursor:
            cursor.execute(
                "ALTER TABLE projections_status CONVERT TO CHARACTER SET utf8mb4 "
                f"COLLATE {collation}"
            )


@on("mariadb")
def test_more_gaps_than_a_cursor_may_keep(alias, settings, spark_rebuilds, monkeypatch):
    """All gaps of the log come at once. The rebuild skips none."""
    from tests.pipeline.rebuilt import declared

    monkeypatch.setattr("outbox_app.events.log.windows.mysql.MAX_RUNS", 3)
    monkeypatch.setattr("outbox_app.events.log.scans.mysql.MAX_RUNS", 3)
    declared("spark_sold")
    work(alias, 60)
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.001}
    set_failpoint("rebuild_folded", lambda: work(alias, 2, seed=9))
    spark_rebuilds("spark_sold")
    found = rows(alias, "spark_sold")
    assert found
    monkeypatch.undo()
    run("spark_sold")
    assert rows(alias, "spark_sold") == found == rebuilt(alias, "spark_sold")


def test_the_log_of_a_projection(alias):
    declare(StatusOf, "ledger", logs=[Ledger])
    assert log_of("ledger") == (Ledger, alias)
