"""The comparison that a rebuild on Spark prints before it changes rows, and its refusals."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.db.models import DateTimeField
from django.db.models.functions import Upper

from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events.exceptions import RebuildFailed, RebuildRefused
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections import comparison
from outbox_app.pipeline.driver.rebuild import rebuild_on_spark
from tests.events.log.own_log.models import Ledger
from tests.events.projections.conftest import in_thread
from tests.events.projections.declared import StatusOf, declare
from tests.events.projections.models import Pointed, Status
from tests.faults.tools import on
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


class TestComparison:
    def test_differences_are_shown_before_rows_are_replaced(self, alias, name, spark_rebuilds):
        work(alias, 10)
        run(name)
        right = rows(alias, name)
        damage(alias, name)
        lines = spark_rebuilds(name)
        count = len(right)
        assert lines[3] == f"compared name={name} rows={count} old={count} new={count}"
        assert [line.split()[0] for line in lines[4:10]] == ["old"] * 3 + ["new"] * 3
        wrong, key = ("count=77", "article") if name == "spark_sold" else ("path='wrong'", "stream")
        assert f"  old {key}={right[1][key]!r} " in lines[4]
        assert wrong in lines[4]
        added = " ".join(f"{column}={value!r:.80}" for column, value in right[0].items())
        assert lines[7] == f"  new {added}"
        assert rows(alias, name) == right
        assert tables_left(alias) == []

    @pytest.mark.parametrize("change", [{"status": Upper("status")}, {"changed_at": None}])
    def test_a_letter_and_a_null_are_differences(self, alias, spark_rebuilds, change):
        projection("spark_status")
        work(alias, 10)
        run("spark_status")
        count = Status.objects.using(alias).filter(status="made").update(**change)
        lines = spark_rebuilds("spark_status")
        assert count
        assert lines[3].endswith(f" old={count} new={count}")

    def test_the_time_of_writing_is_none(self):
        fields = [DateTimeField(auto_now=True), DateTimeField(auto_now_add=True), DateTimeField()]
        assert [comparison._is_compared(field) for field in fields] == [False, False, True]

    def test_equal_views_are_equal(self, alias, name, spark_rebuilds):
        work(alias, 10)
        handled = run(name)
        lines = spark_rebuilds(name)
        count = len(rows(alias, name))
        assert lines[2:4] == [
            f"loaded name={name} events={handled} rows={count}",
            f"compared name={name} rows={count} old=0 new=0",
        ]

    def test_a_model_with_an_order_is_compared(self, alias, spark_rebuilds, monkeypatch):
        projection("spark_status")
        monkeypatch.setattr(Status._meta, "ordering", ["-status"])
        work(alias, 10)
        run("spark_status")
        Status.objects.using(alias).create(pk="99999")
        assert spark_rebuilds("spark_status")[3].endswith(" old=1 new=0")

    def test_rows_that_are_behind_count_and_are_rebuilt_all_the_same(
        self, alias, name, spark_rebuilds
    ):
        work(alias, 10)
        run(name)
        work(alias, 3, seed=5)
        Cursor.objects.using(alias).update(state="nonsense")
        compared = spark_rebuilds(name)[3]
        assert compared.startswith(f"compared name={name} rows=")
        assert not compared.endswith(" old=0 new=0")
        assert rows(alias, name) == rebuilt(alias, name)
        assert run(name) == 0


class TestRefused:
    @on("postgres")
    def test_what_apply_raises_is_told_with_its_event(self, alias, spark, spark_rebuilds):
        projection("spark_status")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made"), NewEvent("b", "made"), NewEvent("b", "bad")])
        before = rows(alias, "spark_status")
        with pytest.raises(RebuildFailed) as caught:
            spark_rebuilds("spark_status", session=spark)
        position = Event.objects.using(alias).get(type="bad").pk
        text = str(caught.value)
        assert text.startswith(
            "The rebuild of 'spark_status' failed with PipelineError: Projection 'spark_status': "
            f"apply() of b@2 (bad, position {position} of outbox_event) raised ValueError: b@2 ("
        )
        assert text.endswith(
            "declared.py:30). The view and its subscription are unchanged, unless only the reply "
            "to its COMMIT was lost. Run the rebuild again."
        )
        assert rows(alias, "spark_status") == before
        assert tables_left(alias) == []

    @on("mariadb")
    def test_keys_that_are_one_to_the_database(self, alias, spark_rebuilds):
        projection("spark_status")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made"), NewEvent("A", "made")])
        text = "declare the primary key with outbox_app.fields.CharField"
        with pytest.raises(RebuildFailed, match=text):
            spark_rebuilds("spark_status")

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("plain", "'plain' is not a projection"),
            ("pointed", "points at projections.Pointed"),
            ("two", r"reads 2 logs \(.*manage.py outbox_rebuild two"),
        ],
    )
    @on("default")
    def test_what_cannot_be_rebuilt(self, alias, options, name, text):
        @subscriber("plain")
        def handle(events): ...

        declare(StatusOf, "pointed", model=Pointed)
        declare(StatusOf, "two", logs=[Event, Ledger])
        with pytest.raises(RebuildRefused, match=text) as caught:
            rebuild_on_spark(LocalContext(), options, name)
        assert caught.value.returncode == 2
