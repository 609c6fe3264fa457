"""Which logs there are: ``Event``, and every concrete model derived from ``EventLog``.

A log is identified by its table: cursors, stream heads and SQL refer to that, so the model may be
renamed. A log lives on one alias, together with the cursors of its readers.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime, timedelta

from django.apps import apps
from django.db.models import Max, Min

from ...aliases import model_alias
from ...database.clock import aware
from ..conf import event_settings
from ..exceptions import UnknownLog
from ..models import EventLog

#: Seconds by which ``recorded_at`` may be out of order.
MARGIN = 1.0


def all_logs(*, using: str | None = None) -> list[type[EventLog]]:
    """Return the logs of the project, or those on one alias, by table name."""
    models = [model for model in apps.get_models() if issubclass(model, EventLog)]
    logs = [log for log in models if not log._meta.proxy]
    logs = [log for log in logs if using is None or model_alias(log) == using]
    return sorted(logs, key=lambda log: log._meta.db_table)


def log_named(name: str) -> type[EventLog]:
    """Return the log of a table name or of ``app_label.Model``. Raises ``UnknownLog``."""
    for log in all_logs():
        if name in (log._meta.db_table, log._meta.label, log._meta.label_lower):
            return log
    known = ", ".join(log._meta.db_table for log in all_logs())
    raise UnknownLog(f"There is no log {name!r}. Known: {known}.")


def sinks(using: str | None = None) -> dict[type[EventLog], tuple[str, int]]:
    """Return archive and age in days of the logs in the setting SINK: of all, or on one alias."""
    named = {log_named(name): each for name, each in event_settings().SINK.items()}
    return {
        log: (archive, days)
        for log, (archive, days) in named.items()
        if using in (None, model_alias(log))
    }


def position_before(log: type[EventLog], moment: datetime, *, using: str) -> int:
    """Return a position after which all events lie that were recorded at a moment or later.

    ``recorded_at`` grows with the positions, but not strictly: a statement gets its time before its
    rows get their positions. So some events after the position may have been recorded up to
    ``MARGIN`` seconds earlier. Bisection finds it with at most 64 looks at the primary key.
    """
    rows = log._base_manager.using(using).order_by("id")
    ends = rows.aggregate(first=Min("id"), last=Max("id"))
    positions = range(ends["first"] or 1, (ends["last"] or 0) + 1)

    def recorded_from(position: int) -> datetime:
        times = rows.filter(id__gte=position).values_list("recorded_at", flat=True)
        return times.first() or moment

    begin = moment - timedelta(seconds=MARGIN)
    # Without a time zone, an hour may occur twice, and times go back: begin in the first one.
    first, second = (aware(begin.replace(fold=n), using=using).utcoffset() for n in (0, 1))
    begin -= max(first - second, timedelta())  # type: ignore[operator]
    return positions.start + bisect_left(positions, begin, key=recorded_from) - 1
