"""The code of docs/howto/restore-from-archive.md, run with a real archive."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.postgres.fields import ArrayField, DateTimeRangeField
from django.core.management import call_command
from django.db import connections, models, transaction
from django.test.utils import isolate_apps
from pyarrow import parquet

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import prune_events, publish, subscriber
from outbox_app.events.exceptions import ForeignCursor
from outbox_app.events.models import Event, EventLog
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.driver.archive_lookup import archived_versions
from outbox_app.pipeline.driver.pipeline import Pipeline
from tests.docs.test_code_in_docs import ROOT, blocks
from tests.faults.tools import on

from .harness import archive, archived, logged, source
from .local_context import LocalContext

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = ROOT / "docs" / "howto" / "restore-from-archive.md"


@pytest.fixture
def page() -> dict[str, Any]:
    """The names that the page's code defines."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE):
        exec(block, names)
    return names


@pytest.fixture
def stays(alias):
    """A log for one test, with columns whose type in archives differs from Django's."""
    with isolate_apps("tests.events.log.own_log"):

        class Stay(EventLog):
            lasted = models.DurationField(null=True)
            address = models.GenericIPAddressField(null=True)
            left_at = models.DateTimeField(null=True)

            class Meta(EventLog.Meta):
                app_label = "own_log"

    with connections[alias].schema_editor() as editor:
        editor.create_model(Stay)
    yield Stay
    with connections[alias].schema_editor() as editor:
        editor.delete_model(Stay)


@pytest.fixture
def publish_orders(alias):
    """``publish_orders(6)``: publish 6 events, for each stream in turn."""

    def make(count: int) -> None:
        for number in range(count):
            with transaction.atomic(using=alias):
                data = {"n": number, "price": 1.5e-7, "name": "Käse 🧀", "more": [None, {"a": 1}]}
                publish(f"order-{number % 3}", "order.placed", data, metadata={"by": "ann"})

    return make


@pytest.fixture
def run(alias):
    """``run("name")``: run a subscription to the end of the log. Returns the positions."""
    given: dict[str, list[int]] = {}

    def declare(name: str) -> None:
        @subscriber(name)
        def note(events):
            given[name] += [event.id for event in events]

    def make(name: str) -> list[int]:
        if name not in given:
            declare(name)
        given[name] = []
        Runner([declared.subscriber_named(name)]).run(once=True)
        return given[name]

    return make


def texts(folder) -> dict[int, tuple[str, str]]:
    """The JSON of an archive by position, as its files have it."""
    paths = Path(folder).glob("*/*.parquet")
    rows = [row for path in paths for row in parquet.ParquetFile(path).read().to_pylist()]
    return {row["id"]: (row["data"], row["metadata"]) for row in rows}


@on("postgres", "mariadb")
def test_lost_rows_are_found_and_put_back(
    alias, tmp_path, settings, new_log, page, publish_orders, run
):
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.001}
    folder = str(tmp_path / "archive")
    publish_orders(3)
    run("behind")
    publish_orders(8)
    run("handled")
    archive(alias, folder)
    before = logged(alias)
    ids = [row[0] for row in before]
    # Not the first one, or it would pass for pruned; not the last one, which the end names.
    gone = [ids[4], ids[7], ids[9]]
    Event.objects.using(alias).filter(pk__in=gone)._raw_delete(alias)
    run("passed over")
    publish_orders(3)
    run("passed over")

    lost = list(page["lost"](folder, using=alias))
    assert [row["id"] for row in lost] == gone
    assert page["put_back"](lost, using=alias) == 3

    assert logged(alias)[:11] == before
    # Letter for letter, as the audit compares them: JSON, too.
    archive(alias, tmp_path / "again")
    again = texts(tmp_path / "again")
    assert {id: again[id] for id in ids} == texts(folder)
    newer = [row[0] for row in logged(alias)[11:]]
    assert run("handled") == newer
    assert run("passed over") == []
    assert run("behind") == ids[3:] + newer
    call_command("outbox_subscriptions", "replay", "passed over", "--from", str(gone[0] - 1))
    assert run("passed over") == ids[4:] + newer


