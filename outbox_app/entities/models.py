"""The tables of an entity type: a row for each entity, and a log of its answered commands.

The version table is the truth: each row has a command, its response, and the state after it. The
entity's own row holds the newest state, for the ORM and its constraints. Only commands write to the
two tables. ``save()``, ``update()`` and similar methods are refused: after a row that no command
wrote, every later command would fail with ``DamagedEntity``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256
from typing import Any, NoReturn

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..capability import require_app
from ..events.models.event import EventLog
from ..fields import CharField, JSONField
from .exceptions import WrittenByCommands

require_app("outbox_app.entities")


def _refuse(target: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a method, of a row or of a query set, that would write without a command."""
    model = target.model if isinstance(target, models.QuerySet) else type(target)
    raise WrittenByCommands(
        f"{model.__name__} is written by commands only, and so are its versions. Call "
        "execute(id, command, arguments, command_id=…) of the entity."
    )


class CommandsOnly(models.QuerySet[Any]):
    create = bulk_create = bulk_update = update = delete = _refuse
    get_or_create = update_or_create = _refuse


class _Unsaved(models.Model):
    objects = CommandsOnly.as_manager()
    save = delete = _refuse

    class Meta:
        abstract = True


class EntityVersion(_Unsaved, EventLog):
    """Base of the log of an entity type: one row for each answered command.

    It is a log like any other, so subscriptions, projections, Spark, gaps and retention work on it.
    """

    has_answers = True
    #: Null in rows that no command wrote, such as the tombstone of a position.
    command_id = CharField(_("command id"), max_length=255, null=True)
    command = CharField(_("command"), max_length=255, null=True)
    #: SHA-256 of the command's name and arguments in canonical JSON.
    request_hash = CharField(_("request hash"), max_length=64, null=True)
    rejected = models.BooleanField(_("rejected"), default=False, db_default=False)
    response = JSONField(_("response"), null=True, encoder=DjangoJSONEncoder)
    #: The state after the command; null after a rejected creation or an erasure. See ``states``.
    state = JSONField(_("state"), null=True, encoder=DjangoJSONEncoder)

    class Meta(EventLog.Meta):
        abstract = True
        constraints = [
            *EventLog.Meta.constraints,
            models.UniqueConstraint(
                fields=["stream", "command_id"], name="%(app_label)s_%(class)s_command"
            ),
        ]

    @classmethod
    def require_publishable(cls) -> None:
        raise WrittenByCommands(
            f"{cls.__name__} is the log of an entity, so only commands write to it. Call "
            "execute() of the entity, or publish to another log."
        )

    @classmethod
    def before_pruning(cls, rows: Any, now: datetime, *, is_archived: bool) -> None:
        from .pruned import keep_commands

        keep_commands(rows, now, is_archived=is_archived)

    @classmethod
    def audited(cls, *, using: str) -> Iterable[tuple[str, str]] | None:
        from .maintenance import entity_types
        from .verification import differences

        types = [each for each in entity_types() if each.versions is cls]
        if not types:
            return None
        return [
            (id, text)
            for entity in types
            for id, (kind, text) in differences(entity, using=using)
            if kind != "head"  # the audit has it as "tail" or "low_head"
        ]


def log_number(table: str) -> int:
    """Return the number by which ``PrunedCommand`` names a log of versions, from its table."""
    return int.from_bytes(sha256(table.encode()).digest()[:4], signed=True)


def command_key(stream: str, command_id: str) -> str:
    """Return the key of ``PrunedCommand``: 120 bits of SHA-256 over both ids, in hexadecimal."""
    hash = sha256(f"{stream}\0{command_id}".encode()).hexdigest()  # no stored text has a NUL
    # As a UUID of version 5: MariaDB refuses some values that are no UUID of a known kind.
    return f"{hash[:12]}5{hash[12:15]}8{hash[15:30]}"


class PrunedCommand(models.Model):
    """The id of a command whose version retention has removed: it is never executed again.

    A row is inserted by the transaction that deletes the version, so an id is always in one of the
    two tables. Of a billion ids in one log, two have the same key with odds of 1 in 10¹⁸.
    """

    pk = models.CompositePrimaryKey("log", "key")
    #: The version of the answer. Negative if the answer is gone: no archive has it.
    version = models.BigIntegerField(_("version"))
    key = models.UUIDField(_("key"))
    log = models.IntegerField(_("log"))
    #: The date of the command, in UTC if USE_TZ is true.
    executed_on = models.DateField(_("executed on"))

    class Meta:
        app_label = "outbox_entities"
        db_table = "outbox_prunedcommand"
        default_permissions = ()
        indexes = [models.Index(fields=["executed_on"], name="outbox_pruned_executed")]

    def __str__(self) -> str:
        return f"{self.key} at version {self.version}"


class EntityRow(_Unsaved):
    """Base of ``Entity``: the columns of its table."""

    id = CharField(_("id"), max_length=255, primary_key=True)
    version = models.BigIntegerField(_("version"))
    state = JSONField(_("state"), encoder=DjangoJSONEncoder)
    changed_at = models.DateTimeField(_("changed at"))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.pk}@{self.version}"

    def columns(self) -> dict[str, Any]:
        """Return the values of the type's own fields, from ``self.state``. Default: none.

        It is called after each command, and must not query a database.
        """
        return {}
