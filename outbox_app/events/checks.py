"""Event logs: models and databases that cannot be read exactly, and subscriptions that read them.

Models and subscriptions are checked without a database. The tables of logs, their servers and their
cursors are checked for the aliases that ``--database`` names; ``log.requirements`` has the
requirements. (Django's own ``models.E028`` reports two models with one table.) The check does not
see an index that was made by hand and is not in the model's ``Meta``: silence its error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import django.db
from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.db.models import Field, ForeignKey

from ..capability import needed
from ..checks.aliases import written_aliases
from ..checks.messages import LISTED
from ..database.tables import Tables
from ..models import StagedJob
from .conf import event_settings
from .exceptions import DamagedCursor, ForeignCursor, UnsafeLog
from .log.reader import LogReader, reads_by_time
from .log.registry import all_logs
from .log.requirements import violations
from .models import Cursor, EventLog
from .subscriptions.subscriber import all_subscribers


def check_logs(app_configs: Sequence[AppConfig] | None = None, **kwargs: Any) -> list[CheckMessage]:
    return [
        message
        for log in all_logs()
        if app_configs is None or log._meta.app_config in app_configs
        for message in (*_check_meta(log), *_check_fields(log), *_check_relations(log))
    ]


def _check_meta(log: type[EventLog]) -> Iterator[CheckMessage]:
    if log._meta.parents:
        yield Error(
            "The log is derived from a model that has a table of its own: each event would be "
            "split between two tables.",
            hint="Derive it from outbox_app.events.models.EventLog, or from an abstract subclass.",
            obj=log,
            id="outbox.E019",
        )
        return
    missing = []
    if not any(index.fields[:2] == ["txid", "id"] for index in log._meta.indexes):
        missing.append("the index on (txid, id)")
    pairs = [set(each.fields) for each in log._meta.total_unique_constraints]
    if {"stream", "version"} not in [*pairs, *map(set, log._meta.unique_together)]:
        missing.append("the unique constraint on (stream, version)")
    if missing:
        yield Error(
            f"The log lacks {' and '.join(missing)} of EventLog.",
            hint="Write `class Meta(EventLog.Meta):` and, if the log has indexes or constraints "
            "of its own, `indexes = [*EventLog.Meta.indexes, …]`.",
            obj=log,
            id="outbox.E020",
        )


def _check_fields(log: type[EventLog]) -> Iterator[CheckMessage]:
    own = {field.name for field in EventLog._meta.local_fields}
    hint = "Put the value into the event's data or metadata, or give the field a default or null."
    for field in log._meta.local_fields:
        if not (field.name in own or field.name.endswith("_ptr") or _is_filled(field)):
            text = f"publish() does not know the field {field.name!r}, which needs a value."
            yield Error(text, hint=hint, obj=log, id="outbox.E021")


def _is_filled(field: Field[Any, Any]) -> bool:
    """Return whether the INSERT of an event or a tombstone may leave the field out."""
    names = ("null", "generated", "auto_now", "auto_now_add")
    if field.has_db_default() or any(getattr(field, name, False) for name in names):
        return True
    if field.has_default():
        return field.default is not None
    return field.blank and bool(field.empty_strings_allowed)


def _check_relations(log: type[EventLog]) -> Iterator[CheckMessage]:
    every = apps.get_models(include_auto_created=True)
    for field in (field for model in every for field in model._meta.local_fields):
        if (
            not isinstance(field, ForeignKey)
            or field.remote_field.parent_link
            or not field.db_constraint  # type: ignore[attr-defined]
            or log not in (field.model, field.related_model)
        ):
            continue
        yield Error(
            f"The foreign key {field.model.__name__}.{field.name} ties a log to another table: "
            "their writers would wait for each other, and events could not be pruned.",
            hint="Store the event's message_id, or the key of the object, as a plain value; or "
            "set db_constraint=False.",
            obj=log,
            id="outbox.E022",
        )


def check_log_tables(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    for alias in databases or ():
        tables = Tables(connections[alias])
        reported = set()  # by check_databases, where there is an outbox
        if StagedJob._meta.db_table in tables:
            reported = {"outbox.E008", *["outbox.E011"] * (alias in written_aliases())}
        for log in (log for log in all_logs() if log._meta.db_table in tables):
            run = LogReader(log, using=alias).run
            for each in violations(connections[alias].vendor, log._meta.db_table, run):
                if each.id not in reported:
                    text = f"On {alias!r}: {each.text}"
                    yield Error(text, hint=each.hint, obj=log, id=each.id)
            with suppress(django.db.Error):  # ``migrate`` checks before it adds columns
                yield from islice(_check_cursors(log, alias), LISTED)


def _check_cursors(log: type[EventLog], alias: str) -> Iterator[CheckMessage]:
    reader = LogReader(log, using=alias)
    for cursor in Cursor.objects.using(alias).filter(log=reader.table).order_by("pk"):
        try:
            cursor.recall()
            if not reads_by_time(cursor.state):
                reader.window.verify(reader.load(cursor.state))
        except (DamagedCursor, ForeignCursor) as error:
            yield Error(
                f"The cursor of {cursor} on {alias!r} is refused, so its subscription has stopped: "
                f"{error}",
                hint="After a restore or a switch-over, run manage.py outbox_rebase. If the cursor "
                "is damaged, or was made on another database engine, replay or reset its "
                "subscription.",
                obj=log,
                id="outbox.E012",
            )
        except UnsafeLog:  # reported as a violation
            return


def check_sinks(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report names in SINK that are no logs, and a missing app: nothing would sink."""
    if event_settings().SINK and not apps.is_installed("outbox_app.pipeline"):
        yield needed("OUTBOX['SINK']", ["outbox_app.pipeline"])
    known = [log._meta.db_table for log in all_logs()]
    for name in event_settings().SINK:
        if name not in known:
            yield Error(
                f"OUTBOX['SINK'] names {name!r}, which is not the table of a log.",
                hint=f"Write one of {', '.join(known)}.",
                id="outbox.E003",
            )


def check_declared_logs(**kwargs: Any) -> Iterator[CheckMessage]:
    """Warn of subscriptions that cannot run; an error would keep the others from starting."""
    for each in all_subscribers():
        if each.fault:
            hint = "Correct logs=[…]: it takes models derived from EventLog, all on one database."
            yield Warning(each.fault, hint=hint, obj=each.name, id="outbox.W030")


ALWAYS = (check_logs, check_declared_logs, check_sinks)
DATABASE = (check_log_tables,)
