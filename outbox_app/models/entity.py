"""What an entity type is made of: a row for each entity, and a log of its answered commands.

The version table is the truth: what was asked, what was answered, and the state after it. The row
of an entity holds the newest state, for the ORM and its constraints. Both are written by commands
only; ``save()``, ``update()`` and their kin are refused, as a row that no command wrote would end
every later command with ``DamagedEntity``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..exceptions import WrittenByCommands
from .event import EventLog


def _refuse(given: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse what writes past the commands, of a row or of a query set."""
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
    """Base of the log of an entity type: one row a command that was answered.

    A log like any other, so subscriptions, projections, Spark, gaps and retention work on it.
    """

    #: Null in rows that no command wrote, such as those that seal a position.
    command_id = models.CharField(_("command id"), max_length=255, null=True)  # noqa: DJ001
    command = models.CharField(_("command"), max_length=255, null=True)  # noqa: DJ001
    #: SHA-256 of the command's name and its arguments, in canonical JSON.
    request_hash = models.CharField(_("request hash"), max_length=64, null=True)  # noqa: DJ001
    rejected = models.BooleanField(_("rejected"), default=False, db_default=False)
    response = models.JSONField(_("response"), null=True, encoder=DjangoJSONEncoder)
    #: After the command; null where its creation was rejected.
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

    id = models.CharField(_("id"), max_length=255, primary_key=True)
    version = models.BigIntegerField(_("version"))
    state = models.JSONField(_("state"), encoder=DjangoJSONEncoder)
    changed_at = models.DateTimeField(_("changed at"))

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.pk}@{self.version}"

    def columns(self) -> dict[str, Any]:
        """Return the values of the type's own fields, from ``self.state``. Default: none.

        It runs after each command, and may touch no database.
        """
        return {}
