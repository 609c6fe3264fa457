"""Streams: batch after batch, exactly once; a checkpoint of another log is refused."""

from __future__ import annotations

import json
import pickle
from contextlib import ExitStack, closing
from itertools import pairwise
from uuid import uuid4

import pyarrow as pa
import pytest
from django.db import transaction
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import DamagedCursor, ForeignCursor
from outbox_app.events.models import Event
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.session import reason
from outbox_app.pipeline.source import OutboxDataSource
from tests.events.log.conformance import commit, concurrent
from tests.events.log.own_log.models import Ledger
from tests.events.log.sessions import Session, truncate
from tests.faults.tools import on

from .test_source import struct

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def small_parts(alias, monkeypatch):
    monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 1)
    truncate(alias)


@pytest.fixture
def make(alias, source_options):
    """``make(**options)``: a reader, which is stopped after the test."""
    with ExitStack() as stack:

        def make(**given):
            source = OutboxDataSource(source_options(alias, **given))
            reader = source.streamReader(struct("id bigint, stream string"))
            stack.callback(reader.stop)
            return reader

        yield make


def passed_on(offset):
    """As Spark keeps it."""
    return json.loads(json.dumps(offset))


def streams(reader, start, end):
    """Read a batch as executors do."""
    parts = pickle.loads(pickle.dumps(reader.partitions(passed_on(start), passed_on(end))))
    assert parts
    assert None not in parts
    away = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in parts for batch in away.read(part)]
    found = pa.Table.from_batches(batches, schema=away.schema).sort_by("id")
    return "".join(found.column("stream").to_pylist())


class TestReader:
    """Without Spark."""

    def test_batches(self, alias, make):
        reader = make()
        states = [reader.initialOffset()]
        commit(alias, *"abcde")
        for _ in range(4):
            after = reader.latestOffset(passed_on(states[-1]), ReadMaxRows(2))
            states.append(after)
        assert states[3] == states[4]
        assert [streams(reader, a, b) for a, b in pairwise(states)] == ["ab", "cd", "e", ""]
        commit(alias, *"fg")
        after = reader.latestOffset(states[-1], ReadAllAvailable())
        assert streams(make(), states[-1], after) == "fg"
        assert streams(make(), states[1], after) == "cdefg"

    def test_how_much_at_once(self, make):
        assert make().getDefaultReadLimit() == ReadAllAvailable()
        assert make(max_rows_per_batch=7).getDefaultReadLimit() == ReadMaxRows(7)

    def test_available_now_ends_with_what_was_there(self, alias, make):
        reader = make()
        state = reader.initialOffset()
        commit(alias, *"abc")
        reader.prepareForTriggerAvailableNow()
        commit(alias, *"de")
        found = ""
        for _ in range(3):
            after = reader.latestOffset(state, ReadMaxRows(2))
            found, state = found + streams(reader, state, after), after
        assert found == "abc"
        assert reader.latestOffset(state, ReadAllAvailable()) == state
        latest = Offset.load(reader.reportLatestOffset())
        assert latest.position == Event.objects.using(alias).latest("pk").pk

    @concurrent
    def test_a_batch_is_the_same_again(self, alias, make):
        reader = make()
        with Session(alias) as slow:
            slow.begin().publish("s", 2)
            commit(alias, *"ab")
            start = reader.initialOffset()
            end = reader.latestOffset(start, ReadMaxRows(5))
            slow.commit()
        commit(alias, *"cd")
        after = make().latestOffset(end, ReadAllAvailable())
        assert streams(make(), start, end) == streams(reader, start, end) == "ab"
        assert sorted(streams(make(), end, after)) == sorted("sscd")

    def test_what_does_not_belong_here(self, alias, make):
        commit(alias, *"ab")
        start = make().initialOffset()
        end = make().latestOffset(start, ReadMaxRows(1))
        for damage, error in [
            ({"log": "ledger"}, ForeignCursor),
            ({"database": "1"}, ForeignCursor),
            ({"message_id": str(uuid4())}, ForeignCursor),
            ({"state": "{}"}, DamagedCursor),
            ({"position": None}, DamagedCursor),
            ({"version": 2}, DamagedCursor),
        ]:
            with pytest.raises(error):
                make().latestOffset(end | damage, ReadAllAvailable())
            with pytest.raises(error):
                make().partitions(end | damage, end)
            with pytest.raises(error):
                make().partitions(start, end | damage)

    @on("mariadb")
    def test_a_log_that_is_emptied_meanwhile(self, alias, make):
        """Its first new events have positions that the stream has passed already."""
        reader = make()
        commit(alias, *"ab")
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        assert streams(reader, start, end) == "ab"
        truncate(alias)
        commit(alias, *"cdef")
        with pytest.raises(ForeignCursor):
            reader.latestOffset(end, ReadAllAvailable())

    def test_a_database_that_is_set_back(self, alias, make):
        """It is refused before positions come up to those that the stream has passed."""
        commit(alias, *"abc")
        reader = make()
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        Event.objects.using(alias).filter(stream__in="bc").delete()
        for each in (reader, make()):
            with pytest.raises(ForeignCursor):
                each.latestOffset(end, ReadAllAvailable())

    def test_connections_stay_where_they_are(self, alias, make):
        reader = make()
        reader.initialOffset()
        away = pickle.loads(pickle.dumps(reader))
        with closing(reader._planner.database):
            assert "_planner" not in vars(away)
            reader.stop()
        assert "_planner" not in vars(reader)


