"""The checks of an audit, each a function from frames to a frame with the columns of ``Defect``.

Each stream is read in the order of its versions; sums would not do (the versions 1, 1, 4, 4 have
the sum of 1 to 4). Comparing neighbours cannot prove the kind ``order``: it is only suspected at
first, and if there are suspects, ``settled`` checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from .schema import COLUMNS, ERASED, REBASED

#: The columns that the check of versions needs; the comparison needs all columns.
EVENTS_SCHEMA = "id bigint, stream string, version bigint"
#: A row of this kind is not a defect, but counts a stream that was checked.
STREAM = "stream"

_COMPARED = tuple(name for name in COLUMNS if name != REBASED)


def versions(events: DataFrame, heads: DataFrame, *, whole: bool) -> DataFrame:
    """Return the defects in the versions of each stream, in one pass.

    The result also has a row of the kind ``STREAM`` for each stream with events.
    """
    # A head is sorted after the events of its stream: the row before it is the last event.
    none = F.lit(None).cast("bigint").alias("id")
    rows = events.select("stream", "version", "id", F.lit(False).alias("head"))
    rows = rows.unionByName(heads.select("stream", "version", none, F.lit(True).alias("head")))
    walk = Window.partitionBy("stream").orderBy("head", "version", "id")
    head, version, id, previous = (F.col(name) for name in ("head", "version", "id", "previous"))
    rows = rows.select(
        "*",
        F.lag("version").over(walk).alias("previous"),
        F.lag("id").over(walk).alias("previous_id"),
        F.lead("head").over(walk).alias("head_next"),
    )
    reached = F.greatest(F.coalesce(previous, F.lit(0)), F.lit(0))
    late, after = reached == 0, F.try_add(reached, F.lit(1))  # null above the largest
    skips = ~head & (version > after)
    double = ~head & (previous == version)
    falls = id < F.col("previous_id")
    ends = F.col("head_next").isNull()
    # If the front was pruned, all events of a stream may be gone.
    missing = head & (version > reached) & (F.lit(whole) | previous.isNotNull())
    cases = [
        _Case(STREAM, ~head & F.coalesce("head_next", F.lit(True))),
        _Case("gap", skips & ~late, after, version - 1, id),
        _Case("order", falls, previous, version, id),
        _Case("duplicate_version", double, version, version, id),
        _Case("invalid_version", ~head & (version < 1), version, version, id),
        _Case("tail", missing, after, version),
        _Case("low_head", head & (version < previous), version, previous, F.col("previous_id")),
        _Case("low_head", ~head & ends, F.lit(0), version, id),
    ]
    if whole:
        cases.append(_Case("late_start", skips & late, F.lit(1), version - 1, id))
    return _found(rows, cases)


def settled(found: DataFrame, rows: DataFrame) -> DataFrame:
    """Return the defects of ``versions(rows)``, each suspected ``order`` checked exactly.

    If a version occurs twice, its lower position counts: the other row is the duplicate.
    """
    order = found.where("kind = 'order'")
    before = rows.join(order.selectExpr("stream", "first as version"), ["stream", "version"])
    before = before.groupBy("stream", F.col("version").alias("first")).agg(F.min("id").alias("id"))
    order = order.join(before, ["stream", "first"]).where("position < id")
    order = order.withColumn("first", F.col("last")).select(found.columns)
    return found.where("kind != 'order'").unionByName(order)


def compare_archive(database: DataFrame, archive: DataFrame, *, lowest: int) -> DataFrame:
    """Return the differences between the database and the archive, within the archive's bound.

    Content is compared by a 64-bit hash over all columns but ``txid``. Rows below ``lowest``, the
    lowest position in the database, were pruned, and are only in the archive. A version that was
    erased in the database is no difference, although the archive still has its content.
    """
    columns = [F.col(name) for name in _COMPARED]
    # The hash skips a NULL as if the column did not exist.
    content = F.xxhash64(*columns, *(column.isNull() for column in columns))
    erased = (F.col("data") == "{}") & F.col("metadata").startswith(ERASED)
    kept = F.when(erased, None).otherwise(content)
    rows = _of_store(database, kept, 1, 0).unionByName(_of_store(archive, content, 0, 1))
    # One sort by position serves all aggregates: a hash aggregate cannot hold strings.
    sums = [F.sum(name).alias(name) for name in ("here", "there")]
    names = [F.min(name).alias(name) for name in ("stream", "version")]
    differ = (F.min("content") != F.max("content")).alias("differ")
    rows = rows.repartition("id").groupBy("id").agg(*sums, *names, differ)
    here, there, at, id = (F.col(name) for name in ("here", "there", "version", "id"))
    in_both = (here > 0) & (there > 0)
    twice = F.when(there > 1, there.cast("string"))
    cases = [
        _Case("only_in_archive", (here == 0) & (id >= lowest), at, at, id),
        _Case("not_in_archive", there == 0, at, at, id),
        _Case("content_differs", F.col("differ") & in_both, at, at, id),
        _Case("archived_twice", there > 1, at, at, id, twice),
    ]
    return _found(rows, cases)


def _of_store(rows: DataFrame, content: Column, here: int, there: int) -> DataFrame:
    counted = [F.lit(here).alias("here"), F.lit(there).alias("there")]
    return rows.select("id", "stream", "version", content.alias("content"), *counted)


class _Case(NamedTuple):
    kind: str
    condition: Column
    first: Column | None = None
    last: Column | None = None
    position: Column | None = None
    detail: Column | str = ""

    def defect(self) -> Column:
        numbers = {"first": self.first, "last": self.last, "position": self.position}
        return F.struct(
            F.lit(self.kind).alias("kind"),
            "stream",
            *(F.lit(value).cast("bigint").alias(name) for name, value in numbers.items()),
            F.lit(self.detail).alias("detail"),
        )


def _found(rows: DataFrame, cases: Sequence[_Case]) -> DataFrame:
    """Return a defect for each case whose condition a row meets."""
    # Nearly all rows meet no condition: drop them before any defect is made.
    rows = rows.where(reduce(or_, (case.condition for case in cases)))
    defects = F.array(*(F.when(case.condition, case.defect()) for case in cases))
    return rows.select(F.inline(F.array_compact(defects)))
