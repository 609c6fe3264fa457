"""A view whose rows Spark has made is what ``outbox_rebuild`` makes, and no event is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from random import Random

import pytest
from django.core.management import CommandError
from django.db import connections, transaction
from django.db.models import DateTimeField
from django.db.models.functions import Upper

from outbox_app import NewEvent, publish_many, subscriber
from outbox_app.delivery.runner import Runner
from outbox_app.delivery.subscriber import subscriber_named
from outbox_app.delivery.view import View
from outbox_app.exceptions import PipelineError
from outbox_app.failpoints import set_failpoint
from outbox_app.log.reader import LogReader
from outbox_app.log.sql import Filter
from outbox_app.models import Cursor, Event
from outbox_app.models.collation import compare_bytes
from outbox_app.operations import comparison, spark_rebuild
from outbox_app.operations.pipeline import log_options
from outbox_app.operations.rebuild import rebuild
from outbox_app.operations.spark_fold import ViewFold
from outbox_app.operations.spark_rebuild import SparkRebuild, log_of, rebuild_on_spark
from outbox_app.operations.spark_source import Source, require_same_database
from outbox_app.pipeline.archive import Archiver
from outbox_app.pipeline.folding import Plan
from tests.faults.tools import ROOT, eventually, on
from tests.own_log.models import Ledger
from tests.pipeline.here import Here
from tests.projections.conftest import in_thread
from tests.projections.declared import StatusOf, declare
from tests.projections.models import Pointed, Sold, Status

__all__ = ["in_thread"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]

MODELS = {"spark_sold": Sold, "spark_status": Status}


@pytest.fixture(autouse=True)
def failpoints_end_with_the_test():
    from outbox_app import failpoints

    yield
    failpoints._actions.clear()


@pytest.fixture(params=sorted(MODELS))
def name(request, alias):
    """The projection under test, declared."""
    projection(request.param)
    return request.param


def projection(name):
    """Declare a projection. Imported no sooner: whatever is declared ends with the test."""
    from tests.pipeline.rebuilt import declared

    declared(name)


@pytest.fixture
def options(alias, monkeypatch):
    """The log, which even so small is read in parts."""
    monkeypatch.setattr("outbox_app.log.span.MIN_POSITIONS", 7)
    password = connections[alias].settings_dict.get("PASSWORD") or ""
    return log_options(Event, using=alias, password=password, partitions="4")


@pytest.fixture
def spark_rebuilds(alias, options, request):
    """``spark_rebuilds(name, …)``: by Spark, or by what stands for it. Returns the lines."""

    def make(name, *, session=None, **given):
        lines = []
        session = session or Here()
        make.result = rebuild_on_spark(session, options, name, write=lines.append, **given)
        return lines

    return make


def work(alias, count, *, seed=0, streams=8):
    """Publish so many transactions of all kinds of events; every fifth is rolled back."""
    random = Random(seed)

    def event(topic):
        return NewEvent(
            f"{len(topic)}-{topic[0].islower()}-{random.randrange(streams)}",
            random.choice(["made", "made", "gone", "xé", "other", "Made"]),
            {"article": random.randrange(12), "count": random.choice([1, 2, -1])},
            topic=topic,
        )

    for n in range(count):
        with transaction.atomic(using=alias):
            topics = random.sample(["shop", "bob's % \\ shop", "other", "Shop"], 2)
            publish_many(event(topic) for topic in topics for _ in range(3))
            if n % 5 == 4:
                transaction.set_rollback(True, using=alias)


def run(name, **options):
    """Run the subscription until nothing is left."""
    return Runner([subscriber_named(name)], **options).run(once=True)


def rows(alias, name):
    return list(MODELS[name].objects.using(alias).order_by("pk").values())


def rebuilt(alias, name):
    """Return the rows that outbox_rebuild makes."""
    rebuild(name)
    return rows(alias, name)


def damage(alias, name):
    model = MODELS[name]
    rows = model.objects.using(alias)
    first = rows.order_by("pk").first()
    rows.filter(pk=first.pk).delete()
    if model is Sold:
        rows.update(count=77)
        rows.create(article=999, count=1)
    else:
        rows.update(path="wrong")
        rows.create(stream="nobody", status="made")


def tables_left(alias):
    names = connections[alias].introspection.table_names()
    return [name for name in names if "__rebuild_" in name]


def test_spark_makes_the_rows_of_outbox_rebuild(alias, name, spark, spark_rebuilds):
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


def test_events_are_those_of_the_log(alias, options):
    """What a fold is given is what a subscription is given, in value and type."""
    work(alias, 5)
    with transaction.atomic(using=alias):
        publish_many([NewEvent("ä", "made", {"list": [1.5, None, "\u2028"]}, {"by": "ü"})])
    reader = LogReader(Event, using=alias)
    logged = reader.read(reader.window.start(0), 1000).events
    fold = ViewFold(View(declare(StatusOf, "status")(), using=alias), "outbox_event")
    parts = Plan.make(options, Filter()).parts
    events = [fold._event(row) for part in parts for row in part.rows()]
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
            stop.wait(0.01)

    writers = [in_thread(lambda seed=seed: write(seed)) for seed in (1, 2)]
    try:
        for session in (Here(), spark if name == "spark_sold" else Here()):
            seen = Event.objects.using(alias).count()
            lines = spark_rebuilds(name, session=session)
            [compared] = [line for line in lines if line.startswith("compared ")]
            assert " changed=0 added=0 gone=0 " in compared
            eventually(lambda seen=seen: Event.objects.using(alias).count() > seen + 10)
    finally:
        stop.set()
        for writer in writers:
            writer.join(40)
        runner.stop()
        running.join(40)
    run(name)
    assert not runner.trouble
    assert rows(alias, name) == rebuilt(alias, name)


@on("postgres", "mariadb")
@pytest.mark.parametrize("point", ["rebuild_folded", "rebuild_compared", "after"])
def test_what_commits_late_is_there_once(alias, name, spark_rebuilds, in_thread, point):
    """A position is given out before the offset is taken, and committed at one of these points."""
    work(alias, 5)
    run(name)
    written, go = threading.Event(), threading.Event()

    def late():
        with transaction.atomic(using=alias):
            data = {"article": 5000, "count": 3}
            publish_many(NewEvent("late", "made", data, topic=topic) for topic in ("shop", "other"))
            written.set()
            assert go.wait(40)

    def commit():
        go.set()
        writer.join(40)

    writer = in_thread(late)
    assert written.wait(40)
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
    "point", ["rebuild_folded", "rebuild_loaded", "rebuild_compared", "rebuild_copied"]
)
def test_a_killed_rebuild_changes_nothing(alias, environment, spark_rebuilds, point):
    projection("spark_sold")
    work(alias, 10)
    run("spark_sold")
    right = rows(alias, "spark_sold")
    damage(alias, "spark_sold")
    before = rows(alias, "spark_sold"), Cursor.objects.using(alias).values().get()
    done = subprocess.run(
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
        """``archived(part)``: archive the log, and delete the front of it."""

        def make(part=1.0):
            Archiver(spark, options, str(tmp_path), write=lambda line: None).run()
            events = Event.objects.using(alias).order_by("pk")
            ids = list(events.values_list("pk", flat=True))
            events.filter(pk__in=ids[: int(len(ids) * part)]).delete()
            return str(tmp_path)

        return make

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
        with pytest.raises(CommandError, match="has no version 1 of"):
            rebuild(name)
        with pytest.raises(CommandError, match="has no version 1 of"):
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
        with pytest.raises(CommandError, match="has version 1 of 'new'") as caught:
            spark_rebuilds("spark_sold", session=spark, archive=archive)
        assert caught.value.returncode == 2
        assert not Sold.objects.using(alias).exists()
        assert not Cursor.objects.using(alias).exists()

    @on("postgres")
    def test_a_log_that_is_pruned_meanwhile_is_read_again(
        self, alias, spark, spark_rebuilds, archived, monkeypatch
    ):
        projection("spark_sold")
        work(alias, 5)
        run("spark_sold")
        archive = archived(0.5)
        work(alias, 5, seed=1)
        run("spark_sold")
        right, fold, planned = rows(alias, "spark_sold"), Source.fold, []

        def folded(self, plan):
            planned.append(plan)
            if len(planned) == 1:
                archived()
            return fold(self, plan)

        monkeypatch.setattr(Source, "fold", folded)
        lines = spark_rebuilds("spark_sold", session=spark, archive=archive)
        assert lines[2] == "folding again name=spark_sold: the log was pruned meanwhile"
        assert len(planned) == 2
        assert rows(alias, "spark_sold") == right


class TestComparison:
    def test_differences_are_told_and_nothing_is_changed(self, alias, name, spark_rebuilds):
        work(alias, 10)
        run(name)
        count = len(rows(alias, name))
        damage(alias, name)
        before = rows(alias, name), Cursor.objects.using(alias).values().get()
        lines = spark_rebuilds(name, compare_only=True)
        assert lines[3] == (
            f"compared name={name} same=0 changed={count - 1} added=1 gone=1 unsettled=0"
        )
        kinds = [line.split()[0] for line in lines[4:]]
        assert kinds == ["changed"] * 3 + ["added", "gone"]
        assert ("count=77 -> " if name == "spark_sold" else "path='wrong' -> '") in lines[4]
        assert spark_rebuilds.result == count + 1
        assert (rows(alias, name), Cursor.objects.using(alias).values().get()) == before
        assert tables_left(alias) == []

    @pytest.mark.parametrize("change", [{"status": Upper("status")}, {"changed_at": None}])
    def test_a_letter_and_a_null_are_differences(self, alias, spark_rebuilds, change):
        projection("spark_status")
        work(alias, 10)
        run("spark_status")
        count = Status.objects.using(alias).filter(status="made").update(**change)
        lines = spark_rebuilds("spark_status", compare_only=True)
        assert f" changed={count} added=0 gone=0 " in lines[3]

    def test_the_time_of_writing_is_none(self):
        fields = [DateTimeField(auto_now=True), DateTimeField(auto_now_add=True), DateTimeField()]
        assert [comparison._is_compared(field) for field in fields] == [False, False, True]

    def test_equal_views_are_equal(self, alias, name, spark_rebuilds):
        work(alias, 10)
        run(name)
        lines = spark_rebuilds(name, compare_only=True)
        count = len(rows(alias, name))
        assert lines[3:] == [
            f"compared name={name} same={count} changed=0 added=0 gone=0 unsettled=0"
        ]
        assert spark_rebuilds.result == 0

    @pytest.mark.parametrize("when", ["before", "after the rows were made", "while they compare"])
    def test_what_one_side_has_not_applied_yet_is_no_difference(
        self, alias, name, spark_rebuilds, monkeypatch, when
    ):
        def late(function):
            def wrapper(*args, **options):
                work(alias, 3, seed=5)
                run(name)
                return function(*args, **options)

            return wrapper

        work(alias, 10)
        run(name)
        if when == "before":
            work(alias, 3, seed=5)
        else:
            place = SparkRebuild if when == "after the rows were made" else spark_rebuild
            attribute = "_compare" if place is SparkRebuild else "compare"
            monkeypatch.setattr(place, attribute, late(getattr(place, attribute)))
        MODELS[name].objects.using(alias).create(pk="99999")
        lines = spark_rebuilds(name, compare_only=True)
        assert " changed=0 added=0 gone=1 unsettled=" in lines[3]
        assert not lines[3].endswith("=0") or name == "spark_status"
        assert len(lines) == 5

    def test_a_view_that_is_far_behind_is_rebuilt_all_the_same(
        self, alias, spark_rebuilds, monkeypatch
    ):
        projection("spark_sold")
        monkeypatch.setattr(spark_rebuild, "MAX_UNSETTLED", 5)
        work(alias, 10)
        with pytest.raises(CommandError, match="more than 5 events behind"):
            spark_rebuilds("spark_sold", compare_only=True)
        lines = spark_rebuilds("spark_sold")
        assert lines[3].startswith("not compared name=spark_sold: the subscription is more than")
        Cursor.objects.using(alias).update(state="nonsense")
        lines = spark_rebuilds("spark_sold")
        assert lines[3].startswith("not compared name=spark_sold: The cursor's state")
        assert rows(alias, "spark_sold") == rebuilt(alias, "spark_sold")
        assert run("spark_sold") == 0


class TestRefused:
    @on("postgres")
    def test_what_apply_raises_is_told_with_its_event(self, alias, spark, spark_rebuilds):
        projection("spark_status")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made"), NewEvent("b", "made"), NewEvent("b", "bad")])
        before = rows(alias, "spark_status")
        with pytest.raises(CommandError) as caught:
            spark_rebuilds("spark_status", session=spark)
        position = Event.objects.using(alias).get(type="bad").pk
        text = str(caught.value)
        assert text.startswith(
            "The rebuild of 'spark_status' ended with PipelineError: Projection 'spark_status': "
            f"apply() of b@2 (bad, position {position} of outbox_event) raised ValueError: b@2 ("
        )
        assert text.endswith(
            "declared.py:30). The view and its subscription are as they were. Run it again."
        )
        assert rows(alias, "spark_status") == before
        assert tables_left(alias) == []

    @on("mariadb")
    def test_keys_that_are_one_to_the_database(self, alias, spark_rebuilds):
        projection("spark_status")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made"), NewEvent("A", "made")])
        with pytest.raises(CommandError, match=r"compare_bytes\(\) of outbox_app.models.collation"):
            spark_rebuilds("spark_status")

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("plain", "'plain' is no projection"),
            ("pointed", "points at projections.Pointed"),
            ("two", r"reads 2 logs \(.*manage.py outbox_rebuild two"),
            ("ledger", "reads the log ledger, not outbox_event"),
        ],
    )
    @on("default")
    def test_what_cannot_be_rebuilt(self, alias, options, name, text):
        @subscriber("plain")
        def handle(events): ...

        declare(StatusOf, "pointed", model=Pointed)
        declare(StatusOf, "two", logs=[Event, Ledger])
        declare(StatusOf, "ledger", logs=[Ledger])
        with pytest.raises(CommandError, match=text) as caught:
            rebuild_on_spark(Here(), options, name)
        assert caught.value.returncode == 2

    def test_another_database(self, alias, options):
        work(alias, 2)
        end = Plan.make(options, Filter()).end
        require_same_database(Event, end, using=alias)
        Event.objects.using(alias).filter(pk=end.position).delete()
        with pytest.raises(PipelineError, match="here there is none: it has read another"):
            require_same_database(Event, end, using=alias)
        Event.objects.using(alias).all().delete()
        require_same_database(Event, end, using=alias)


@on("mariadb")
def test_a_view_that_compares_bytes(alias, options, spark_rebuilds):
    projection("spark_status")
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@collation_database")
        [collation] = cursor.fetchone()
    with connection.schema_editor() as editor:
        compare_bytes("projections_status")(None, editor)
    try:
        with transaction.atomic(using=alias):
            publish_many(NewEvent(stream, "made") for stream in ("a", "A", "a ", "a"))
        run("spark_status")
        expected = rows(alias, "spark_status")
        assert len(expected) == 3
        assert rebuilt(alias, "spark_status") == expected
        lines = spark_rebuilds("spark_status")
        assert " same=3 changed=0 added=0 gone=0 " in lines[3]
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
    """All gaps of the log come at once, and have to settle before it can be read on."""
    from tests.pipeline.rebuilt import declared

    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.5}
    monkeypatch.setattr("outbox_app.log.windows.mysql.MAX_RUNS", 3)
    monkeypatch.setattr("outbox_app.log.spans.mysql.MAX_RUNS", 3)
    declared("spark_sold")
    work(alias, 60)
    set_failpoint("rebuild_folded", lambda: work(alias, 2, seed=9))
    spark_rebuilds("spark_sold")
    assert rows(alias, "spark_sold")
    found = rows(alias, "spark_sold")
    monkeypatch.undo()
    run("spark_sold")
    assert rows(alias, "spark_sold") == found == rebuilt(alias, "spark_sold")


def test_the_log_of_a_projection(alias):
    declare(StatusOf, "ledger", logs=[Ledger])
    assert log_of("ledger") == (Ledger, alias)
