"""A log's own columns are archived, read and audited like all others, and may be added later."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from django.db import connections, transaction
from pyarrow import parquet

from outbox_app.events import publish
from outbox_app.pipeline.archive_reader import file_batches, planned, read
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.driver.archive_lookup import ArchiveLookup
from outbox_app.pipeline.exceptions import ArchiveRefused, InvalidSchema
from outbox_app.pipeline.schema import arrow_types
from outbox_app.pipeline.table import Archive
from tests.events.log.own_log.models import Visit
from tests.faults.tools import on
from tests.servers.mysql import MARIADB

from .harness import archive, named, source
from .local_context import LocalContext

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = Visit._meta.db_table
AT = datetime(2026, 1, 31, 23, 59, 59, 123456, tzinfo=UTC)
#: Name, what each vendor declares (PostgreSQL, MySQL, SQLite), a value in SQL, and in Arrow.
COLUMNS = [
    ("flag", "boolean", "tinyint(1)", "bool", "1 = 1", True),
    ("number", "integer", "int", "integer", "-7", -7),
    ("share", "double precision", "double", "real", "0.5", 0.5),
    ("due", "date", "date", "date", "'2026-01-31'", date(2026, 1, 31)),
    ("scan", "bytea", "blob", "BLOB", "{scan}", b"\x00\xff'"),
    ("note", "varchar(20)", "varchar(20)", "varchar(20)", "'ä % 😀'", "ä % 😀"),
    ("Order", "text", "text", "text", "'x'", "x"),
    ("at", "timestamptz", "datetime(6)", "datetime", "{at}", AT),
]
#: Those that are not the same everywhere.
AMOUNTS = {
    "postgresql": ("numeric(10,2)", Decimal("-12.30")),
    "mysql": ("decimal(10,2)", Decimal("-12.30")),
    "sqlite": ("decimal", "-12.3"),
}
SCAN = {"postgresql": r"'\x00ff27'::bytea"}
MOMENT = {"postgresql": "'2026-01-31 23:59:59.123456Z'"}


@pytest.fixture
def run(alias):
    """``run(sql)``: execute it; columns added by ``run.add`` are dropped after the test."""
    given = []

    def execute(sql):
        with connections[alias].cursor() as cursor:
            cursor.execute(sql.replace("%", "%%"), [])

    def add(name, declared):
        quoted = connections[alias].ops.quote_name(name)
        execute(f"ALTER TABLE {TABLE} ADD COLUMN {quoted} {declared}")
        given.append(quoted)
        return quoted

    execute.add = add
    execute.given = given
    yield execute
    for quoted in given:
        execute(f"ALTER TABLE {TABLE} DROP COLUMN {quoted}")


def publish_visits(alias, count):
    with transaction.atomic(using=alias):
        for n in range(count):
            publish("visit", "made", {"n": n}, log=Visit, using=alias)


def archived(folder):
    schema = None
    tables = [parquet.read_table(f"{folder}/{n}", schema=schema, partitioning=None)
              for n in named(folder)]  # fmt: skip
    return pa.concat_tables(tables, promote_options="default").sort_by("id").to_pylist()


def comparison(alias, folder):
    """Return how many rows agree, what is wrong with the next, and what is not compared."""
    ids = list(Visit.objects.using(alias).order_by("pk").values_list("pk", flat=True))
    lookup = ArchiveLookup(str(folder), Visit, using=alias)
    return *lookup.first(ids, lock=False), lookup.left_out


def read_with_archive(alias, folder):
    options = source(alias, Visit, archive=str(folder))
    with closing(connect(options)) as database:
        schema = arrow_types(database.schema())
    batches = [
        batch
        for part in planned(options).parts
        for batch in file_batches(part.files, schema, options)
    ]
    return pa.Table.from_batches(batches).sort_by("id").to_pylist()


def test_every_type_is_archived_as_it_is(alias, new_log, run, tmp_path):
    vendor = connections[alias].vendor
    declared, amount = AMOUNTS[vendor]
    wanted = {"amount": amount}
    values = {run.add("amount", declared): "-12.30"}
    for name, *types, sql, value in COLUMNS:
        kind = types[["postgresql", "mysql", "sqlite"].index(vendor)]
        scan, at = SCAN.get(vendor, "X'00ff27'"), MOMENT.get(vendor, "'2026-01-31 23:59:59.123456'")
        values[run.add(name, kind)] = sql.format(scan=scan, at=at) if "{" in sql else sql
        wanted[name] = value
    if vendor == "postgresql":
        values[run.add("tags", "text[]")] = "'{a,b}'"
        wanted["tags"] = "{a,b}"
    json_kind = {"postgresql": "jsonb", "mysql": "json", "sqlite": "text"}[vendor]
    extra = run.add("extra", json_kind)
    run.add(
        "doubled", "integer GENERATED ALWAYS AS (version * 2) STORED"
    ) if vendor != "sqlite" else 0
    publish_visits(alias, 2)
    changes = ", ".join(f"{name} = {sql}" for name, sql in values.items())
    run(f"UPDATE {TABLE} SET {changes}, {extra} = '{{\"a\": [1]}}' WHERE version = 1")
    assert archive(alias, tmp_path, log=Visit) == 2
    [full, empty] = archived(tmp_path)
    assert {name: full[name] for name in wanted} == wanted
    assert json.loads(full["extra"]) == {"a": [1]}
    assert {empty[name] for name in [*wanted, "extra"]} == {None}
    assert "doubled" not in full
    assert comparison(alias, tmp_path) == (2, "", [])
    for name in wanted:
        quoted = connections[alias].ops.quote_name(name)
        run(f"UPDATE {TABLE} SET {quoted} = NULL WHERE version = 1")
        agree, why, _ = comparison(alias, tmp_path)
        assert (agree, why.partition(" (")[0]) == (0, f"differs from the archived row in {name}")
        run(f"UPDATE {TABLE} SET {quoted} = {values[quoted]} WHERE version = 1")
    assert comparison(alias, tmp_path) == (2, "", [])
    assert read_with_archive(alias, tmp_path) == [full, empty]


@on("postgres")
def test_no_number_is_archived_as_it_is(alias, new_log, run, tmp_path):
    share = run.add("share", "double precision")
    publish_visits(alias, 2)
    run(f"UPDATE {TABLE} SET {share} = 'NaN' WHERE version = 1")
    assert archive(alias, tmp_path, log=Visit) == 2
    assert [repr(row["share"]) for row in archived(tmp_path)] == ["nan", "None"]
    assert comparison(alias, tmp_path) == (2, "", [])
    run(f"UPDATE {TABLE} SET {share} = 0 WHERE version = 1")
    assert comparison(alias, tmp_path)[0] == 0


@on("postgres", "mariadb")
def test_a_value_that_its_type_in_the_archive_cannot_hold_is_named(alias, new_log, run, tmp_path):
    cases = {
        "postgresql": [("numeric(10,2)", "'NaN'")],
        "mysql": [("bigint unsigned", "18446744073709551615"), ("tinyint(1)", "2")],
    }
    publish_visits(alias, 1)
    for n, (declared, value) in enumerate(cases[connections[alias].vendor]):
        odd = run.add(f"odd{n}", declared)
        run(f"UPDATE {TABLE} SET {odd} = {value}")
        with pytest.raises(InvalidSchema, match=rf"Column odd{n} has a value that is no \w+.*: "):
            archive(alias, tmp_path, log=Visit)
        run(f"UPDATE {TABLE} SET {odd} = NULL")
    assert archive(alias, tmp_path, log=Visit) == 1


@on("postgres")
def test_infinity_is_the_end_of_all_times(alias, new_log, run, tmp_path):
    """Arrow has none, and would have both 290,000 years before Christ."""
    due, at = run.add("due", "date"), run.add("at", "timestamptz")
    publish_visits(alias, 4)
    for version, value in enumerate(("infinity", "-infinity", "0044-03-15 BC"), 1):
        run(f"UPDATE {TABLE} SET {due} = '{value}', {at} = '{value}' WHERE version = {version}")
    archive(alias, tmp_path, log=Visit)
    [path] = named(tmp_path)
    table = parquet.read_table(f"{tmp_path}/{path}", partitioning=None).sort_by("id")
    first, last, ides = date.min, date.max, -735160
    assert table["due"].cast(pa.int32()).to_pylist() == [
        *((each - date(1970, 1, 1)).days for each in (last, first)),
        ides,
        None,
    ]
    ends = [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)]
    assert table["at"][:2].to_pylist() == ends
    assert comparison(alias, tmp_path) == (4, "", [])


@on("postgres", "mariadb")
def test_a_row_that_was_recorded_at_no_moment_is_named(alias, new_log, run, tmp_path):
    """Written by hand. No file of an archive could have its day."""
    publish_visits(alias, 3)
    values = {"postgresql": ("infinity", "-infinity", "10000-01-01"), "mysql": ("0000-00-00",)}
    rows = Visit.objects.using(alias)
    position = rows.values_list("pk", flat=True).get(version=2)
    for value in values[connections[alias].vendor]:
        run("SET sql_mode = ''") if alias == MARIADB else None
        run(f"UPDATE {TABLE} SET recorded_at = '{value}' WHERE version = 2")
        with pytest.raises(InvalidSchema, match=rf"recorded_at .* at position {position}\b"):
            archive(alias, tmp_path, log=Visit, rows=1)
    rows.filter(version=2).update(recorded_at=AT)
    assert archive(alias, tmp_path, log=Visit, rows=1) == 2


@on("postgres")
def test_a_number_that_spark_has_no_decimal_for_is_text(alias, new_log, run, tmp_path):
    rate = run.add("rate", "numeric(3,5)")  # 0.00123, since PostgreSQL 15
    publish_visits(alias, 1)
    run(f"UPDATE {TABLE} SET {rate} = 0.00123")
    archive(alias, tmp_path, log=Visit)
    assert [row["rate"] for row in archived(tmp_path)] == ["0.00123"]
    assert comparison(alias, tmp_path) == (1, "", [])


@pytest.mark.timeout(300)
@on("postgres")
def test_old_dates_are_what_they_are_whatever_the_session_says(
    alias, new_log, run, tmp_path, spark
):
    """Spark may take days before 1582 for days of the Julian calendar."""
    due = run.add("due", "date")
    publish_visits(alias, 1)
    run(f"UPDATE {TABLE} SET {due} = '0099-03-01'")
    archive(alias, tmp_path, log=Visit)
    name = "spark.sql.parquet.datetimeRebaseModeInRead"
    spark.conf.set(name, "LEGACY")
    try:
        frame = read(spark, log=source(alias, Visit), archive=str(tmp_path), schema="due date")
        assert frame.collect() == [(date(99, 3, 1),)]
    finally:
        spark.conf.unset(name)


@on("mariadb")
def test_dates_that_there_are_not_are_null_as_in_django(alias, new_log, run, tmp_path):
    due, at = run.add("due", "date"), run.add("at", "datetime(6)")
    publish_visits(alias, 4)
    zero, partial = "'0000-00-00'", "'2026-05-00'"
    run("SET sql_mode = 'STRICT_TRANS_TABLES'")
    run(f"UPDATE {TABLE} SET {due} = {zero}, {at} = {zero} WHERE version = 1")
    run(f"UPDATE {TABLE} SET {due} = {partial}, {at} = {partial} WHERE version = 2")
    run(f"UPDATE {TABLE} SET {due} = '2000-01-10', {at} = '2000-01-10' WHERE version = 3")
    assert archive(alias, tmp_path, log=Visit) == 4
    rows = archived(tmp_path)
    assert [row["due"] for row in rows] == [None, None, date(2000, 1, 10), None]
    assert [row["at"] for row in rows] == [None, None, datetime(2000, 1, 10, tzinfo=UTC), None]
    assert comparison(alias, tmp_path) == (4, "", [])
    assert read_with_archive(alias, tmp_path) == rows


@pytest.mark.usefixtures("new_log")
def test_a_column_that_comes_while_the_log_is_followed(alias, run, tmp_path):
    publish_visits(alias, 2)

    def wait(seconds):
        if seconds and not run.given:
            note = run.add("note", "varchar(20)")
            publish_visits(alias, 2)
            run(f"UPDATE {TABLE} SET {note} = 'x'")
            return False
        return bool(seconds)

    folder = str(tmp_path / "archive")
    Archiver(LocalContext(), source(alias, Visit), folder, write=str).follow(1.0, wait)
    kept = Archive.load(folder, TABLE)
    notes = [row["note"] for file in kept.files() for row in kept.read(file).to_pylist()]
    assert notes == [None, None, "x", "x"]


@on("default")
def test_files_from_before_a_column_are_merged_alone(alias, new_log, run, tmp_path, monkeypatch):
    """Else a row from before would have NULL, and the log may have filled the column since."""
    monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 4)
    publish_visits(alias, 3)
    archive(alias, tmp_path, log=Visit, rows=1)
    note = run.add("note", "varchar(20)")
    publish_visits(alias, 3)
    run(f"UPDATE {TABLE} SET {note} = 'x'")
    archive(alias, tmp_path, log=Visit, rows=1)
    merged = [parquet.read_schema(f"{tmp_path}/{name}").names for name in named(tmp_path)]
    assert sorted("note" in names for names in merged) == [False, True]
    assert comparison(alias, tmp_path) == (6, "", [])
    run(f"UPDATE {TABLE} SET {note} = 'y' WHERE version IN (2, 5)")
    assert comparison(alias, tmp_path)[0] == 4


def test_a_column_that_comes_later(alias, new_log, run, tmp_path):
    publish_visits(alias, 3)
    archive(alias, tmp_path, log=Visit)
    note = run.add("note", "varchar(20)")
    publish_visits(alias, 2)
    run(f"UPDATE {TABLE} SET {note} = 'later' WHERE version > 3")
    archive(alias, tmp_path, log=Visit)
    expected = [None] * 3 + ["later"] * 2
    assert [row["note"] for row in read_with_archive(alias, tmp_path)] == expected
    run(f"UPDATE {TABLE} SET {note} = 'filled' WHERE version <= 3")  # as a default does
    assert comparison(alias, tmp_path) == (5, "", [])
    run(f"ALTER TABLE {TABLE} DROP COLUMN {note}")
    run.given.clear()
    publish_visits(alias, 1)
    archive(alias, tmp_path, log=Visit)
    assert [row.get("note") for row in archived(tmp_path)] == [*expected, None]
    assert comparison(alias, tmp_path) == (6, "", ["note, which the log has no more"])
    run.add("note", "integer")
    assert comparison(alias, tmp_path) == (6, "", ["note, which was string"])
    publish_visits(alias, 1)
    before = named(tmp_path)
    with pytest.raises(ArchiveRefused, match=r"Column note of own_log_visit is int64 now"):
        archive(alias, tmp_path, log=Visit)
    assert named(tmp_path) == before
