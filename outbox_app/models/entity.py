"""The tables of an entity type: a row for each entity, and a log of its answered commands.

The version table is the truth: each row has a command, its response, and the state after it. The
entity's own row holds the newest state, for the ORM and its constraints. Only commands write to the
two tables. ``save()``, ``update()`` and similar methods are refused: after a row that no command
wrote, every later command would fail with ``DamagedEntity``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..exceptions import WrittenByCommands
from ..fields import CharField
from .event import EventLog


def _refuse(given: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a method, of a row or of a query set, that would write without a command."""
    model = given.model if isinstance(given, models.QuerySet) else type(given)
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

    #: Null in rows that no command wrote, such as the tombstone of a position.
    command_id = CharField(_("command id"), max_length=255, null=True)
    command = CharField(_("command"), max_length=255, null=True)
    #: SHA-256 of the command's name and arguments in canonical JSON.
    request_hash = CharField(_("request hash"), max_length=64, null=True)
    rejected = models.BooleanField(_("rejected"), default=False, db_default=False)
    response = models.JSONField(_("response"), null=True, encoder=DjangoJSONEncoder)
    #: The state after the command; null after a rejected creation or an erasure. See ``states``.
    state = models.JSONField(_("state"), null=True, encoder=DjangoJSONEncoder)

    class Meta(EventLog.Meta):
        abstract = True
        constraints = [
            *EventLog.Meta.constraints,
            models.UniqueConstraint(
                fields=["stream", "command_id"], name="%(app_label)s_%(class)s_command"
            ),
        ]


class EntityRow(_Unsaved):
    """Base of ``Entity``: the columns of its table."""

    id = CharField(_("id"), max_length=255, primary_key=True)
    version = models.BigIntegerField(_("version"))
    state = models.JSONField(_("state"), encoder=DjangoJSONEncoder)
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
