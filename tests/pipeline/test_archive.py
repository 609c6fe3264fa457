"""The archive equals the log, row by row, however it was written, and for every reader."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from uuid import uuid4

import duckdb
import pyarrow
import pytest
from deltalake import DeltaTable
from django.db import connections
from py4j.protocol import Py4JError
from pyarrow import parquet
from pyspark.errors import PySparkException
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.models import Event
from outbox_app.pipeline import parquet as writing
from outbox_app.pipeline import read
from outbox_app.pipeline.archive_reader import _has_file_system
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.exceptions import ArchiveRefused, InvalidOption, InvalidSchema
from outbox_app.pipeline.parquet import (
    content_sum,
    read_batches,
    read_stream,
    write_days,
)
from outbox_app.pipeline.schema import COLUMNS, SCHEMA, arrow_types, some
from outbox_app.pipeline.source import Reader
from outbox_app.pipeline.store import Store
from outbox_app.pipeline.table import Archive
from tests.events.log.sessions import Session
from tests.faults.tools import on

from .harness import (
    archive,
    archived,
    assert_exact,
    entries,
    logged,
    named,
    publish_some,
    rows_of,
    source,
    tree,
)
from .local_context import LocalContext
from .test_source import struct

database = pytest.mark.django_db(transaction=True)

ARROW = arrow_types(SCHEMA)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "archive"


@database
def test_an_archive_is_its_log(alias, new_log, folder):
    publish_some(alias, 25, topic="eu", metadata={"by": "Žofie"})
    assert archive(alias, folder) == 25
    assert_exact(alias, folder)
    assert [entry["rows"] for entry in entries(folder)] == [4, 4, 4, 4, 4, 4, 1]
    assert [entry["batches"] for entry in entries(folder)] == list(range(1, 8))


@database
def test_texts_survive(alias, new_log, folder):
    texts = ["", "ä😀", "a ", "'; DROP --", '"\\', "{}", "%s %(x)s", "\u2028", "x" * 20_000]
    for n, text in enumerate(texts):
        publish_some(alias, 1, topic=text[:255], metadata={"text": text, "n": n})
    archive(alias, folder)
    assert_exact(alias, folder)


@database
def test_days_are_those_of_utc(alias, new_log, folder):
    ids = publish_some(alias, 12)
    midnight = datetime(2026, 3, 1, tzinfo=UTC)
    moments = [midnight + timedelta(microseconds=n) for n in (-1, 0, 1, -86_400_000_000)]
    for n, id in enumerate(ids):
        Event.objects.using(alias).filter(pk=id).update(recorded_at=moments[n % 4])
    archive(alias, folder, rows=100)
    assert_exact(alias, folder)
    files = Archive.load(str(folder), "outbox_event").files()
    assert {file.day for file in files} == {"2026-02-28", "2026-03-01"}
    for file in files:
        rows = parquet.read_table(folder / file.name, partitioning=None).to_pylist()
        assert {f"{row['recorded_at']:%Y-%m-%d}" for row in rows} == {file.day}
        assert file.rows == len(rows)
        assert (file.first, file.last) == (rows[0]["id"], rows[-1]["id"])


@database
def test_it_goes_on_where_it_ended(alias, new_log, folder):
    assert archive(alias, folder) == 0
    assert entries(folder) == []
    for count in (3, 0, 9, 1):
        publish_some(alias, count)
        assert archive(alias, folder) == count
        before = tree(folder)
        assert archive(alias, folder) == 0
        assert tree(folder) == before
        assert_exact(alias, folder)


@database
def test_what_is_committed_during_a_run_is_for_the_next(alias, new_log, folder, at):
    """So a run ends, however much is written."""
    publish_some(alias, 6)
    at("archive_done", lambda: publish_some(alias, 3))
    assert archive(alias, folder) == 6
    assert archive(alias, folder) == 3
    assert_exact(alias, folder)


@database
@on("postgres", "mariadb")
def test_late_commits_come_once_and_rollbacks_never(alias, new_log, folder):
    publish_some(alias, 3)
    with Session(alias) as late, Session(alias) as never:
        late.begin().publish("late", 3)
        never.begin().publish("never", 3)
        publish_some(alias, 3)
        archive(alias, folder)
        assert_exact(alias, folder)
        late.commit()
        never.rollback()
    publish_some(alias, 2)
    archive(alias, folder)
    assert_exact(alias, folder)
    assert sum(row[3] == "late" for row in archived(folder)) == 3


@database
@on("postgres")
def test_texts_survive_a_client_that_has_another_encoding(alias, new_log, folder, monkeypatch):
    """As libpq has it where a database is in Latin 1: both reads of a batch had its bytes."""
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    publish_some(alias, 1, metadata={"by": "Zoë"})
    archive(alias, folder)
    assert_exact(alias, folder)


@database
@on("mariadb")
def test_a_server_that_cuts_results_off(alias, new_log, folder):
    """What both reads of a batch lack is no difference."""
    publish_some(alias, 9)
    with connections[alias].cursor() as cursor:
        cursor.execute("SET GLOBAL sql_select_limit = 2")
        try:
            assert archive(alias, folder) == 9
        finally:
            cursor.execute("SET GLOBAL sql_select_limit = DEFAULT")
    assert_exact(alias, folder)


@database
@on("mariadb")
def test_a_server_that_ends_idle_sessions_soon(alias):
    """One that has planned an audit has nothing to do for as long as Spark counts."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SET GLOBAL wait_timeout = 30")
        try:
            with closing(connect(source(alias))) as planner:
                [(seconds,)] = planner.run("SELECT @@wait_timeout", [])
        finally:
            cursor.execute("SET GLOBAL wait_timeout = DEFAULT")
    assert seconds == 86400


