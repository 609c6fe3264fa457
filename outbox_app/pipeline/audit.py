"""The audit: is any event of a log missing, doubled, out of order, or different in the archive?

``audit()`` runs the checks of ``audit_checks`` and brings the result to the driver; nothing is
written. Events may be published and pruned during the audit: that is not reported as a defect.
Versions that were committed before the bound must be there, so heads are read before the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from .audit_checks import STREAM, compare_archive, settled, versions
from .defects import ENTITY, KINDS, MISSING, Audit, Defect

#: How many defects of each kind are brought to the driver.
LIMIT = 10_000

_COMPARISON = ("only_in_archive", "not_in_archive", "content_differs", "archived_twice")


def audit(
    events: DataFrame,
    *,
    log: str,
    heads: DataFrame,
    look_again: Callable[[], DataFrame] | None = None,
    archived: tuple[DataFrame, DataFrame] | None = None,
    lowest: Callable[[], int | None] | None = None,
    whole: bool = True,
    accepted: Iterable[tuple[str, int, int]] = (),
) -> Audit:
    """Run every check that the frames allow.

    ``events`` has the rows of the database up to a bound, without tombstones; ``EVENTS_SCHEMA``
    suffices. ``heads`` (log, stream, version) must be read **before** the bound is taken, and kept,
    as by persist() and count(): their versions must be there. If heads look too low, ``look_again``
    reads them again. ``archived`` are the rows of the database within the bound of the archive, and
    the rows of the archive, with all columns: the two are compared, and pruned rows are taken from
    the archive. ``lowest`` returns the lowest position that the database has now; pass None if
    nothing was ever pruned. ``whole`` is False for a log that was pruned and is audited without its
    archive: late starts of streams are not checked then. ``accepted`` are stream, first and last of
    gaps that a person has accepted. The result has ``LIMIT`` defects of each kind at most, and
    counts all.
    """
    started = time.monotonic()
    heads = heads.where(F.col("log") == log)
    with ExitStack() as held:

        def kept(frame: DataFrame) -> DataFrame:
            held.callback(frame.persist().unpersist)
            return frame

        # Rows that are pruned during the reading are missing in the middle of the result. So read
        # the rows first, then the lowest position: no row at or above that was pruned.
        events = kept(events.select("id", "stream", "version"))
        events.count()
        if archived:
            database, archive = archived
            differing = kept(compare_archive(database, archive, lowest=_lowest(lowest)))
            differing.count()
        floor = _lowest(lowest)
        rows = events.where(F.col("id") >= floor)
        if archived:
            differing = differing.where(f"kind != 'only_in_archive' or position >= {floor}")
            # Report a defect once: a row that one of the stores has is not missing in its stream.
            lost = differing.where("kind = 'only_in_archive'")
            rows = rows.unionByName(
                archive.where(F.col("id") < floor).select(events.columns)
            ).unionByName(lost.selectExpr("position as id", "stream", "first as version"))
        found = versions(rows, heads, whole=whole)
        found = kept(found.unionByName(differing) if archived else found)
        counts = _counts(found)
        found = found.where(F.col("kind") != STREAM)
        of_streams = counts.pop(STREAM, 0)
        if "order" in counts:
            found = kept(settled(found, rows))
            counts = _counts(found)
        if look_again and "low_head" in counts:
            moved = look_again().where(F.col("log") == log)
            found = kept(_still_low(found, moved))
            counts = _counts(found)
        before = sum(counts.values())
        known = list(accepted)
        if known and counts.keys() & set(MISSING):
            found = _without(found, known)
            counts = _counts(found)
        return Audit(
            log=log,
            counts=counts,
            defects=_first(found, counts),
            events=rows.count(),
            streams=of_streams,
            seconds=time.monotonic() - started,
            checked=_checked(archived is not None, whole),
            accepted=before - sum(counts.values()),
        )


def _still_low(found: DataFrame, heads: DataFrame) -> DataFrame:
    moved = heads.select(F.col("stream").alias("h_stream"), F.col("version").alias("h_version"))
    condition = "kind = 'low_head' and stream = h_stream and h_version >= last"
    return found.join(moved, F.expr(condition), "left_anti")


def _without(found: DataFrame, accepted: list[tuple[str, int, int]]) -> DataFrame:
    schema = "a_stream string, a_first bigint, a_last bigint"
    gaps = found.sparkSession.createDataFrame(accepted, schema)
    kinds = ", ".join(f"'{kind}'" for kind in MISSING)
    condition = f"kind in ({kinds}) and stream = a_stream and first >= a_first and last <= a_last"
    return found.join(F.broadcast(gaps), F.expr(condition), "left_anti")


def _lowest(lowest: Callable[[], int | None] | None) -> int:
    if lowest is None:
        return -(2**63)
    found = lowest()
    return 2**63 - 1 if found is None else found


def _counts(found: DataFrame) -> dict[str, int]:
    counts: dict[str, int] = dict(found.groupBy("kind").count().collect())
    return {kind: counts[kind] for kind in (*KINDS, STREAM) if kind in counts}


def _first(found: DataFrame, counts: Mapping[str, int]) -> list[Defect]:
    if not counts:
        return []
    place = F.row_number().over(Window.partitionBy("kind").orderBy("stream", "first", "position"))
    first = found.select("*", place.alias("place")).where(F.col("place") <= LIMIT).collect()
    kinds = list(counts)
    first.sort(key=lambda row: (kinds.index(row["kind"]), row["place"]))
    return [Defect(*row[:-1]) for row in first]


def _checked(archived: bool, whole: bool) -> list[str]:
    left_out = [ENTITY, *(() if archived else _COMPARISON), *(() if whole else ("late_start",))]
    return [kind for kind in KINDS if kind not in left_out]
