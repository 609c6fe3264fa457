"""Logs made by Spark: a clean one of any size, and one with thirty defects planted into it.

Whatever is planted has its place in the arithmetic of the clean log, so nothing has to be looked
up, and 2.2 million events take no longer to plant into than two thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outbox_app.pipeline.schema import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

LOG = "outbox_event"
#: Events that a stream has at least; every tenth event goes to one hot stream.
EACH = 20
#: The front of the log, in parts of its events, that was pruned; and what was archived.
PRUNED, ARCHIVED = 0.25, 0.8

Found = tuple[str, str, int | None, int | None]


class Clean:
    """A clean log: ``events``, ``heads``, and where in it each event is.

    Args:
        spark: The session.
        number: Events.
    """

    def __init__(self, spark: SparkSession, number: int) -> None:
        self.spark = spark
        self.number = number
        self.cold = number - (number + 9) // 10
        self.streams = self.cold // EACH
        rows = spark.range(number).selectExpr(
            "id as n", "id - id div 10 - 1 as m", "id % 10 = 0 as hot"
        )
        self.events = rows.selectExpr(
            f"if(hot, 'hot', concat('order-', m % {self.streams})) as stream",
            f"if(hot, n div 10, m div {self.streams}) + 1 as version",
            "3 * n + 1 as id",
        ).selectExpr(*_COLUMNS)
        self.heads = self.events.groupBy("stream").agg({"version": "max"})
        self.heads = self.heads.selectExpr(f"'{LOG}' as log", "stream", "`max(version)` as version")

    def last(self, stream: int) -> int:
        """Return the last version of a stream."""
        return (self.cold - stream - 1) // self.streams + 1

    def id(self, stream: int, version: int) -> int:
        """Return the position of an event. The next two belong to nobody."""
        m = (version - 1) * self.streams + stream
        return 3 * (m + m // 9 + 1) + 1

    def rows(self, rows: Sequence[tuple[int, int, int]]) -> DataFrame:
        """Return events by stream, version and position."""
        given = [(f"order-{stream}", version, id) for stream, version, id in rows]
        frame = self.spark.createDataFrame(given, "stream string, version bigint, id bigint")
        return frame.selectExpr(*_COLUMNS)


class Planted(NamedTuple):
    """A log with defects; the arguments of ``audit()``."""

    events: DataFrame
    heads: DataFrame
    archived: tuple[DataFrame, DataFrame]
    lowest: int
    #: Kind, stream, first and last of each defect.
    expected: list[Found]


#: Columns computed from stream, version and id.
_COLUMNS = [
    {
        "id": "id",
        "txid": "id div 7 as txid",
        "topic": "'shop' as topic",
        "stream": "stream",
        "version": "version",
        "type": "if(version = 1, 'order.placed', concat('order.step-', version % 5)) as type",
        "data": "concat('{\"n\": ', id, '}') as data",
        "metadata": "'{}' as metadata",
        "slice": "int(crc32(stream) % 1024) as slice",
        "message_id": "concat('00000000-0000-4000-8000-', lpad(id, 12, '0')) as message_id",
        "recorded_at": "timestamp_micros(1700000000000000 + id * 100000) as recorded_at",
    }[name]
    for name in COLUMNS
]


def plant(spark: SparkSession, number: int) -> Planted:
    """Return a log of about ``number`` events with thirty defects.

    The database has its last three quarters, the archive its first four fifths.
    """
    log = Clean(spark, number)
    lowest, bound = 3 * int(number * PRUNED) + 1, 3 * int(number * ARCHIVED) + 1
    gone: list[tuple[int, int]] = []
    extra: list[tuple[int, int, int]] = []
    expected: list[Found] = []

    def missing(kind: str, stream: int, first: int, last: int) -> None:
        gone.extend((stream, version) for version in range(first, last + 1))
        expected.append((kind, f"order-{stream}", first, last))

    def doubled(stream: int, version: int) -> None:
        extra.append((stream, version, log.id(stream, version + 1) + 1))
        expected.append(("duplicate_version", f"order-{stream}", version, version))

    # Five gaps: in the archived part, in both, in the database alone; two in one stream.
    missing("gap", 10, 2, 2)
    missing("gap", 11, 4, 9)
    missing("gap", 12, 19, 19)
    missing("gap", 13, 3, 3)
    missing("gap", 13, 5, 8)
    # A gap and a duplicate that cancel out in a count: 1, 2, 2, 4 …
    missing("gap", 14, 3, 3)
    doubled(14, 2)
    # 1, 1, 4, 4: count, minimum, maximum and sum are those of 1, 2, 3, 4.
    missing("gap", 15, 2, 3)
    doubled(15, 1)
    doubled(15, 4)
    gone.extend((15, version) for version in range(5, log.last(15) + 1))
    doubled(16, 18)
    # Beginnings and ends; the last one is a whole stream.
    missing("late_start", 20, 1, 1)
    missing("late_start", 21, 1, 12)
    missing("late_start", 22, 1, 18)
    missing("tail", 23, log.last(23), log.last(23))
    missing("tail", 24, 4, log.last(24))
    missing("tail", 25, 1, log.last(25))
    # Heads: two are not there, one is too low.
    expected += [("low_head", f"order-{k}", 0, log.last(k)) for k in (30, 31)]
    expected.append(("low_head", "order-32", 7, log.last(32)))
    # Order: two versions that have changed places, in the archive and behind it.
    for stream, version in ((40, 3), (41, 19)):
        gone += [(stream, version), (stream, version + 1)]
        extra.append((stream, version, log.id(stream, version + 1)))
        extra.append((stream, version + 1, log.id(stream, version)))
        expected.append(("order", f"order-{stream}", version + 1, version + 1))
    extra.append((42, 0, log.id(42, 1) - 1))
    expected.append(("invalid_version", "order-42", 0, 0))
    # One row that is there twice.
    extra.append((44, 19, log.id(44, 19)))
    expected.append(("duplicate_version", "order-44", 19, 19))
    # Database against archive.
    only_here, only_there, other, twice = (50, 9), (51, 9), ((52, 9), (53, 10)), (54, 2)
    expected.append(("not_in_archive", "order-50", 9, 9))
    expected.append(("only_in_archive", "order-51", 9, 9))
    expected += [("content_differs", f"order-{k}", v, v) for k, v in other]
    # The database has pruned this row, so the archive's two are also two in the stream.
    expected += [(kind, "order-54", 2, 2) for kind in ("archived_twice", "duplicate_version")]

    whole = _without(log.events, gone).unionByName(log.rows(extra))
    events = _without(whole.where(f"id >= {lowest}"), [only_there])
    archive = _without(whole.where(f"id < {bound}"), [only_here, *other])
    changed = log.rows([(k, v, log.id(k, v)) for k, v in other])
    archive = archive.unionByName(_changed(changed)).unionByName(
        log.rows([(*twice, log.id(*twice))])
    )
    ends = [(15, 4), (32, 7)]
    heads = _without_streams(log.heads, [15, 30, 31, 32]).unionByName(
        spark.createDataFrame(
            [(LOG, f"order-{k}", v) for k, v in ends], "log string, stream string, version bigint"
        )
    )
    assert len(expected) == 30
    archived = events.where(f"id < {bound}"), archive
    return Planted(events, heads, archived, lowest, expected)


def _changed(rows: DataFrame) -> DataFrame:
    """Return the rows with the same characters in other columns, and another transaction."""
    changes = {"data": "''", "metadata": "concat(data, metadata)", "txid": "txid + 1"}
    return rows.selectExpr(*(f"{changes.get(name, name)} as {name}" for name in COLUMNS))


def _without(rows: DataFrame, events: Sequence[tuple[int, int]]) -> DataFrame:
    gone = ", ".join(f"'order-{stream}@{version}'" for stream, version in events)
    return rows.where(f"concat(stream, '@', version) not in ({gone})")


def _without_streams(heads: DataFrame, streams: Sequence[int]) -> DataFrame:
    gone = ", ".join(f"'order-{stream}'" for stream in streams)
    return heads.where(f"stream not in ({gone})")
