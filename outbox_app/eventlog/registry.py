"""Which logs there are: ``Event``, and every concrete model derived from ``EventLog``.

A log is known by its table, which is what cursors, stream heads and SQL refer to: the model may be
renamed. It lives on one alias, together with the cursors of who reads it.
"""

from __future__ import annotations

from django.apps import apps

from ..exceptions import ArchiveRefused, UnknownLog
from ..models import EventLog


def all_logs() -> list[type[EventLog]]:
    """Return the logs of the project, by table name."""
    models = [model for model in apps.get_models() if issubclass(model, EventLog)]
    concrete = [model for model in models if not model._meta.proxy]
    return sorted(concrete, key=lambda model: model._meta.db_table)


def log_named(name: str) -> type[EventLog]:
    """Return the log of a table name, or of ``app_label.Model``.

    Raises:
        UnknownLog: There is none.
    """
    for log in all_logs():
        if name in (log._meta.db_table, log._meta.label, log._meta.label_lower):
            return log
    known = ", ".join(log._meta.db_table for log in all_logs())
    raise UnknownLog(f"There is no log {name!r}. Known: {known}.")


def own_columns(log: type[EventLog]) -> list[str]:
    """Return the columns that a log has beyond those of every log, but for generated ones."""
    every = {field.name for field in EventLog._meta.local_fields}
    fields = log._meta.concrete_fields
    return [str(f.column) for f in fields if f.name not in every and not f.generated]


def require_archivable(log: type[EventLog]) -> None:
    """See that an archive keeps all of a log.

    Raises:
        ArchiveRefused: It has columns of its own, which no archive keeps.
    """
    if names := own_columns(log):
        raise ArchiveRefused(
            f"{log._meta.db_table} has columns of its own ({', '.join(names)}), which an archive "
            "does not keep yet, so that they would be lost with the rows that are pruned. Put "
            "what they hold into data or metadata and remove them; or remove old events with all "
            "their columns: manage.py outbox_prune --events --log "
            f"{log._meta.db_table} --older-than DAYS."
        )