@pytest.mark.parametrize("use_tz", [True, False])
def test_columns_of_a_logs_own_and_times_are_put_back(
    alias, tmp_path, settings, page, stays, use_tz
):
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Kolkata"
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.001}
    with transaction.atomic(using=alias):
        for number in range(4):
            publish("stay", "begun", {"n": number}, log=stays, using=alias)
    rows = stays.objects.using(alias).order_by("pk")
    left_at = rows[0].recorded_at + timedelta(microseconds=1)
    lasted = timedelta(days=2, microseconds=7)
    rows.update(lasted=lasted, address="10.0.0.1", left_at=left_at)
    before = list(rows.values())
    archiver = Archiver(LocalContext(), source(alias, stays), str(tmp_path / "archive"), write=str)
    archiver.run()
    found = archived_versions(stays, "stay", folder=str(tmp_path / "archive"), using=alias)
    assert [{name: getattr(row, name) for name in before[0]} for row in found] == before
    stays.objects.using(alias).filter(pk=before[1]["id"])._raw_delete(alias)
    lost = page["lost"](str(tmp_path / "archive"), log=stays, using=alias)
    assert page["put_back"](lost, log=stays, using=alias) == 1
    assert list(rows.values()) == before


@on("postgres")
def test_arrays_and_ranges_of_versions_that_have_sunk(alias, tmp_path):
    with isolate_apps("tests.events.log.own_log"):

        class Tagged(EventLog):
            tags = ArrayField(models.CharField(max_length=9, null=True), null=True)
            cells = ArrayField(models.IntegerField(), size=2, null=True)
            during = DateTimeRangeField(null=True)

            class Meta(EventLog.Meta):
                app_label = "own_log"

    with connections[alias].schema_editor() as editor:
        editor.create_model(Tagged)
    try:
        with transaction.atomic(using=alias):
            publish("a", "tagged", log=Tagged, using=alias)
            publish("a", "tagged", log=Tagged, using=alias)
        rows = Tagged.objects.using(alias).order_by("pk")
        now = rows[0].recorded_at
        during = (now, now + timedelta(hours=1))
        rows.filter(version=1).update(tags=["a,b", '"', "", None], cells=[1, 2], during=during)
        before = list(rows.values())
        Archiver(LocalContext(), source(alias, Tagged), str(tmp_path / "archive"), write=str).run()
        found = archived_versions(Tagged, "a", folder=str(tmp_path / "archive"), using=alias)
        assert [{name: getattr(row, name) for name in before[0]} for row in found] == before
    finally:
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Tagged)


@on("postgres", "mariadb")
def test_without_the_row_that_the_end_names_nothing_is_archived_until_it_is_back(
    alias, tmp_path, new_log, page, publish_orders
):
    folder = str(tmp_path / "archive")
    publish_orders(4)
    archive(alias, folder)
    before = logged(alias)
    Event.objects.using(alias).filter(pk=before[-1][0])._raw_delete(alias)
    publish_orders(2)
    with pytest.raises(ForeignCursor, match=f"at position {before[-1][0]} of"):
        archive(alias, folder)
    assert page["put_back"](page["lost"](folder, using=alias), using=alias) == 1
    assert archive(alias, folder) == 2
    assert archived(folder) == logged(alias)


@on("postgres", "mariadb")
def test_pruned_rows_are_read_where_they_are_and_put_back_on_demand(
    alias, spark, tmp_path, new_log, page, publish_orders, run
):
    folder = str(tmp_path / "archive")
    publish_orders(6)
    Event.objects.using(alias).update(recorded_at=DatabaseNow() - timedelta(days=10))
    archive(alias, folder)
    publish_orders(3)
    before = logged(alias)
    assert prune_events(using=alias, older_than=5, archive=folder, write=str) == 6

    log = Pipeline(spark, source(alias), Event, alias)
    rows = log.read("id bigint", archive=folder).collect()
    assert sorted(row.id for row in rows) == [row[0] for row in before]
    assert list(page["lost"](folder, using=alias)) == []
    assert page["put_back"](page["lost"](folder, first=1, using=alias), using=alias) == 6
    assert logged(alias) == before
    assert run("new") == [row[0] for row in before]
