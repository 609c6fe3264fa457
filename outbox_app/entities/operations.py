"""What a person does with entities: list them, look at one, import commands from a file.

Nothing here writes past the commands. An import executes one after the other, each in a transaction
of its own. If it is broken off, run it again: what was answered is replayed. See ``verification``
and ``erasure`` for the rest; both lock the head of an entity first, as commands do.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import django.db
from django.apps import apps
from django.db import connections
from django.db.models import QuerySet

from ..aliases import log_alias
from ..conf import outbox_settings
from ..eventlog.heads import bump_versions
from ..exceptions import EntityContended, InvalidArgument, OutcomeUnknown, UnknownEntity
from ..models import EntityRow, EntityVersion, StreamHead
from ..models.counting import LISTED, counted
from ..process.lock_wait import atomic_with_lock_wait, is_conflict
from ..text import get_logger

logger = get_logger("outbox_app.entities")

#: Seconds to wait for the lock of an entity.
LOCK_SECONDS = 10
#: Keys of a line of an import: those that it must have, and all.
REQUIRED = {"id", "command", "command_id"}
KNOWN = {*REQUIRED, "type", "arguments"}
#: How the lines of an import end.
ENDINGS = ("executed", "replayed", "rejected", "failed")


def entity_types() -> list[Any]:
    """Return the entity types of the project whose versions are declared soundly, by label."""
    models: list[Any] = [m for m in apps.get_models() if issubclass(m, EntityRow)]
    logs = [(m, getattr(m, "versions", None)) for m in models if not m._meta.proxy]
    sound = [m for m, log in logs if isinstance(log, type) and issubclass(log, EntityVersion)]
    return sorted(sound, key=lambda model: model._meta.label)


def entity_named(name: str) -> Any:
    """Return the type of a label or a table. Raises ``InvalidArgument``."""
    for entity in entity_types():
        if name in (entity._meta.label, entity._meta.label_lower, entity._meta.db_table):
            return entity
    known = ", ".join(entity._meta.label for entity in entity_types()) or "none"
    raise InvalidArgument(f"There is no entity type {name!r}. Known: {known}.")


def summary(entity: Any, *, using: str | None = None) -> dict[str, Any]:
    """Return tables and alias of a type, and its rows, counted up to a bound; None: no table."""
    using = using or log_alias(entity.versions)
    tables = connections[using].introspection.table_names()
    counts = [
        counted(QuerySet(model, using=using)) if model._meta.db_table in tables else None
        for model in (entity, entity.versions)
    ]
    return {
        "type": entity._meta.label,
        "table": entity._meta.db_table,
        "log": entity.versions._meta.db_table,
        "database": using,
        "entities": counts[0],
        "versions": counts[1],
    }


def describe(
    entity: Any, id: str, *, version: int | None = None, using: str | None = None
) -> dict[str, Any]:
    """Return version and state of an entity, and its last versions, as JSON can hold them.

    With ``version``: as it was then, and that version alone.

    Raises:
        UnknownEntity: It does not exist, or has no such version any more.
    """
    using = using or log_alias(entity.versions)
    rows: Any = QuerySet(entity, using=using)
    row = rows.filter(pk=id).first() if version is None else None
    versions = entity.history(id, using=using).order_by("-version")
    found = list(versions[:LISTED] if version is None else versions.filter(version=version))
    heads = StreamHead.objects.using(using).filter(log=entity.versions._meta.db_table, stream=id)
    head = version or heads.values_list("version", flat=True).first()
    if not found and (version is not None or (row is None and not head)):
        which = "" if version is None else f" version {version}, or none any more, of"
        raise UnknownEntity(f"There is no{which} {entity._meta.label} {id!r} on {using!r}.")
    shown: Any = row if version is None else found[0]
    return {
        "type": entity._meta.label,
        "id": id,
        "database": using,
        "version": row.version if row else head,
        "state": shown and shown.state,
        "changed_at": row and row.changed_at.isoformat(),
        "versions": [_described(each) for each in found],
    }


def _described(version: EntityVersion) -> dict[str, Any]:
    names = ("version", "type", "command", "command_id", "rejected", "response", "metadata")
    described = {name: getattr(version, name) for name in names}
    return {**described, "arguments": version.data, "recorded_at": version.recorded_at.isoformat()}


def import_commands(
    lines: Iterable[str],
    *,
    default: Any = None,
    using: str | None = None,
    write: Callable[[str], Any] = logger.info,
) -> Counter[str]:
    """Execute a command for each line of JSON; one that fails does not end the import.

    Args:
        lines: Objects with ``id``, ``command``, ``command_id``, ``arguments`` and ``type``.
        default: The type of lines that name none.
        using: Database alias. Default: that of each type.
        write: Takes progress, and why a line has failed.

    Returns:
        How many lines ended in each of ``ENDINGS``. Where the database is away, its error is
        raised: import the same lines again.
    """
    done = Counter(dict.fromkeys(ENDINGS, 0))
    told = time.monotonic()
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            outcome = _execute(line, default, using)
        except (OutcomeUnknown, django.db.OperationalError, django.db.InterfaceError):
            raise
        except Exception as error:  # a handler's own, too
            done["failed"] += 1
            write(f"failed line={number}: {type(error).__name__}: {error}")
        else:
            refused = "rejected" if outcome.rejected else "executed"
            done["replayed" if outcome.replayed else refused] += 1
        if 0 < outbox_settings().PROGRESS_INTERVAL <= time.monotonic() - told:
            told = time.monotonic()
            write(f"importing line={number} {shown(done)}")
    return done


def shown(done: Counter[str]) -> str:
    """Return ``executed=3 replayed=0 …``."""
    return " ".join(f"{name}={done[name]}" for name in ENDINGS)


def _execute(line: str, default: Any, using: str | None) -> Any:
    fields = json.loads(line)
    if not isinstance(fields, dict) or not REQUIRED <= set(fields) <= KNOWN:
        raise InvalidArgument(
            f"A line is a JSON object with {', '.join(sorted(REQUIRED))}, if need be with "
            "arguments and type, and nothing else."
        )
    entity = entity_named(str(fields["type"])) if "type" in fields else default
    if entity is None:
        raise InvalidArgument('The line names no type. Add "type" to it, or give --type.')
    id, command, arguments = (fields.get(name) for name in ("id", "command", "arguments"))
    return entity.execute(id, command, arguments, command_id=fields["command_id"], using=using)


@contextmanager
def locked(entity: Any, id: str, *, using: str) -> Iterator[int]:
    """Open a transaction in which no command can change the entity; give the version of its head.

    A head that is absent is made, at 0, since its gap cannot be locked: roll back what finds none.

    Raises:
        EntityContended: Another transaction holds it for too long.
    """
    connection = connections[using]
    outermost = not connection.in_atomic_block
    try:
        with atomic_with_lock_wait(LOCK_SECONDS, using=using):
            if outermost and connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            yield bump_versions(entity.versions._meta.db_table, {id: 0}, {}, using=using)[id]
    except django.db.OperationalError as error:
        if not outermost or not is_conflict(error):
            raise
        raise EntityContended(
            f"{entity._meta.label} {id!r} is held by another transaction. Nothing was written: try "
            "again."
        ) from error
