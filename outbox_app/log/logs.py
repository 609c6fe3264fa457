"""Which logs there are: ``Event``, and every concrete model derived from ``EventLog``.

A log is known by its table, which is what cursors, stream heads and SQL refer to: the model may be
renamed. It lives on one alias, together with the cursors of who reads it.
"""

from __future__ import annotations

from django.apps import apps
from django.db import router

from ..conf import settings
from ..exceptions import UnknownLog
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


def log_alias(log: type[EventLog]) -> str:
    """Return the alias that a log lives on: the setting DATABASE, else what the routers say."""
    return settings().DATABASE or router.db_for_write(log)