@database
@on("postgres")
def test_a_role_whose_idle_sessions_end_soon(alias, monkeypatch):
    monkeypatch.setenv("PGOPTIONS", "-c idle_session_timeout=1h")
    with closing(connect(source(alias))) as planner:
        assert planner.run("SELECT current_setting('idle_session_timeout')", []) == [("0",)]


@database
@on("mariadb")
def test_batches_of_tombstones_are_archived_without_files(alias, new_log, folder):
    ids = publish_some(alias, 40)
    sealed = Event.objects.using(alias).filter(pk__in=ids[:32])
    for n, row in enumerate(sealed):
        fields = {"type": TOMBSTONE, "stream": TOMBSTONE, "version": -1 - n}
        Event.objects.using(alias).filter(pk=row.pk).update(**fields)
    assert archive(alias, folder, rows=1) == 8
    assert_exact(alias, folder)
    assert len(entries(folder)) == 40
    assert len(named(folder)) <= 8


@database
def test_a_stop_is_heard_between_batches(alias, new_log, folder):
    publish_some(alias, 12)
    answers = iter([False, False, True, True])
    archiver = Archiver(LocalContext(), source(alias), str(folder), max_rows=4)
    assert archiver.run(lambda: next(answers)) == 8
    archive(alias, folder)
    assert_exact(alias, folder)


@database
@on("default")
def test_everybody_reads_the_same(alias, new_log, folder, spark):
    """Archived by Spark; read by delta-rs, pyarrow, DuckDB, Spark and our own source."""
    ids = publish_some(alias, 2500)
    yesterday = Event.objects.using(alias).get(pk=ids[0]).recorded_at - timedelta(days=1)
    Event.objects.using(alias).filter(pk__in=ids[:1200]).update(recorded_at=yesterday)
    assert archive(alias, folder, session=spark, rows=2000) == 2500
    assert_exact(alias, folder)
    rows, table = logged(alias), DeltaTable(folder)
    dataset = table.to_pyarrow_dataset()
    assert rows_of([dataset.to_table(columns=list(COLUMNS))]) == rows
    files = [name.removeprefix("file://") for name in table.file_uris()]
    assert rows_of(parquet.read_table(name, partitioning=None) for name in files) == rows
    names = [*COLUMNS[:6], *COLUMNS[8:10]]
    expected = [(*row[:6], *row[8:10], _micros(row[10]), f"{row[10]:%Y-%m-%d}") for row in rows]
    with duckdb.connect() as connection:
        connection.register("archive", dataset)
        found = connection.execute(
            f"SELECT {', '.join(names)}, epoch_us(recorded_at), recorded_date::text "
            "FROM archive ORDER BY id"
        )
        assert found.fetchall() == expected
    frame = spark.read.parquet(*files).orderBy("id")
    found = frame.selectExpr(*names, "unix_micros(recorded_at)", "string(date(recorded_at))")
    assert [tuple(row) for row in found.collect()] == expected
    ours = Reader(replace(source(alias), archive=str(folder)), struct(SCHEMA))
    batches = [batch for part in ours.partitions() for batch in ours.read(part)]
    assert rows_of([pyarrow.Table.from_batches(batches)]) == rows


