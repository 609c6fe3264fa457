"""The audit: is anything of a log missing, doubled, out of order, or not as the archive has it?

``audit()`` runs the checks of ``checks`` and brings the result to the driver; nothing is written.
Writers may go on writing, and ``outbox_prune`` pruning: what they do meanwhile is no defect. What
was committed before the bound was taken must be there, so heads are read before the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .checks import STREAM, compare, same_ids, versions
from .defects import KINDS, MISSING, Audit, Defect

#: Defects of a kind that are brought to the driver.
LIMIT = 10_000

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
        heads: Latest versions (log, stream, version), read **before** the bound was taken and kept,
            as by persist() and count(): what they name must be there. Default: ends are not
            checked.
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
    if heads is not None:
        heads = heads.where(F.col("log") == log)
    with _Held() as held:
        # What pruning removes while the rows are read is missing in the middle of what was read.
        # So they are read first; what is left at or above the lowest position now was there then.
        events = held.computed(events.select("id", "stream", "version"))
        found = same_ids(events)
        if archived:
            differing = held.computed(compare(*archived, lowest=_lowest(lowest)))
        floor = _lowest(lowest)
        rows = events.where(F.col("id") >= floor)
        if archived:
            differing = differing.where(f"kind != 'only_in_archive' or position >= {floor}")
            found = found.unionByName(differing)
            # Each defect is told once: what one store has is not missing in its stream.
            lost = differing.where("kind = 'only_in_archive'")
            rows = rows.unionByName(
                archived.rows.where(F.col("id") < floor).select(events.columns)
            ).unionByName(lost.selectExpr("position as id", "stream", "first as version"))
        found = held.computed(found.unionByName(versions(rows, heads, whole=whole)))
        streams = found.where(F.col("kind") == STREAM)
        [(number, of_streams)] = streams.agg(F.sum("last"), F.count("last")).collect()
        found = found.where(F.col("kind") != STREAM)
        counts = _counts(found)
        if look_again and "low_head" in counts:
            found = held.computed(_still_low(found, look_again().where(F.col("log") == log)))
            counts = _counts(found)
        before = sum(counts.values())
        given = list(accepted)
        if given and counts.keys() & set(MISSING):
            found = _without(found, given)
            counts = _counts(found)
        return Audit(
            log=log,
            counts=counts,
            defects=_first(found, counts, limit),
            events=number or 0,
            streams=of_streams,
            seconds=time.monotonic() - started,
            checked=_checked(heads is not None, archived is not None, whole),
            accepted=before - sum(counts.values()),
        )


class _Held:
    """Frames that were computed, and are kept until the audit ends."""

    def __init__(self) -> None:
        self._frames: list[DataFrame] = []

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *exception: object) -> None:
        for frame in self._frames:
            frame.unpersist()

    def computed(self, frame: DataFrame) -> DataFrame:
        self._frames.append(frame.persist())
        frame.count()
        return frame


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
