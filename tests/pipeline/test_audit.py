"""The audit finds each defect and no other, and concurrent changes do not count as defects."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from datetime import UTC, datetime

import pytest
from pyspark.sql import functions as F

from outbox_app.pipeline import audit as module
from outbox_app.pipeline.audit_checks import compare_archive
from outbox_app.pipeline.defects import ENTITY, KINDS, Audit, Defect
from outbox_app.pipeline.schema import COLUMNS, SCHEMA
from tests.pipeline.planted import LOG, Clean, plant

#: Of the big logs. The figure of the documentation: AUDIT_EVENTS=2200000.
EVENTS = int(os.environ.get("AUDIT_EVENTS", "40000"))
HEADS = "log string, stream string, version bigint"


@pytest.fixture
def log(spark):
    """``log({"a": [(1, 10), (2, 20)]})``: events by version and position."""

    def make(streams):
        rows = [(id, name, version) for name, each in streams.items() for version, id in each]
        return spark.createDataFrame(rows, "id bigint, stream string, version bigint")

    return make


@pytest.fixture
def heads(spark):
    """``heads({"a": 2})``: heads of streams, and one of another log."""

    def make(versions):
        rows = [(LOG, stream, version) for stream, version in versions.items()]
        return spark.createDataFrame([*rows, ("other_log", "a", 99)], HEADS)

    return make


def audit(events, *, heads=None, **given) -> Audit:
    """Audit events, by default with the heads that they show."""
    if heads is None:
        of = F.lit(LOG).alias("log"), "stream"
        heads = events.groupBy(*of).agg(F.max("version").alias("version"))
    return module.audit(events, heads=heads, **given)


def found(result: Audit) -> Counter:
    return Counter((each.kind, each.stream, each.first, each.last) for each in result.defects)


@pytest.mark.slow
def test_thirty_defects_in_a_big_log_and_nothing_else(spark):
    log = plant(spark, EVENTS)
    frames = [log.events, log.heads, *log.archived]
    events, heads, database, archive = (frame.persist() for frame in frames)
    result = audit(
        events,
        log=LOG,
        heads=heads,
        archived=(database, archive),
        lowest=lambda: log.lowest,
    )
    for frame in frames:
        frame.unpersist()
    assert found(result) == Counter(log.expected)
    assert (result.total, sum(result.counts.values()), result.sound) == (30, 30, False)
    assert list(result.checked) == [kind for kind in KINDS if kind != ENTITY]


@pytest.mark.slow
def test_a_clean_log_has_none(spark):
    log = Clean(spark, EVENTS)
    result = audit(log.events, log=LOG, heads=log.heads)
    assert (result.defects, dict(result.counts), result.sound) == ([], {}, True)
    assert (result.events, result.streams) == (EVENTS, log.streams + 1)


def test_each_stream_shows_what_is_wrong_with_it(log, heads):
    streams = {
        "sound": [(1, 1), (2, 5), (3, 6)],
        "gap": [(1, 10), (3, 11), (6, 12)],
        # Count, minimum, maximum and sum are those of 1, 2, 3, 4.
        "sums": [(1, 20), (1, 21), (4, 22), (4, 23)],
        "late": [(4, 30), (5, 31)],
        "short": [(1, 40)],
        "unknown": [(1, 50)],
        "low": [(1, 60), (2, 61), (3, 62)],
        "order": [(1, 70), (2, 72), (3, 71), (4, 73)],
        # The double is the later one, and nothing is out of order.
        "double": [(1, 80), (2, 84), (3, 82), (2, 83), (2, 81)],
        "zero": [(0, 90), (1, 91)],
        "below": [(-3, 100), (2, 101)],
        "row": [(1, 110), (1, 110)],
        # The second version stands at the lower position of the first one, and not before it.
        "shared": [(1, 120), (1, 125), (2, 120)],
    }
    ends = {name: max(version for version, _ in rows) for name, rows in streams.items()}
    ends |= {"short": 3, "low": 1, "gone": 2, "none": 0}
    del ends["unknown"]
    result = audit(log(streams), log=LOG, heads=heads(ends))
    assert [tuple(each) for each in result.defects] == [
        ("gap", "gap", 2, 2, 11, ""),
        ("gap", "gap", 4, 5, 12, ""),
        ("gap", "sums", 2, 3, 22, ""),
        ("late_start", "below", 1, 1, 101, ""),
        ("late_start", "late", 1, 3, 30, ""),
        ("tail", "gone", 1, 2, None, ""),
        ("tail", "short", 2, 3, None, ""),
        ("duplicate_version", "double", 2, 2, 83, ""),
        ("duplicate_version", "double", 2, 2, 84, ""),
        ("duplicate_version", "row", 1, 1, 110, ""),
        ("duplicate_version", "shared", 1, 1, 125, ""),
        ("duplicate_version", "sums", 1, 1, 21, ""),
        ("duplicate_version", "sums", 4, 4, 23, ""),
        ("order", "order", 3, 3, 71, ""),
        ("invalid_version", "below", -3, -3, 100, ""),
        ("invalid_version", "zero", 0, 0, 90, ""),
        ("low_head", "low", 1, 3, 62, ""),
        ("low_head", "unknown", 0, 1, 50, ""),
    ]
    assert (result.events, result.streams) == (35, 13)


def test_versions_and_positions_at_the_end_of_their_numbers(log, heads):
    """Rows that were written by hand. In ANSI mode a sum beyond the end is an error."""
    top = 2**63 - 1
    streams = {"a": [(1, 1), (top, top)], "b": [(top, 3), (top, 4)], "c": [(-top - 1, 5), (2, 6)]}
    result = audit(log(streams), log=LOG, heads=heads({"a": top, "b": top, "c": 2, "d": top}))
    assert found(result) == {
        ("gap", "a", 2, top - 1): 1,
        ("late_start", "b", 1, top - 1): 1,
        ("late_start", "c", 1, 1): 1,
        ("tail", "d", 1, top): 1,
        ("duplicate_version", "b", top, top): 1,
        ("invalid_version", "c", -top - 1, -top - 1): 1,
    }


def test_an_empty_log_is_sound(log, heads):
    result = audit(log({}), log=LOG, heads=heads({}), lowest=lambda: None)
    assert (result.sound, result.events, result.streams) == (True, 0, 0)


def test_heads_that_have_moved_meanwhile_are_no_defect(log, heads):
    """An event of another stream is committed between the look at the heads and the bound."""
    events = log({"a": [(1, 1), (2, 2)], "b": [(1, 3)], "c": [(1, 4), (2, 5)]})
    looks = []

    def look_again():
        looks.append(1)
        return heads({"a": 2, "b": 5, "c": 1})

    result = audit(events, log=LOG, heads=heads({"a": 1, "c": 1}), look_again=look_again)
    assert found(result) == {("low_head", "c", 1, 2): 1}
    assert len(looks) == 1
    sound = audit(events, log=LOG, heads=heads({"a": 2, "b": 1, "c": 2}), look_again=look_again)
    assert sound.sound
    assert len(looks) == 1


def test_pruned_and_without_an_archive(log, heads):
    """What is left must be whole; whether something is missing before it cannot be told."""
    events = log({"a": [(5, 50), (7, 52)], "b": [(3, 51)]})
    ends = heads({"a": 7, "b": 4, "gone": 3})
    result = audit(events, log=LOG, heads=ends, whole=False, lowest=lambda: 50)
    assert found(result) == {("gap", "a", 6, 6): 1, ("tail", "b", 4, 4): 1}
    assert not {"late_start", "only_in_archive"} & {*result.checked}


def test_what_is_pruned_while_it_is_read_is_no_gap(log):
    """Version 2 went between the reading of version 1 and that of version 3."""
    events = log({"a": [(1, 1), (3, 9), (4, 10)], "b": [(1, 2), (2, 11)]})
    assert not audit(events, log=LOG).sound
    assert audit(events, log=LOG, whole=False, lowest=lambda: 9).sound


@pytest.fixture
def full(spark):
    """``full((1, "a", 1), …)``: events with all columns; a dict at the end changes some."""

    def make(*rows):
        values = [
            {"id": row[0], "stream": row[1], "version": row[2], **dict(*row[3:])} for row in rows
        ]
        return spark.createDataFrame(values, SCHEMA)

    return make


def test_database_against_archive(full):
    both = [(3, "a", 3), (4, "a", 4), (6, "a", 6)]
    archive = full((1, "a", 1), (2, "a", 2), *both, (5, "a", 5))
    database = full(*both, (7, "a", 7))
    events = full(*both, (7, "a", 7), (8, "a", 8))
    lowest = iter([3, 3])
    archived = database, archive
    result = audit(events, log=LOG, archived=archived, lowest=lambda: next(lowest))
    # What one store lost is not told as a gap of the stream, too.
    assert found(result) == {("only_in_archive", "a", 5, 5): 1, ("not_in_archive", "a", 7, 7): 1}
    assert result.events == 8


def test_what_is_pruned_during_the_comparison_is_not_lost(full):
    rows = [(1, "a", 1), (2, "a", 2), (3, "a", 3)]
    lowest = iter([2, None])
    kept = full(rows[2])  # 2 was there when the first look at the lowest was taken
    archived = full(), full(*rows)
    result = audit(kept, log=LOG, archived=archived, lowest=lambda: next(lowest))
    assert result.sound
    assert result.events == 3


@pytest.mark.parametrize("compared", [False, True])
def test_what_goes_after_the_lowest_position_was_looked_at_was_read(
    spark, full, heads, tmp_path, compared
):
    rows, folder = full(*((n, "a", n) for n in (1, 2, 3))), str(tmp_path / "log")
    rows.write.parquet(folder)
    database = spark.read.schema(SCHEMA).parquet(folder)
    looks = []

    def lowest():
        looks.append(1)
        if len(looks) == 1 + compared:
            shutil.rmtree(folder)
        return 1

    archived = (database, rows) if compared else None
    ends = heads({"a": 3})
    result = audit(database, log=LOG, heads=ends, archived=archived, lowest=lowest)
    assert (result.sound, result.events) == (True, 3)


def test_content_is_compared_column_by_column(full):
    here = full(
        (1, "a", 1, {"data": "x"}),
        (2, "a", 2, {"txid": 5, "data": "{}"}),
        (3, "a", 3, {"data": "xy", "metadata": "z"}),
        (4, "a", 4),
        (5, "a", 5),
    )
    there = full(
        (-1, "a", 0),  # below the lowest: it was pruned
        (-2, "a", 0, {"data": "x"}),  # as was this, so the database has nothing that differs
        (-2, "a", 0, {"data": "y"}),
        (1, "a", 1, {"metadata": "x"}),  # the same value, in the column after it
        (2, "a", 2, {"txid": 9, "data": "{}"}),  # as after a rebase
        (3, "a", 3, {"data": "x", "metadata": "yz"}),
        (4, "a", 4),
        (4, "a", 4),
        (5, "b", 5),
    )
    rows = compare_archive(here, there, lowest=1).orderBy("position").collect()
    assert [(row["kind"], row["position"], row["detail"]) for row in rows] == [
        ("archived_twice", -2, "2"),
        ("content_differs", 1, ""),
        ("content_differs", 3, ""),
        ("archived_twice", 4, "2"),
        ("content_differs", 5, ""),
    ]


def test_each_column_is_compared(full):
    values = {name: ("x", "y") for name in COLUMNS} | dict.fromkeys(("txid", "slice"), (1, 2))
    values["recorded_at"] = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))
    del values["id"], values["version"]
    stores = [
        full(*((n, "a", 1, {name: each[store]}) for n, (name, each) in enumerate(values.items())))
        for store in (0, 1)
    ]
    rows = compare_archive(*stores, lowest=0).orderBy("position").collect()
    differing = [n for n, name in enumerate(values) if name != "txid"]
    assert [(row["kind"], row["position"]) for row in rows] == [
        ("content_differs", n) for n in differing
    ]


def test_only_what_was_erased_in_the_database_differs_from_nothing(full):
    erased = {"data": "{}", "metadata": '{"erased": 1}'}
    written = {"data": '{"n": 1}', "metadata": '{"user": 1}'}
    here = [erased, {**written, "metadata": erased["metadata"]}, {**written, "data": "{}"}, written]
    there = [written, {"data": "x", "metadata": erased["metadata"]}, {"data": "{}"}, erased]
    database, archive = (
        full(*((n, "a", n, values) for n, values in enumerate(rows, 1))) for rows in (here, there)
    )
    rows = compare_archive(database, archive, lowest=1).orderBy("position").collect()
    assert [(row["kind"], row["position"]) for row in rows] == [
        ("content_differs", 2),
        ("content_differs", 3),
        ("content_differs", 4),
    ]


def test_accepted_gaps_do_not_count_until_they_grow(log):
    events = log({"a": [(1, 1), (4, 2), (8, 3)], "b": [(3, 4)], "c": [(1, 5), (1, 6)]})
    accepted = [("a", 2, 3), ("a", 5, 6), ("b", 1, 9), ("c", 1, 1), ("d", 1, 1)]
    result = audit(events, log=LOG, accepted=accepted)
    assert found(result) == {("gap", "a", 5, 7): 1, ("duplicate_version", "c", 1, 1): 1}
    assert result.accepted == 2


def test_all_are_counted_and_the_first_are_listed(log, monkeypatch):
    monkeypatch.setattr("outbox_app.pipeline.audit.LIMIT", 2)
    events = log({name: [(1, ord(name)), (3, ord(name) + 100)] for name in "dbca"})
    result = audit(events, log=LOG)
    assert result.counts == {"gap": 4}
    assert [each.stream for each in result.defects] == ["a", "b"]


@pytest.mark.parametrize(
    ("defect", "line"),
    [
        (
            Defect("gap", "order-17", 4, 6, 991, ""),
            "order-17: versions 4 to 6 are missing (position 991 waits behind them)",
        ),
        (
            Defect("gap", "order-17", 4, 4, 991, ""),
            "order-17: version 4 is missing (position 991 waits behind it)",
        ),
        (
            Defect("late_start", "order-17", 1, 1, 991, ""),
            "order-17: version 1 is missing; it begins with version 2 (position 991)",
        ),
        (
            Defect("tail", "order-17", 1, 2, None, ""),
            "order-17: versions 1 to 2 are missing, and the log has no event of the stream",
        ),
        (
            Defect("low_head", "order-17", 0, 3, 9, ""),
            "order-17: outbox_stream does not know it; the log has version 3",
        ),
        (
            Defect("order", "a\x1b[2J\u202e\n", 2, 2, 9, ""),
            r"a\x1b[2J\u202e\n version 2 (position 9) has a lower position than the version before "
            "it",
        ),
    ],
)
def test_lines_are_for_people(defect, line):
    assert defect.line == line


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {ENTITY}))
def test_each_kind_has_its_line_and_advice(kind):
    line = Defect(kind, "stream-1", 1, 2, 3, "2").line
    assert line.startswith("stream-1")
    assert line != "stream-1: 2"
    assert KINDS[kind].advice