@database
@on("postgres", "mariadb")
def test_polars_reads_the_same(alias, new_log, folder):
    polars = pytest.importorskip("polars", reason="make venv installs it")
    publish_some(alias, 30)
    archive(alias, folder, rows=8)
    dataset = DeltaTable(folder).to_pyarrow_dataset()
    found = polars.scan_pyarrow_dataset(dataset).select(COLUMNS).collect()
    assert rows_of([found.to_arrow()]) == logged(alias)
    late = polars.scan_pyarrow_dataset(dataset).filter(polars.col("id") > 0, topic="nowhere")
    assert late.collect().is_empty()


@database
@on("mariadb")
def test_archive_and_log_are_one(alias, new_log, folder, spark):
    """Rows that were pruned come from the archive, late ones from the log, and each comes once."""

    def read(**given):
        reader = spark.read.format("outbox").option("archive", str(folder))
        options = source(alias)
        given |= {"url": options.url, "password": options.password}
        return reader.options(**given)

    ids = publish_some(alias, 20, topic="eu") + publish_some(alias, 10, topic="us")
    with Session(alias) as late:
        late.begin().publish("late", 5)
        archive(alias, folder, rows=9)
        whole = logged(alias)
        late.commit()
    Event.objects.using(alias).filter(pk__in=ids[:18]).delete()
    publish_some(alias, 7, topic="us", metadata={"later": True})
    expected = sorted({*whole, *logged(alias)})
    frame = read().load()
    assert sorted(row.id for row in frame.collect()) == [row[0] for row in expected]
    pairs = frame.select("message_id", "stream", "version").collect()
    assert sorted(map(tuple, pairs)) == sorted((row[9], row[3], row[4]) for row in expected)
    some = read(topics="us").schema("topic string, id bigint").load().collect()
    assert sorted((row.topic, row.id) for row in some) == [
        ("us", row[0]) for row in expected if row[2] == "us"
    ]
    types = read(types="happ*").schema("stream string").load().collect()
    assert [row.stream for row in types] == ["late"] * 5
    assert read(topics="eu,us", types="placed").load().count() == 37
    # And what was late is archived, as soon as it is looked again.
    assert archive(alias, folder) == 12
    assert read().load().count() == len(expected)


@database
@on("postgres")
def test_spark_reads_the_files_itself(alias, new_log, folder, spark, caplog, monkeypatch):
    """The same rows as from the log alone: pruned ones, late ones, and chosen ones."""
    odd = "eu's \\ ${spark.app.name}"
    ids = publish_some(alias, 20, topic=odd) + publish_some(alias, 10, topic="us")
    with Session(alias) as late:
        late.begin().publish("late", 5)
        archive(alias, folder, rows=9)
        late.commit()
    publish_some(alias, 7, topic="us")
    log = source(alias)
    expected = sorted(
        map(tuple, spark.read.format("outbox").options(**log.texts()).load().collect())
    )
    Event.objects.using(alias).filter(pk__in=ids[:18]).delete()
    frame = read(spark, log=log.texts(), archive=str(folder))
    assert sorted(map(tuple, frame.collect())) == expected
    assert "Location: InMemoryFileIndex" in frame._jdf.queryExecution().toString()
    for given, wanted in (
        ({"topics": "us"}, [row for row in expected if row[2] == "us"]),
        ({"topics": odd, "types": "plac*"}, [row for row in expected if row[2] == odd]),
    ):
        some = read(
            spark, log=replace(log, **given), archive=str(folder), schema="stream string, id bigint"
        )
        found = sorted(map(tuple, some.collect()), key=itemgetter(1))
        assert found == [(row[3], row[0]) for row in wanted]
    end = json.dumps(Archive.load(str(folder), "outbox_event").end.dump())
    bounded = read(spark, log=replace(log, end=end), archive=str(folder), schema="id bigint")
    assert sorted(row.id for row in bounded.collect()) == ids
    # A name that Spark takes for a pattern is read in Python.
    odd = folder.rename(folder.with_name("a[b]c"))
    assert "in Python" not in caplog.text
    caplog.set_level("INFO", "outbox_app.pipeline")
    other = read(spark, log=log, archive=str(odd), schema="id bigint")
    assert sorted(row.id for row in other.collect()) == [row[0] for row in expected]
    assert caplog.messages == [
        f"Archive is read in Python, as Spark has no file system for it archive={odd}"
    ]
    monkeypatch.chdir(odd)
    here = read(spark, log=log, archive=".", schema="id bigint")
    assert sorted(row.id for row in here.collect()) == [row[0] for row in expected]
    # So is an address for which the session has no connector.
    assert not _has_file_system(spark, "s3://bucket/archive")
    assert _has_file_system(spark, "file:///srv/archive")
    with pytest.raises(InvalidOption, match="leave out start"):
        read(spark, log=replace(log, start=end), archive=str(odd))


