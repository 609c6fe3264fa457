"""The ids of commands outlive their versions: a repeat of a command is never executed again.

The caller's transaction deletes the versions, so whichever way it ends, an id is in one of the two
tables, and in one only. Ids are removed by ``prune("commands")``, by ENTITY_COMMAND_DAYS.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from ..conf import outbox_settings
from ..models import PrunedCommand
from ..models.entity import command_key, log_number
from ..models.upsert import upsert


def keep_commands(versions: Any, now: datetime, *, is_archived: bool) -> None:
    """Insert the ids of the commands of versions that the open transaction deletes.

    ``versions`` is a query set in a fixed order: others may insert the same ids. ``now`` is the
    database's time. An erased version has no answer, in an archive either.
    """
    days, log = outbox_settings().ENTITY_COMMAND_DAYS, log_number(versions.model._meta.db_table)
    written = versions.filter(command__isnull=False)
    if days is not None:
        written = written.filter(recorded_at__gte=now - timedelta(days=days))
    fields = ("stream", "command_id", "version", "request_hash", "recorded_at")
    rows = [
        PrunedCommand(
            log=log,
            key=command_key(stream, command_id),
            version=version if is_archived and request_hash else -version,
            executed_on=day_of(at),
        )
        for stream, command_id, version, request_hash, at in written.values_list(*fields)
    ]
    # A version that was restored from an archive has its id there, which stays as it is. MySQL's
    # INSERT IGNORE would ignore other errors, too.
    table = PrunedCommand.objects.using(versions.db)
    upsert(table, rows, update=["executed_on"], unique=["log", "key"])


def day_of(moment: datetime) -> date:
    """Return the date of a time that the database has returned, in UTC if it has a zone."""
    return (moment.astimezone(UTC) if moment.tzinfo else moment).date()
