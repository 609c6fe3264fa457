"""The pipelines, from a log to what they leave behind: an audit's gaps and report, statistics.

Each takes a running ``Pipeline`` and tells how it gets on; what Spark computes is in ``pipeline``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...entities.operations import entity_types
from ...entities.verification import differences
from ...eventlog.registry import own_columns
from ...exceptions import InvalidOption
from .audit_gaps import accepted_gaps, lines, record
from .pipeline import Pipeline
from .statistic_table import store

if TYPE_CHECKING:
    from ..defects import Audit

#: Defects that are written out, line by line.
TOLD = 50


def run_audit(
    run: Pipeline,
    *,
    archive: str = "",
    pruned: bool = False,
    report: str = "",
    write: Callable[[str], Any],
) -> Audit:
    """Audit a log, and its archive; note missing versions as gaps.

    Raises ``ArchiveRefused``, ``ReadRefused``, ``Unreachable``, ``OSError``.
    """
    from ..archive_reader import check_files
    from ..audit import Archived, audit
    from ..audit_checks import EVENTS_SCHEMA
    from ..database import connect
    from ..figures import figures
    from ..manifest import Manifest
    from ..offset import Offsets
    from ..report import write_report
    from ..schema import some
    from ..store import Store

    folder = Path(report).absolute().parent
    if not folder.is_dir():
        raise InvalidOption(f"The report cannot be written: there is no folder {folder}.")
    manifest = Manifest.load(Store(archive), run.options.log) if archive else None
    if manifest:
        if names := own_columns(run.log):
            write(f"warning log={run.options.log} columns={','.join(names)}: not in the archive")
        check_files(run.session, manifest)
    # What the heads say now must be there at the bound, which is taken after them.
    heads = run.read(read="heads").persist()
    heads.count()
    with closing(connect(run.options)) as database:
        offsets = Offsets(database)
        archived_to = manifest.end if manifest else None
        start = archived_to or offsets.beginning()
        offsets.verify(start)
        end = json.dumps(offsets.end(start).dump())
        archived = None
        if archived_to:
            until = json.dumps(archived_to.dump())
            archived = Archived(run.read(end=until), run.read(archive=archive, end=until))
        lowest = partial(_lowest, database, offsets.scan.source)
        result = audit(
            run.read(EVENTS_SCHEMA, end=end),
            log=run.options.log,
            heads=heads,
            look_again=lambda: run.read(read="heads"),
            archived=archived,
            lowest=lowest if archive or pruned else None,
            whole=not pruned,
            accepted=accepted_gaps(run.log, using=run.using),
        )
    heads.unpersist()
    # What the database has lost and the archive has is no missing version, and not there either.
    whole = bool(archive) and not pruned and result.sound
    for entity in entity_types():
        if entity.versions is run.log:
            result = _with_entities(result, entity, using=run.using)
    for line in lines(result.defects[:TOLD]):
        write(f"defect {line}")
    if result.total > TOLD:
        write(f"… and {result.total - min(TOLD, len(result.defects))} more; see --report")
    if not archive and not pruned and result.counts.keys() & {"late_start", "tail"}:
        write("If events were pruned: --archive DIR looks for them there, --pruned does without.")
    noted = record(result.defects, log=run.log, using=run.using, whole=whole)
    write(
        f"audited log={result.log} events={result.events} streams={result.streams} "
        f"defects={result.total} accepted={result.accepted} {noted} seconds={result.seconds:.1f}"
    )
    if report:
        rows = run.read(some("stream", "type", "recorded_at"), archive=archive)
        write_report(report, result, figures=figures(rows))
        write(f"report={report}")
    return result


def _with_entities(result: Audit, entity: Any, *, using: str) -> Audit:
    """Add what of the entities is not as their versions have it."""
    from ..audit import LIMIT
    from ..defects import ENTITY_KINDS, Defect

    found = [
        Defect(f"entity_{fault.kind}", id, None, None, None, fault.text)
        for id, fault in differences(entity, using=using)
        if fault.kind != "head"  # which is "tail" or "low_head"
    ]
    found.sort(key=lambda defect: [*ENTITY_KINDS].index(defect.kind))
    return replace(
        result,
        counts={**result.counts, **Counter(each.kind for each in found)},
        defects=[*result.defects, *found[:LIMIT]],
        checked=[*result.checked, *ENTITY_KINDS],
    )


def run_statistics(
    run: Pipeline,
    *,
    inbox: Pipeline | None,
    archive: str = "",
    to: str = "",
    table: bool = False,
    top: int | None = None,
    partitions: int | None = None,
    write: Callable[[str], Any],
) -> None:
    """Compute the statistics of a log.

    Raises ``ArchiveRefused``, ``ReadRefused``, ``Unreachable``, ``InvalidOption``.
    """
    if "://" in to:
        raise InvalidOption(f"Statistics are written to a folder of this machine; got {to}.")
    from ..schema import some
    from ..statistics import (
        PARTITIONS,
        TOP,
        USED,
        for_table,
        handled_in_inbox,
        read_once,
        rows_of,
        statistics,
        write_statistics,
    )

    handled = handled_in_inbox(inbox.read(read="inbox")) if inbox else None
    with read_once(run.read(some(*USED), archive=archive)) as events:
        found = statistics(
            events,
            log=run.options.log,
            handled=handled,
            top=top or TOP,
            partitions=partitions or PARTITIONS,
        ).persist()
        if to:
            write(f"statistics log={run.options.log} file={write_statistics(found, to)}")
        if table:
            rows = store(rows_of(for_table(found)), log=run.options.log)
            write(f"statistics log={run.options.log} table=outbox_statistic rows={rows}")
        found.unpersist()


def _lowest(database: Any, source: str) -> int | None:
    [(lowest,)] = database.run(f"SELECT min(id) FROM {source}", [])
    return lowest  # type: ignore[no-any-return]