@database
@on("postgres")
@pytest.mark.parametrize("behind", [0, 2])
def test_a_frame_has_what_was_committed_when_it_was_made(alias, new_log, folder, spark, behind):
    """Read twice, it has the same rows; where nothing is behind the files, no Python reads."""
    ids = publish_some(alias, 5)
    archive(alias, folder, rows=10)
    ids += [id for _ in range(behind) for id in publish_some(alias, 1)]
    frame = read(spark, log=source(alias), archive=str(folder), schema="id bigint")
    for _ in range(2):
        publish_some(alias, 3)
        assert sorted(row.id for row in frame.collect()) == ids
    assert ("BatchScan outbox" in frame._jdf.queryExecution().toString()) == bool(behind)
    for given, says in (("id bigint, price int", "no column 'price'"), ("id int", "is bigint")):
        with pytest.raises(InvalidSchema, match=says):
            read(spark, log=source(alias), archive=str(folder), schema=given)


@pytest.fixture
def lenient(spark):
    """A session that ignores bad files, and in which ``timestamp`` has no zone."""
    said = {
        "spark.sql.files.ignoreCorruptFiles": "true",
        "spark.sql.files.ignoreMissingFiles": "true",
        "spark.sql.timestampType": "TIMESTAMP_NTZ",
    }
    for each in said.items():
        spark.conf.set(*each)
    yield
    for name in said:
        spark.conf.unset(name)


@database
@on("default")
def test_times_have_a_zone_whatever_the_session_says(alias, new_log, folder, spark, lenient):
    publish_some(alias, 2)
    archive(alias, folder)
    publish_some(alias, 1)

    def frame(schema):
        return read(spark, log=source(alias), archive=str(folder), schema=schema)

    for schema in (None, some("stream", "recorded_at")):
        assert frame(schema).schema["recorded_at"].dataType == TimestampType()
        assert frame(schema).count() == 3
    with pytest.raises(InvalidSchema, match="recorded_at is timestamp_ltz, not timestamp_ntz"):
        frame("recorded_at timestamp")


@database
@on("default")
def test_spark_finds_what_has_rotted(alias, new_log, folder, spark, lenient):
    publish_some(alias, 20)
    archive(alias, folder, rows=100)
    path = next(folder.glob("recorded*/*.parquet"))
    content = path.read_bytes()
    at = content.index(b"order-0")
    path.write_bytes(content[:at] + b"OTHER" + content[at + 5 :])
    # Spark keeps the checksums of what it wrote itself, and asks for the page's.
    frame = read(spark, log=source(alias), archive=str(folder), schema="stream string")
    with pytest.raises((PySparkException, Py4JError)) as raised:
        frame.collect()
    assert "CRC checksum verification failed" in str(raised.value)
    path.unlink()
    with pytest.raises((PySparkException, Py4JError), match=r"does not exist|NOT_EXIST"):
        frame.collect()


@pytest.mark.slow
def test_a_log_of_years_is_archived_a_file_a_day(tmp_path):
    """A batch of a quiet log has more days than a process may open files."""
    rows = _rows(1200, days=200)
    files = write_days(rows.to_batches(max_chunksize=300), Store(str(tmp_path)), "0", ARROW)
    assert len({file.name for file in files}) == len(files) == len({f.day for f in files}) == 200
    tables = [parquet.read_table(tmp_path / file.name, partitioning=None) for file in files]
    assert rows_of(tables) == rows_of([rows])


def test_large_events_are_in_small_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 10_000)
    rows = _rows(1000, days=1)
    store = Store(str(tmp_path))
    [file] = write_days(rows.to_batches(max_chunksize=50), store, "0", ARROW)
    assert parquet.ParquetFile(tmp_path / file.name).num_row_groups >= 10
    read = list(read_batches(store, file, ["data"]))
    assert sum(batch.num_rows for batch in read) == 1000
    assert max(batch.num_rows for batch in read) <= 100


def test_a_stream_is_read_in_order_from_the_files_that_may_have_it(tmp_path):
    """However its versions are spread over files, and first or last in them by its name."""
    streams = pyarrow.array(["a", "m", "z"] * 4)
    rows = _rows(12, days=1).set_column(3, "stream", streams)
    store = Store(str(tmp_path))
    parts = [rows.take(list(range(first, 12, 2))).to_batches() for first in (1, 0)]
    files = [
        file for n, part in enumerate(parts) for file in write_days(part, store, f"{n}", ARROW)
    ]
    for n, name in enumerate("amz"):
        found = read_stream(store, files, ["stream"], name)
        assert [row["id"] for row in found] == [n + 1, n + 4, n + 7, n + 10]
    store.open = None  # not opened
    assert read_stream(store, files, ["stream"], "zz") == []


