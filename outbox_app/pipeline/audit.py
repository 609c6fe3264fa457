"""The audit: is anything of a log missing, doubled, out of order, or not as the archive has it?

Every check is exact: streams are walked through in the order of their versions, and no sum stands
for them. Frames in, a frame of defects out; nothing is written. ``audit()`` runs all checks and
brings the result to the driver. Writers may go on writing, and ``outbox_prune`` pruning: what they
do meanwhile is no defect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Observation, Window
from pyspark.sql import functions as F

from .defects import KINDS, MISSING, Audit, Defect
from .schema import COLUMNS

#: What a frame of events needs for the versions; the comparison needs all columns.
EVENTS_SCHEMA = "id bigint, stream string, version bigint"
#: The columns of a frame of defects.
DEFECTS_SCHEMA = (
    "kind string, stream string, first bigint, last bigint, position bigint, detail string"
)
#: Defects of a kind that are brought to the driver.
LIMIT = 10_000

#: ``txid`` is another one after ``outbox_rebase``.
_COMPARED = tuple(name for name in COLUMNS if name != "txid")
_VERSIONS = ("gap", "duplicate_version", "duplicate_id", "order", "invalid_version")
_COMPARISON = ("only_in_archive", "not_in_archive", "content_differs", "archived_twice")


class Archived(NamedTuple):
    """A log that was archived up to a bound, in its two stores; frames with all columns."""

    #: What the database has within the bound of the archive.
    database: DataFrame
    #: What the archive has.
    rows: DataFrame


def audit(
    events: DataFrame,
    *,
    log: str,
    heads: DataFrame | None = None,
    look_again: Callable[[], DataFrame] | None = None,
    archived: Archived | None = None,
    lowest: Callable[[], int | None] | None = None,
    whole: bool = True,
    accepted: Iterable[tuple[str, int, int]] = (),
    limit: int = LIMIT,
) -> Audit:
    """Run every check that the frames allow.

    Args:
        events: What the database has up to a bound, without tombstones. ``EVENTS_SCHEMA`` will do.
        log: Table of the log.
        heads: Latest versions, as in ``HEADS_SCHEMA``, read **before** the bound was taken and kept
            (persisted, or a list): what they name must be there. Default: ends are not checked.
        look_again: Reads the heads anew, where some look too low: they may have moved meanwhile.
        archived: Compare the two stores. What was pruned is then taken from the archive.
        lowest: Returns the lowest position that the database has now; None: it has none. Needed
            where the log is pruned or archived. Default: nothing was ever pruned.
        whole: Each stream must begin with version 1. False for a log that was pruned and is
            audited without its archive: whether a stream begins too late cannot be told then.
        accepted: Stream, first and last of version gaps that a person has accepted.
        limit: Defects of each kind in the result. All are counted.
    """
    started = time.monotonic()
    spark = events.sparkSession
    events = events.select("id", "stream", "version").persist()
    held = [events]
    try:
        found = same_ids(events)
        # What pruning removes while the rows are read is missing in the middle of what was read.
        # So they are read first; what is left at or above the lowest position now was there then.
        events.count()
        if archived:
            differing = compare(*archived, lowest=_lowest(lowest)).persist()
            held.append(differing)
            differing.count()
        floor = _lowest(lowest)
        kept = events.where(F.col("id") >= floor)
        if archived:
            differing = differing.where(f"kind != 'only_in_archive' or position >= {floor}")
            lost = differing.where("kind = 'only_in_archive'").selectExpr(
                "position as id", "stream", "first as version"
            )
            pruned = archived.rows.where(F.col("id") < floor).select("id", "stream", "version")
            kept = kept.unionByName(pruned).unionByName(lost)
            found = found.unionByName(differing)
        if heads is not None and "log" in heads.columns:
            heads = heads.where(F.col("log") == log)
        seen = Observation()
        found = found.unionByName(versions(kept, heads, whole=whole, seen=seen)).persist()
        held.append(found)
        counts = _counts(found)
        if look_again and "low_head" in counts:
            found = _still_low(found, look_again().where(F.col("log") == log)).persist()
            held.append(found)
            counts = _counts(found)
        taken = list(accepted)
        number = 0
        if taken and counts.keys() & set(MISSING):
            schema = "a_stream string, a_first bigint, a_last bigint"
            left = _without(found, spark.createDataFrame(taken, schema))
            before, counts = sum(counts.values()), _counts(left)
            found, number = left, before - sum(counts.values())
        return Audit(
            log=log,
            counts=counts,
            defects=_first(found, counts, limit),
            events=seen.get["events"],
            streams=seen.get["streams"] or 0,
            seconds=time.monotonic() - started,
            checked=_checked(heads is not None, archived is not None, whole),
            accepted=number,
        )
    finally:
        for frame in held:
            frame.unpersist()


def versions(
    events: DataFrame,
    heads: DataFrame | None = None,
    *,
    whole: bool = True,
    seen: Observation | None = None,
) -> DataFrame:
    """Return what is wrong with the versions of each stream, in one walk through them.

    Args:
        events: Columns of ``EVENTS_SCHEMA``.
        heads: ``stream`` and ``version``: the end that each stream must have.
        whole: Each stream must begin with version 1.
        seen: Takes the number of ``events`` and ``streams`` when the frame is computed.
    """
    rows = events.select("stream", "version", "id", F.lit(False).alias("head"))
    if heads is not None:
        # A head comes behind the events of its stream: what is before it is the last of them.
        none = F.lit(None).cast("bigint")
        ends = heads.select("stream", "version", none.alias("id"), F.lit(True).alias("head"))
        rows = rows.unionByName(ends)
    walk = Window.partitionBy("stream").orderBy("head", "version", "id")
    before = walk.rowsBetween(Window.unboundedPreceding, -1)
    head, version, id, previous = (F.col(name) for name in ("head", "version", "id", "previous"))
    rows = rows.select(
        "*",
        F.lag("version").over(walk).alias("previous"),
        F.lag("id").over(walk).alias("previous_id"),
        F.lead("version").over(walk).isNull().alias("ends"),
    )
    opens = ~head & ~previous.eqNullSafe(version)
    # Of a version that is there twice the lower position counts: the other one is the double.
    rows = rows.select("*", F.last(F.when(opens, id), True).over(before).alias("before_id"))
    if seen is not None:
        rows = rows.observe(
            seen,
            F.count_if(~head).alias("events"),
            F.count_if(~head & previous.isNull()).alias("streams"),
        )
    reached = F.greatest(F.coalesce(previous, F.lit(0)), F.lit(0))
    late = reached == 0
    skips = ~head & (version > reached + 1)
    cases = [
        _case("gap", skips & ~late, reached + 1, version - 1, id),
        _case("order", opens & (id < F.col("before_id")), version, version, id),
        _case(
            "duplicate_version",
            ~head & (previous == version) & (F.col("previous_id") != id),
            version,
            version,
            id,
        ),
        _case("invalid_version", ~head & (version < 1), version, version, id),
    ]
    if whole:
        cases.append(_case("late_start", skips & late, F.lit(1), version - 1, id))
    if heads is not None:
        # Where the front was pruned a stream may be gone altogether.
        missing = head & (version > reached) & (F.lit(whole) | previous.isNotNull())
        no_head = ~head & F.col("ends")
        cases += [
            _case("tail", missing, reached + 1, version, F.lit(None)),
            _case("low_head", head & (version < previous), version, previous, F.col("previous_id")),
            _case("low_head", no_head, F.lit(0), version, id),
        ]
    found = rows.select("stream", F.explode(F.array_compact(F.array(*cases))).alias("defect"))
    return _defects(found.select("stream", "defect.*"))


def same_ids(events: DataFrame) -> DataFrame:
    """Return the positions that several rows have."""
    twice = events.groupBy("id").agg(F.count(F.lit(1)).alias("rows")).where("rows > 1")
    return _defects(
        twice.selectExpr(
            "'duplicate_id' as kind", "'' as stream", "id as position", "string(rows) as detail"
        )
    )


def compare(database: DataFrame, archive: DataFrame, *, lowest: int) -> DataFrame:
    """Return what the two stores of a log do not have in common.

    Content is compared by 64 bits of hash over all columns but ``txid``.

    Args:
        database: What the database has within the bound of the archive, all columns.
        archive: What the archive has, all columns.
        lowest: The lowest position in the database. What is below it was pruned, and is in the
            archive alone.
    """
    columns = [F.col(name) for name in _COMPARED]
    # A hash passes over NULL as if the column were not there.
    content = F.xxhash64(*columns, *(column.isNull() for column in columns))
    rows = _of_store(database, content, 1, 0).unionByName(_of_store(archive, content, 0, 1))
    # Sorted by position once, whatever has to be computed: a hash aggregate holds no strings.
    rows = (
        rows.repartition("id")
        .groupBy("id")
        .agg(
            F.sum("here").alias("here"),
            F.sum("there").alias("there"),
            (F.min("content") != F.max("content")).alias("differ"),
            F.min("stream").alias("stream"),
            F.min("version").alias("version"),
        )
    )
    here, there, at = F.col("here"), F.col("there"), F.col("version")
    in_both = (here > 0) & (there > 0)
    id = F.col("id")
    twice = F.when(there > 1, there.cast("string"))
    cases = [
        _case("only_in_archive", (here == 0) & (id >= lowest), at, at, id),
        _case("not_in_archive", there == 0, at, at, id),
        _case("content_differs", F.col("differ") & in_both, at, at, id),
        _case("archived_twice", there > 1, at, at, id, twice),
    ]
    found = rows.select("stream", F.explode(F.array_compact(F.array(*cases))).alias("defect"))
    return _defects(found.select("stream", "defect.*"))


def _of_store(rows: DataFrame, content: Column, here: int, there: int) -> DataFrame:
    counted = [F.lit(here).alias("here"), F.lit(there).alias("there")]
    return rows.select("id", "stream", "version", content.alias("content"), *counted)


def _case(
    kind: str,
    condition: Column,
    first: Column,
    last: Column,
    position: Column,
    detail: Column | None = None,
) -> Column:
    detail = F.lit("") if detail is None else detail
    return F.when(
        condition,
        F.struct(
            F.lit(kind).alias("kind"),
            first.cast("bigint").alias("first"),
            last.cast("bigint").alias("last"),
            position.cast("bigint").alias("position"),
            detail.alias("detail"),
        ),
    )


def _defects(found: DataFrame) -> DataFrame:
    fields = [part.split(" ") for part in DEFECTS_SCHEMA.split(", ")]
    return found.select(
        *(
            (F.col(name) if name in found.columns else F.lit(None)).cast(kind).alias(name)
            for name, kind in fields
        )
    )


def _still_low(found: DataFrame, heads: DataFrame) -> DataFrame:
    moved = heads.select(F.col("stream").alias("h_stream"), F.col("version").alias("h_version"))
    condition = "kind = 'low_head' and stream = h_stream and h_version >= last"
    return found.join(moved, F.expr(condition), "left_anti")


def _without(found: DataFrame, accepted: DataFrame) -> DataFrame:
    kinds = ", ".join(f"'{kind}'" for kind in MISSING)
    condition = f"kind in ({kinds}) and stream = a_stream and first >= a_first and last <= a_last"
    return found.join(F.broadcast(accepted), F.expr(condition), "left_anti")


def _lowest(lowest: Callable[[], int | None] | None) -> int:
    if lowest is None:
        return -(2**63)
    found = lowest()
    return 2**63 - 1 if found is None else found


def _counts(found: DataFrame) -> dict[str, int]:
    counts = {row["kind"]: row["count"] for row in found.groupBy("kind").count().collect()}
    return {kind: counts[kind] for kind in KINDS if kind in counts}


def _first(found: DataFrame, counts: Iterable[str], limit: int) -> list[Defect]:
    defects = []
    for kind in counts:
        rows = found.where(F.col("kind") == kind).orderBy("stream", "first", "position")
        defects += [Defect(*row) for row in rows.limit(limit).collect()]
    return defects


def _checked(heads: bool, archived: bool, whole: bool) -> list[str]:
    kinds = {*_VERSIONS, *(_COMPARISON if archived else ())}
    kinds |= {"tail", "low_head"} if heads else set()
    kinds |= {"late_start"} if whole else set()
    return [kind for kind in KINDS if kind in kinds]
