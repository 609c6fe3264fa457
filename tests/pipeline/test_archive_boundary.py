"""The archive advances and old rows are pruned while a reader reads both: no row is lost."""

from __future__ import annotations

import pyarrow as pa
import pytest
from django.core.management import call_command
from pyspark.errors import PySparkException

from outbox_app.events.exceptions import ReadRefused
from outbox_app.events.models import Event, Gap
from outbox_app.pipeline import archive_reader
from outbox_app.pipeline.driver import run
from outbox_app.pipeline.driver.pipeline import Pipeline
from outbox_app.pipeline.exceptions import PipelineError
from outbox_app.pipeline.offset import Offsets
from outbox_app.pipeline.schema import arrow_types
from outbox_app.pipeline.session import reason
from outbox_app.pipeline.source import OutboxDataSource, batches
from tests.faults.tools import on

from .harness import archive, publish_some, source
from .test_source import struct

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.fixture
def sink(alias, tmp_path):
    """``sink()``: archive the log, and prune its old events."""

    def make() -> None:
        archive(alias, tmp_path)
        call_command("outbox_prune", "--archived", str(tmp_path), "--older-than=3", verbosity=0)

    return make


@pytest.fixture
def ids(alias, tmp_path, old):
    """The positions of events: some in the archive, the others only in the log."""
    first = old(4)
    archive(alias, tmp_path)
    return first + old(8)


@pytest.fixture
def while_planned(monkeypatch, sink):
    """``while_planned(times)``: call sink() before so many queries for the lowest position."""
    lowest, left = Offsets.lowest, []

    def act(self, ranges):
        if left:
            left.pop()()
        return lowest(self, ranges)

    monkeypatch.setattr(Offsets, "lowest", act)
    return lambda times, *before: left.extend([lambda: ([do() for do in before], sink())] * times)


def read(reader):
    parts = reader.partitions()
    return sorted(row for part in parts for each in reader.read(part) for row in ids_of(each))


def ids_of(batch: pa.RecordBatch) -> list[int]:
    return batch["id"].to_pylist()


@pytest.mark.parametrize("young", [0, 1])
def test_a_plan_has_all_rows_if_the_log_is_pruned_while_it_is_made(
    alias, tmp_path, ids, while_planned, sink, young
):
    ids += publish_some(alias, young) if young else []
    while_planned(1)
    options = source(alias, archive=str(tmp_path))
    found, schema = [], arrow_types("id bigint")
    for part in archive_reader.planned(options).parts:
        found += [row for each in batches(options, part, schema) for row in ids_of(each)]
    assert sorted(found) == ids


def test_a_plan_is_not_made_for_ever(alias, tmp_path, ids, old, while_planned, monkeypatch):
    monkeypatch.setattr(archive_reader, "PLANS", 3)
    while_planned(3, lambda: old(1))
    with pytest.raises(ReadRefused, match="has grown 3 times while the read was planned"):
        archive_reader.planned(source(alias, archive=str(tmp_path)))


def test_a_read_fails_where_rows_went_after_it_was_planned(
    alias, tmp_path, ids, while_planned, sink, source_options, old
):
    options = source_options(alias, archive=str(tmp_path))
    reader = OutboxDataSource(options).reader(struct("id bigint, stream string"))
    while_planned(1)
    assert read(reader) == ids
    ids += old(3)
    parts = reader.partitions()
    sink()
    found = []
    with pytest.raises(ReadRefused, match=f"Position {ids[-3]} was removed from outbox_event"):
        found += [row for part in parts for each in reader.read(part) for row in ids_of(each)]
    assert read(reader) == ids


@on("postgres")
def test_a_frame_fails_where_rows_went_after_it_was_made(
    alias, tmp_path, ids, spark, sink, source_options
):
    def frame():
        return archive_reader.read(
            spark, log=source_options(alias), archive=str(tmp_path), schema="id bigint"
        )

    made, unread = frame(), frame()
    assert sorted(row.id for row in made.collect()) == ids
    sink()  # all of it, so that nothing is left to plan for one that was not read yet
    for each in (made, unread):
        with pytest.raises(PySparkException) as failed:
            each.collect()
        assert reason(failed.value).startswith(f"ReadRefused: Position {ids[4]} was removed from")
    assert sorted(row.id for row in frame().collect()) == ids


@on("default")
def test_an_audit_is_refused_where_rows_went_meanwhile_and_works_again(
    alias, tmp_path, ids, spark, sink, monkeypatch
):
    """Checking all files takes minutes."""
    check = run.check_files

    def checked(session, table):
        monkeypatch.setattr(run, "check_files", check)
        check(session, table)
        sink()

    monkeypatch.setattr(run, "check_files", checked)
    pipeline = Pipeline(spark, source(alias), Event, alias)
    with pytest.raises(PipelineError, match="was archived and pruned while it was audited"):
        run.run_audit(pipeline, archive=str(tmp_path), write=str)
    assert not Gap.objects.using(alias).exists()
    audit = run.run_audit(pipeline, archive=str(tmp_path), write=str)
    assert (audit.sound, audit.events) == (True, len(ids))
    assert not Gap.objects.using(alias).exists()