class Crash(Exception):
    """Of somebody's ``foreachBatch``."""


class Stream:
    """A stream that keeps what came, batch by batch.

    Args:
        spark: The session.
        options: Of the source.
        folder: Of the checkpoint.
    """

    def __init__(self, spark, options, folder):
        self.spark, self.options, self.folder = spark, options, folder
        self.came: dict[int, list[list[int]]] = {}
        self.crash_in = None

    def handle(self, batch, number):
        ids = sorted(row.id for row in batch.select("id").collect())
        self.came.setdefault(number, []).append(ids)
        if number == self.crash_in:
            self.crash_in = None
            raise Crash

    def run(self, **options):
        """Read what there is now. Returns the last progress.

        Spark gives the source's Python ten seconds to start, however busy the machine is
        (PythonWorkerFactory.createSimpleWorker), so one that was late is started again.
        """
        while True:
            try:
                return self._run(options)
            except StreamingQueryException as error:
                if "failed to connect back" not in str(error):
                    raise

    def _run(self, options):
        events = self.spark.readStream.format("outbox").options(**{**self.options, **options})
        query = (
            events.load()
            .writeStream.foreachBatch(self.handle)
            .option("checkpointLocation", str(self.folder))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        finally:
            query.stop()
        return query.lastProgress

    @property
    def last_offset(self):
        return max((self.folder / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))


@pytest.fixture
def stream(alias, source_options, spark, tmp_path):
    options = source_options(alias, max_rows_per_batch=3)
    return Stream(spark, options, tmp_path / "checkpoint")


class TestSpark:
    """Through Spark."""

    @on("postgres", "mariadb")
    def test_killed_in_a_batch(self, alias, stream):
        """What is replayed is what was being handled, whatever was committed meanwhile."""
        with Session(alias) as slow:
            commit(alias, *"ab")
            slow.begin().publish("slow", 2)
            commit(alias, *"cdefgh")
            stream.crash_in = 1
            with pytest.raises(StreamingQueryException, match="Crash"):
                stream.run()
            slow.commit()
        commit(alias, *"ij")
        progress = stream.run()
        first, again = stream.came[1]
        assert first == again
        assert len(first) == 3
        found = [id for attempts in stream.came.values() for id in attempts[-1]]
        assert sorted(found) == sorted(Event.objects.using(alias).values_list("pk", flat=True))
        assert len(stream.came) >= 4
        [source] = progress["sources"]
        latest = source["latestOffset"]
        latest = json.loads(latest) if isinstance(latest, str) else latest
        assert latest["position"] == max(found)
        # Nothing is new: nothing comes.
        before = len(stream.came)
        stream.run()
        assert len(stream.came) == before

    @pytest.mark.parametrize("alias", ["postgres"], indirect=True)
    def test_a_checkpoint_that_does_not_belong_here(self, alias, stream, source_options):
        commit(alias, *"ab")
        stream.run()
        file = stream.last_offset
        good = file.read_text()
        commit(alias, "c")
        with transaction.atomic(using=alias):
            publish_many([NewEvent("a", "made")], log=Ledger, using=alias)
        top = Event.objects.using(alias).get(stream="b")

        def refused(says, **options):
            before = dict(stream.came)
            with pytest.raises(StreamingQueryException) as raised:
                stream.run(**options)
            assert says in reason(raised.value)
            assert stream.came == before

        def damaged(**values):
            *head, offset = good.split("\n")
            text = json.dumps({**json.loads(offset), **values})
            file.write_text("\n".join([*head, text]))
            for crc in file.parent.glob(".*.crc"):
                crc.unlink()

        refused("ForeignCursor: The offset belongs to the log outbox_event", log="ledger")
        damaged(state="nonsense")
        refused("DamagedCursor: The cursor's state cannot be read")
        damaged()
        Event.objects.using(alias).filter(pk=top.pk).update(message_id=uuid4())
        refused("restored to an earlier time")
        Event.objects.using(alias).filter(pk=top.pk).update(message_id=top.message_id)
        stream.run()
        assert len(stream.came) == 2