def test_no_dictionary_is_made_of_what_is_never_there_twice(tmp_path):
    [file] = write_days(_rows(100, days=1).to_batches(), Store(str(tmp_path)), "0", ARROW)
    written = parquet.ParquetFile(tmp_path / file.name).metadata.row_group(0)
    chunks = [written.column(n) for n in range(written.num_columns)]
    plain = {each.path_in_schema for each in chunks if not each.has_dictionary_page}
    assert plain == {"id", "data", "message_id"}


def test_a_sum_of_rows_depends_on_their_content_only():
    """Not on their order, on the files that have them, or on columns that were added later."""
    rows = _rows(500, days=3)
    shuffled = rows.take(random.Random(1).sample(range(500), 500))
    total = content_sum(rows)
    assert content_sum(shuffled) == total
    assert (content_sum(rows[:200]) + content_sum(rows[200:])) % 2**128 == total
    assert content_sum(ARROW.empty_table()) == 0
    wider = rows.append_column("note", pyarrow.nulls(500, pyarrow.string()))
    assert content_sum(wider) == total
    swapped = rows.to_pylist()
    swapped[3]["data"], swapped[4]["metadata"] = '{"n": 1}', '{"n": 1}'
    other = type(rows).from_pylist(swapped, schema=ARROW)
    swapped[3], swapped[4] = ({**a, **{n: b[n] for n in ("data", "metadata")}}
                              for a, b in (swapped[3:5], swapped[4:2:-1]))  # fmt: skip
    others = [content_sum(type(rows).from_pylist(swapped, schema=ARROW)), content_sum(other)]
    assert len({total, content_sum(rows[1:]), *others}) == 4


def test_a_sum_of_rows_knows_every_type():
    values = {
        "number": [1, 2], "share": [1.5, float("nan")], "note": ["", None], "raw": [b"\xff", b""],
        "paid": [True, False], "on": [date(2026, 1, 1), None], "price": [Decimal("1.10"), None],
        "at": [datetime(2026, 1, 1, tzinfo=UTC), None],
    }  # fmt: skip
    rows = pyarrow.table({"id": [1, 2], **values})
    sums = {content_sum(rows)}
    for name in values:
        sums.add(content_sum(rows.drop_columns([name])))
    assert len(sums) == 1 + len(values)
    moved = rows.rename_columns(["id", "share", "number", *list(values)[2:]])
    assert content_sum(moved) not in sums


def _rows(count, *, days):
    start = datetime(2020, 1, 1, tzinfo=UTC)
    rows = [
        {
            **dict.fromkeys(("topic", "stream", "type", "data"), f"text {n}"),
            **{"id": n + 1, "txid": 0, "version": n, "slice": 7, "metadata": "{}"},
            "message_id": f"{n:036d}",
            "data": "{}",
            "recorded_at": start + timedelta(days=n * days // count),
        }
        for n in range(count)
    ]
    return pyarrow.Table.from_pylist(rows, schema=ARROW)


def _micros(moment):
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@database
def test_what_an_archive_had_at_an_offset_while_it_goes_on(alias, new_log, folder, monkeypatch):
    publish_some(alias, 6)
    archive(alias, folder)
    end = json.dumps(entries(folder)[-1]["end"])
    first = [row[0] for row in archived(folder)]
    publish_some(alias, 5)
    archive(alias, folder)
    publish_some(alias, 3)

    def read(end):
        reader = Reader(
            replace(source(alias), archive=str(folder), end=end),
            StructType([StructField("id", LongType())]),
        )
        return sorted(
            id
            for part in reader.partitions()
            for b in reader.read(part)
            for id in b["id"].to_pylist()
        )

    assert read(end) == first
    other = json.dumps({**json.loads(end), "message_id": str(uuid4())})
    with pytest.raises(ArchiveRefused, match="No batch of the archive"):
        read(other)
    # One that follows a log has millions of commits in a year. What it has now is in the newest.
    history, limits = DeltaTable.history, []
    monkeypatch.setattr(
        DeltaTable, "history", lambda self, n=None: limits.append(n) or history(self, n)
    )
    assert len(read(json.dumps(entries(folder)[-1]["end"]))) == 11
    assert limits == [1]
