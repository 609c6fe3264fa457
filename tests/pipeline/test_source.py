"""The data source returns the rows of the log, for every query and every role."""

from __future__ import annotations

import io
import json
import pickle
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID

import pyarrow as pa
import pytest
from django.db import transaction
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.types import (
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from pyspark.sql.worker import lookup_data_sources

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import ForeignCursor, ReadRefused
from outbox_app.events.models import Event, StreamHead
from outbox_app.models import InboxEntry
from outbox_app.pipeline.archive_reader import ReadPartition
from outbox_app.pipeline.database import connect, connected
from outbox_app.pipeline.exceptions import InvalidOption, InvalidSchema, PipelineError, Unreachable
from outbox_app.pipeline.offset import Offsets
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.schema import COLUMNS, SCHEMA, arrow_types
from outbox_app.pipeline.session import reason
from outbox_app.pipeline.source import OutboxDataSource
from tests.events.log.conformance import commit, concurrent
from tests.events.log.own_log.models import Ledger, Visit
from tests.events.log.sessions import Session, execute, truncate
from tests.faults.tools import on
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)

TRICKY = 'it\'s "quoted" back\\slash %s 100% ä日本語🚀\n\ttab'


@pytest.fixture(autouse=True)
def small_parts(request, monkeypatch):
    monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 1)
    if "alias" in request.fixturenames:
        truncate(request.getfixturevalue("alias"))


@pytest.fixture
def history(alias):
    """Events of all kinds, at times with and without microseconds."""
    events = [
        NewEvent("a", "made", {"text": TRICKY, "n": 1.5, "null": None, "list": [1, {}]}),
        NewEvent(TRICKY.strip()[:80].replace("\n\ttab", ""), "order.placed", topic="eu"),
        NewEvent("🚀", "order.paid", {}, topic="ü", metadata={"by": TRICKY}),
        NewEvent("a", "x", {"big": 2**60}),
    ]
    with transaction.atomic(using=alias):
        publish_many(events, using=alias)
    commit(alias, *"bcd")
    times = [datetime(2026, 3, 4, 5, 6, 7, micro, UTC) for micro in (0, 1, 120_000, 999_999)]
    for row, at in zip(Event.objects.using(alias).order_by("pk"), times, strict=False):
        Event.objects.using(alias).filter(pk=row.pk).update(recorded_at=at)


TYPES = {
    "bigint": LongType(),
    "int": IntegerType(),
    "boolean": BooleanType(),
    "string": StringType(),
    "timestamp": TimestampType(),
    "timestamp_ltz": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
}


def struct(schema):
    """``StructType.fromDDL`` needs a session."""
    columns = [column.split() for column in schema.split(", ") if column]
    return StructType([StructField(name, TYPES[kind]) for name, kind in columns])


def make(options, schema=SCHEMA):
    """A reader, as the planner makes it."""
    return OutboxDataSource(options).reader(struct(schema))


def table(reader):
    """Read as executors do: each partition in another process."""
    parts = [pickle.loads(pickle.dumps(part)) for part in reader.partitions()]
    assert None not in parts
    assert parts
    away = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in parts for batch in away.read(part)]
    assert all(batch.schema == away.schema for batch in batches)
    return pa.Table.from_batches(batches, schema=away.schema).sort_by("id")


def expected(alias, log=Event):
    rows = log.objects.using(alias).order_by("pk").values_list(*COLUMNS)
    return [comparable(row) for row in rows]


def comparable(row):
    """JSON is text, whose spelling is the database's own."""
    values = dict(zip(COLUMNS, row, strict=True))
    for name in ("data", "metadata"):
        if isinstance(values[name], str):
            values[name] = json.loads(values[name])
    values["message_id"] = UUID(str(values["message_id"]))
    return values


def rows(found):
    return [comparable(row.values()) for row in found.to_pylist()]


