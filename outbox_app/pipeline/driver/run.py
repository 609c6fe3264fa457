"""Runs pipelines and keeps their results: an audit's gaps and report, and statistics.

The folder has only the statistics of the last run.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ...text import Write
from ..archive_reader import check_files, planned
from ..audit import LIMIT, audit
from ..audit_checks import EVENTS_SCHEMA
from ..database import connect
from ..defects import ENTITY, Audit, Defect
from ..exceptions import InvalidOption, PipelineError
from ..figures import figures
from ..offset import Offsets
from ..schema import some
from ..statistics import USED, statistics, write_statistics
from .audit_gaps import accepted_gaps, record
from .pipeline import Pipeline, disconnect
from .report import write_report

#: How many defects are written out, line by line.
LISTED = 50


def run_audit(
    run: Pipeline, *, archive: str = "", pruned: bool = False, report: str = "", write: Write
) -> Audit:
    """Audit a log, and its archive; note missing versions as gaps. Raises ``OutboxError``."""
    target = Path(report).absolute()
    if not target.parent.is_dir():
        raise InvalidOption(f"The report cannot be written: there is no folder {target.parent}.")
    if report and target.is_dir():
        raise InvalidOption(f"The report cannot be written: {target} is a folder.")
    result = _audited(run, archive=archive, pruned=pruned)
    # A version that only the archive has is no missing one, but the log lacks it: hence ``sound``.
    whole = bool(archive) and not pruned and result.sound
    if (found := run.log.audited(using=run.using)) is not None:
        result = _with_entities(result, found)
    for defect in result.defects[:LISTED]:
        write(f"defect {defect.line}")
    if result.total > LISTED:
        write(f"… and {result.total - min(LISTED, len(result.defects))} more; see --report")
    if not archive and not pruned and result.counts.keys() & {"late_start", "tail"}:
        write("If events were pruned: give --archive DIR to look for them there, or else --pruned.")
    noted = record(result, log=run.log, using=run.using, whole=whole)
    write(
        f"audited log={result.log} events={result.events} streams={result.streams} "
        f"defects={result.total} accepted={result.accepted} {noted} seconds={result.seconds:.1f}"
    )
    if report:
        rows = run.read(some("stream", "type", "recorded_at"), archive=archive)
        write_report(report, result, figures=figures(rows))
        write(f"report={report}")
    return result


def _audited(run: Pipeline, *, archive: str, pruned: bool) -> Audit:
    """Audit. Raises ``PipelineError`` if the log was archived and pruned meanwhile."""
    plan = planned(replace(run.options, archive=archive)) if archive else None
    table = plan.archive if plan else None
    if table:
        check_files(run.session, table)
    # The versions of these heads must be there at the bound, which is taken after them.
    heads = run.read(read="heads").persist()
    heads.count()
    with closing(connect(run.options)) as database:
        offsets = Offsets(database)
        start = table.end if table else offsets.beginning()
        offsets.verify(start)
        end, until = offsets.end(start).text, start.text
        lowest = f"SELECT min(id) FROM {offsets.scan.source}"
    archived = None
    if table:
        archived = run.read(end=until), run.read(archive=archive, end=until)
    accepted = accepted_gaps(run.log, using=run.using)
    disconnect(run.using)
    result = audit(
        run.read(EVENTS_SCHEMA, end=end),
        log=run.options.log,
        heads=heads,
        look_again=lambda: run.read(read="heads"),
        archived=archived,
        lowest=(lambda: _ask(run, lowest)) if archive or pruned else None,
        whole=not pruned,
        accepted=accepted,
    )
    heads.unpersist()
    if (plan and table and plan.lowest and not result.sound
            and _ask(run, f"{lowest} WHERE id = {plan.lowest}") is None):  # fmt: skip
        table.refresh()
        if table.end != start:
            raise PipelineError(
                f"{run.options.log} was archived and pruned while it was audited, so rows may be "
                "missing in what was read. Run the audit again; no gap was recorded."
            )
    return result


def _ask(run: Pipeline, sql: str) -> int | None:
    """Query a number from the database, over a new connection: an old one may have timed out."""
    with closing(connect(run.options)) as database:
        number: int | None = database.run(sql)[0][0]
        return number


def _with_entities(result: Audit, differences: Iterable[tuple[str, str]]) -> Audit:
    """Add the differences between entities and their versions."""
    found = [Defect(ENTITY, id, None, None, None, text) for id, text in differences]
    return replace(
        result,
        counts={**result.counts, **({ENTITY: len(found)} if found else {})},
        defects=[*result.defects, *found[:LIMIT]],
        checked=[*result.checked, ENTITY],
    )


def run_statistics(
    run: Pipeline,
    *,
    inbox: Pipeline,
    to: str,
    archive: str = "",
    partitions: int | None = None,
    write: Write,
) -> None:
    """Write the statistics of a log into a folder. Raises ``OutboxError``."""
    if "://" in to:
        raise InvalidOption(f"Statistics are written to a folder of this machine; got {to}.")
    Path(to).mkdir(parents=True, exist_ok=True)  # what fails here, fails before all is counted
    log, handled = run.options.log, inbox.read(read="inbox")
    events = run.read(some(*USED), archive=archive).persist()
    found = statistics(events, handled, log=log, partitions=partitions).persist()
    write(f"statistics log={log} file={write_statistics(found, to)}")
    found.unpersist()
    events.unpersist()
