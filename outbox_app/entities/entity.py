"""``Entity``: one JSON document in a row, changed by commands that are answered once.

An accepted or rejected answer is committed before the caller has it, and given again, without a
handler, for the same command id. A command that raises anything else leaves nothing behind. Inside
``atomic()`` on the entity's alias a command belongs to that transaction, and goes with its
rollback.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from django.db.models import QuerySet

from ..aliases import log_alias
from ..eventlog.newevent import ANY, ExpectedVersion
from ..exceptions import UnknownEntity
from ..models import CommandsOnly, EntityRow, EntityVersion
from .declaration import Rejected
from .execution import run
from .request import Outcome, Request


class Entity(EntityRow):
    """Base of an entity type. Commands are methods with ``@command``; reads are the ORM's."""

    #: The log of the type: a concrete model derived from ``EntityVersion``.
    versions: ClassVar[type[EntityVersion]]
    #: In a command: the time, by the database's clock.
    now: datetime

    class Meta:
        abstract = True

    @classmethod
    def execute(
        cls,
        id: str,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        command_id: str,
        expected_version: ExpectedVersion = ANY,
        using: str | None = None,
        raise_rejected: bool = False,
    ) -> Outcome:
        """Ask an entity for something, once.

        Args:
            id: Of the entity; at most 255 characters.
            command: Name of a method with ``@command``.
            arguments: By name, what JSON can hold. Default: none.
            command_id: Makes asking again harmless: the same id gets the first answer. At most 255
                characters; two that differ in case are two.
            expected_version: The version that the entity is at, ``NO_STREAM``, or ``ANY``
                (default). An answer that was given before is given again in any case.
            using: Database alias. Default: the one of the type's versions.
            raise_rejected: Raise ``Rejected`` instead of returning it.

        Returns:
            The answer, committed; inside ``atomic()`` on the alias, with that transaction.

        Raises:
            InvalidCommand: Arguments, ids or what the command left behind cannot be stored, or do
                not fit. Nothing was written, as for all that follow.
            UnknownEntity: It does not exist, and the command does not create.
            CommandIdConflict: The command id belongs to another request.
            VersionConflict: The entity is at another version; ``current`` says which.
            EntityContended: Other commands were ahead, ten times.
            DamagedEntity: The entity's row was edited by hand.
            NotAtomic: A transaction is open on another alias only.
            OutcomeUnknown: The commit may or may not have happened. Repeat with the same id.
        """
        request = Request.of(id, command, arguments, command_id, expected_version)
        outcome = run(cls, request, using=using or log_alias(cls.versions))
        if raise_rejected and outcome.rejected:
            raise Rejected(outcome.rejected.text, code=outcome.rejected.code)
        return outcome

    @classmethod
    def at(cls, id: str, *, version: int, using: str | None = None) -> Any:
        """Return the state of an entity at a version.

        Raises:
            UnknownEntity: It has no such version, or none any more.
        """
        found = cls.history(id, using=using).filter(version=version).values_list("state", flat=True)
        for state in found:
            return state
        raise UnknownEntity(f"{cls.__name__} {id!r} has no version {version}, or none any more.")

    @classmethod
    def history(cls, id: str, *, using: str | None = None) -> QuerySet[EntityVersion]:
        """Return the versions of an entity, the oldest first."""
        rows: Any = CommandsOnly(cls.versions, using=using or log_alias(cls.versions))
        return rows.filter(stream=id, command_id__isnull=False).order_by("version")  # type: ignore[no-any-return]