class TestReader:
    """Without Spark."""

    @pytest.mark.parametrize("partitions", [1, 2, 7])
    def test_a_log_is_read_as_it_is(self, alias, history, source_options, partitions):
        found = table(make(source_options(alias, partitions=partitions)))
        assert found.schema == arrow_types(SCHEMA)
        assert rows(found) == expected(alias)
        assert all(len(id) == 36 for id in found.column("message_id").to_pylist())

    def test_a_log_is_read_to_its_end_piece_by_piece(self, alias, source_options, monkeypatch):
        monkeypatch.setattr("outbox_app.pipeline.database.ROWS", 2)
        monkeypatch.setattr("outbox_app.pipeline.database.BYTES", 1)
        commit(alias, *"abcde")
        reader = make(source_options(alias, partitions=1))
        [part] = reader.partitions()
        pieces = ["".join(batch.column("stream").to_pylist()) for batch in reader.read(part)]
        assert "".join(pieces) == "abcde"
        assert len(pieces) > 2

    def test_large_events_come_in_small_batches(self, alias, source_options, monkeypatch):
        """A batch is in the memory of Spark as a whole, one for each task."""
        monkeypatch.setattr("outbox_app.pipeline.database.FETCHED", 2)
        monkeypatch.setattr("outbox_app.pipeline.database.BYTES", 30_000)
        events = [NewEvent("s", "made", {"n": "x" * (n // 20 * 10_000)}) for n in range(40)]
        with transaction.atomic(using=alias):
            publish_many(events, using=alias)
            publish_many(events[:20], log=Ledger, using=alias)
            Ledger.objects.using(alias).update(remark="x" * 10_000)

        def sizes(log):
            schema = "id bigint, data string" + (", remark string" if log is Ledger else "")
            reader = make(source_options(alias, model=log, partitions=1), schema)
            [part] = reader.partitions()
            return [batch.num_rows for batch in reader.read(part)]

        found = sizes(Event)
        assert sum(found) == 40
        assert len(found) > 4
        assert max(found[1:]) <= 4
        assert alias == "default" or max(sizes(Ledger)) <= 4

    def test_an_empty_log(self, alias, source_options):
        assert table(make(source_options(alias))).num_rows == 0

    @on("default")
    def test_ranges_need_no_archive(self, alias, history, source_options, tmp_path, monkeypatch):
        """The working folder may be one that cannot hold an archive."""
        (tmp_path / "a#b").mkdir()
        monkeypatch.chdir(tmp_path / "a#b")
        assert rows(table(make(source_options(alias)))) == expected(alias)

    def test_a_log_of_another_name(self, alias, source_options):
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made")], log=Ledger, using=alias)
        commit(alias, "b", "c")
        found = table(make(source_options(alias, model=Ledger)))
        assert rows(found) == expected(alias, Ledger)
        assert found.num_rows == 1

    def test_some_columns_in_another_order(self, alias, history, source_options):
        found = table(make(source_options(alias), "recorded_at timestamp, id bigint, data string"))
        assert found.column_names == ["recorded_at", "id", "data"]
        wanted = [(row["recorded_at"], row["id"]) for row in expected(alias)]
        assert [(row["recorded_at"], row["id"]) for row in found.to_pylist()] == wanted

    def test_topics_and_types(self, alias, history, source_options):
        def streams(**given):
            found = table(make(source_options(alias, **given)))
            return [f"{row['topic']}:{row['type']}" for row in found.to_pylist()]

        assert streams(topics="eu,ü") == ["eu:order.placed", "ü:order.paid"]
        assert streams(types="order.*,x") == ["eu:order.placed", "ü:order.paid", ":x"]
        assert streams(topics="ü", types="order.*") == ["ü:order.paid"]
        assert streams(topics="EU") == streams(types="it's 100%*") == []

    @pytest.mark.parametrize("log", [Event, Visit])
    def test_topics_and_types_of_any_text(self, alias, source_options, log):
        # Texts that a collation takes for one another are wanted apart.
        groups = [
            ["a", "100%", 'say "x"', "日本語"],
            ["A", "it's", "back\\slash", "%s"],
            ["a ", "\\'"],
            ["ä"],
        ]
        texts = [text for group in groups for text in group]
        with transaction.atomic(using=alias):
            publish_many((NewEvent("s", text, topic=text) for text in texts), log=log, using=alias)
        for column in ("topic", "type"):
            for wanted in groups:
                given = {f"{column}s": ",".join(wanted)}
                found = table(make(source_options(alias, model=log, **given)))
                assert found.column(column).to_pylist() == wanted
        found = table(make(source_options(alias, model=log, types="back\\*")))
        assert found.column("type").to_pylist() == ["back\\slash"]

    def test_from_one_offset_to_another(self, alias, source_options):
        options = source_options(alias)
        with closing(connect(Options.of(options))) as database:
            offsets = Offsets(database)
            commit(alias, *"abcdef")
            start = offsets.end(offsets.beginning(), 2)
            end = offsets.end(start, 3)
        commit(alias, *"gh")
        states = {"start": json.dumps(start.dump()), "end": json.dumps(end.dump())}

        def streams(*names):
            found = table(make({**options, **{name: states[name] for name in names}}))
            return "".join(found.column("stream").to_pylist())

        for name in states:
            stranger = json.dumps({**json.loads(states[name]), "message_id": "x"})
            with pytest.raises(ForeignCursor, match="another database"):
                make({**options, **states, name: stranger}).partitions()
        assert streams("start", "end") == "cde"
        assert streams("end") == "abcde"
        assert streams("start") == "cdefgh"
        assert streams() == "abcdefgh"

    @concurrent
    def test_what_is_not_committed_is_not_there(self, alias, source_options):
        with Session(alias) as slow:
            slow.begin().publish("slow", 2)
            commit(alias, "a")
            reader = make(source_options(alias))
            parts = reader.partitions()
            slow.commit()
            # It was planned before; what is read is what was committed then.
            batches = [batch for part in parts for batch in reader.read(part)]
        assert pa.Table.from_batches(batches).column("stream").to_pylist() == ["a"]

    @on("mariadb", "default")
    def test_times_in_a_zone(self, alias, source_options):
        commit(alias, *"abc")
        given = ["2026-07-01 12:00:00.000001", "2026-10-25 02:30:00", "2026-03-29 02:30:00"]
        for row, text in zip(Event.objects.using(alias).order_by("pk"), given, strict=True):
            sql = f"UPDATE outbox_event SET recorded_at = '{text}' WHERE id = {row.pk}"
            execute(alias, sql)
        found = table(make(source_options(alias, time_zone="Europe/Berlin")))
        times = [at.isoformat() for at in found.column("recorded_at").to_pylist()]
        assert times[:2] == ["2026-07-01T10:00:00.000001+00:00", "2026-10-25T00:30:00+00:00"]

    def test_heads(self, alias, source_options):
        commit(alias, *"aab")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made")], log=Ledger, using=alias)
        reader = make(source_options(alias, read="heads"), OutboxDataSource(
            source_options(alias, read="heads")).schema())  # fmt: skip
        found = pa.Table.from_batches(reader.read(reader.partitions()[0]))
        assert sorted(map(tuple, (row.values() for row in found.to_pylist()))) == [
            ("outbox_event", "a", 2),
            ("outbox_event", "b", 1),
        ]
        assert StreamHead.objects.using(alias).count() == 3

    def test_inbox(self, alias, source_options):
        at = datetime(2026, 3, 4, 5, 6, 7, 890, UTC)
        InboxEntry.objects.using(alias).create(job_id="j🚀", task="t", handled_at=at)
        options = source_options(alias, read="inbox")
        reader = make(options, OutboxDataSource(options).schema())
        [batch] = reader.read(reader.partitions()[0])
        assert batch.to_pylist() == [{"job_id": "j🚀", "task": "t", "handled_at": at}]

    @on("default")
    def test_filters_hold_for_all_of_a_condition(self, alias, history, source_options):
        part = ReadPartition(conditions=["id > 0 OR id < 0"])
        reader = make(source_options(alias, topics="eu"))
        assert sum(batch.num_rows for batch in reader.read(part)) == 1
        stream = OutboxDataSource(source_options(alias, topics="eu")).streamReader(struct(SCHEMA))
        assert sum(batch.num_rows for batch in stream.read(part)) == 1

    def test_a_long_statement_is_broken_off(self, alias, source_options):
        sleep = {"postgres": "SELECT pg_sleep(30)", MARIADB: "SELECT SLEEP(30) + id FROM "
                 "outbox_event"}.get(alias)  # fmt: skip
        if sleep is None:
            return
        commit(alias, "a")
        options = Options.of(source_options(alias, statement_timeout=0.1))
        with closing(connect(options)) as database, pytest.raises(Exception, match="time"):
            database.run(sleep, [])

    @pytest.mark.parametrize(
        ("schema", "says"),
        [
            ("id bigint, price int", "no column 'price'.*Known: id"),
            ("id int", r"id is bigint, not int.*cast\(\"int\"\)"),
            ("recorded_at timestamp_ntz", "recorded_at is timestamp_ltz, not timestamp_ntz"),
            ("data timestamp", "data is string"),
            ("", "no column"),
        ],
    )
    def test_a_schema_that_does_not_fit(self, source_options, schema, says):
        with pytest.raises(InvalidSchema, match=says):
            make(source_options("default"), schema)

    def test_a_database_that_is_away(self, tmp_path):
        for url in ("postgresql://x@127.0.0.1:1/x", "mysql://x@127.0.0.1:1/x",
                    f"sqlite:///{tmp_path}/none.db", f"sqlite:///{tmp_path}"):  # fmt: skip
            with pytest.raises(Unreachable, match=f"{url} "):
                make({"url": url, "connectTimeout": "0"}).partitions()

    @on("postgres", "mariadb")
    @staticmethod
    def watch_pauses(monkeypatch, sleep):
        """Only this module's clock: threads of Spark sleep too."""
        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr("outbox_app.pipeline.database.time", clock)

    def test_a_door_that_is_closed(self, alias, source_options, monkeypatch):
        """A wrong name or password is not waited for."""
        self.watch_pauses(monkeypatch, None)
        options = source_options(alias, connect_timeout=30)
        url = options["url"].replace("test_outbox", "no_such")
        with pytest.raises(Unreachable, match="no_such"):
            connect(Options.of({**options, "url": url}))

    def test_a_driver_that_tells_the_password(self, monkeypatch):
        """And a database that comes back: it is waited for."""
        pauses = []
        self.watch_pauses(monkeypatch, pauses.append)
        options = Options.of({"url": "mysql://x/y", "password": "s3cret", "connectTimeout": "0"})
        told = OSError("no: s3cret")
        refusals = [told, told, told]

        def away():
            if refusals:
                raise refusals.pop()
            return "connected"

        with pytest.raises(Unreachable, match=r"no: \*\*\*\*$"):
            connected(options, away, (OSError,), lambda error: False)
        patient = replace(options, connect_timeout=9.0)
        assert connected(patient, away, (OSError,), lambda error: False) == "connected"
        assert pauses == [0.1, 0.2]
        refusals.append(told)
        with pytest.raises(Unreachable):
            connected(patient, away, (OSError,), lambda error: error is told)

    def test_streams_have_their_own_beginning(self, source_options):
        for given in ({"read": "heads"}, {"archive": "/a"}, {"start": "{}"}, {"end": "{}"}):
            options = source_options("default") | given
            with pytest.raises(InvalidOption, match="leave out read"):
                OutboxDataSource(options).streamReader(struct(SCHEMA))


def errors_of(kind):
    return {kind, *(each for child in kind.__subclasses__() for each in errors_of(child))}


def test_the_reason_is_found_in_a_trace():
    for kind in errors_of(PipelineError) | errors_of(ReadRefused):
        text = (
            "[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):\n"
            '  File "x.py", line 1, in y\nKeyError: 5\n\nDuring handling …\n'
            f"{kind.__module__}.{kind.__name__}: It is: so.\nDriver stacktrace:\nat java.lang.X"
        )
        assert reason(RuntimeError(text)) == f"{kind.__name__}: It is: so."


def test_other_reasons():
    text = "Job aborted:\npy4j.protocol.Py4JError: no\n  adbc.OperationalError: away\n"
    assert reason(RuntimeError(text.replace("  adbc", "adbc"))) == "OperationalError: away"
    assert reason(RuntimeError("all\nis lost")) == "RuntimeError: all"
    assert reason(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_spark_finds_it_by_itself():
    """As it looks for data sources: in modules named pyspark_…."""
    output = io.BytesIO()
    lookup_data_sources._main(io.BytesIO(), output)
    assert b"\0\0\0\6outbox" in output.getvalue()


class TestSpark:
    """Through Spark."""

    def test_a_log_is_read_as_it_is(self, alias, history, source_options, spark):
        events = spark.read.format("outbox").options(**source_options(alias)).load()
        assert events.schema == struct(SCHEMA)
        found = sorted(events.collect())
        assert [comparable(r) | {"recorded_at": r["recorded_at"].astimezone(UTC)} for r in found] \
            == expected(alias)  # fmt: skip

    @on("postgres")
    def test_columns_and_filters(self, alias, history, source_options, spark):
        options = source_options(alias)
        events = spark.read.format("outbox").options(**options).schema("type string, id bigint")
        found = events.load().where("type = 'made' and id > 3")
        assert sorted(found.collect()) == sorted(
            (row["type"], row["id"])
            for row in expected(alias)
            if row["type"] == "made" and row["id"] > 3
        )

    @pytest.mark.parametrize("alias", ["default"], indirect=True)
    def test_errors_say_what_is_wrong(self, alias, source_options, spark):
        good = source_options(alias)
        cases = [
            ({}, "id bigint, price int", "InvalidSchema: There is no column 'price'"),
            ({"start": "nonsense"}, SCHEMA, "DamagedCursor: 'nonsense' is no offset"),
            ({"url": "mysql://a:s3cret@b/c"}, SCHEMA, "InvalidOption: The url holds a password"),
            ({"passwordFile": "/no/such", "url": "mysql://127.0.0.1:1/c"}, SCHEMA,
             "Unreachable: The file with the password"),
        ]  # fmt: skip
        for given, schema, says in cases:
            options = good | given
            with pytest.raises((AnalysisException, PySparkException)) as raised:
                spark.read.format("outbox").options(**options).schema(schema).load().collect()
            assert reason(raised.value).startswith(says)
            assert "s3cret" not in str(raised.value)
