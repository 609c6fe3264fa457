"""``Entity``: one JSON document in a row, changed by commands that are answered once.

An accepted or rejected answer is committed before the caller has it, and given again, without a
handler, for the same command id. A command that raises anything else leaves nothing behind. Inside
``atomic()`` on the entity's alias a command belongs to that transaction, and goes with its
rollback.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, ClassVar, Literal, overload
from uuid import UUID

from django.db.models import QuerySet

from ..aliases import log_alias
from ..eventlog.newevent import ANY, ExpectedVersion, NewEvent
from ..exceptions import UnknownEntity
from ..jobs.staging.stage import stage
from ..models import CommandsOnly, EntityRow, EntityVersion, Event, EventLog
from ..pipeline.driver.archive_lookup import archived_versions
from .handling import require_running
from .queue import aask, ask, ask_many
from .request import Command, Outcome, raised


class Entity(EntityRow):
    """Base of an entity type. Commands are methods with ``@command``; reads are the ORM's."""

    #: The log of the type: a concrete model derived from ``EntityVersion``.
    versions: ClassVar[type[EntityVersion]]
    #: Most commands of one transaction; 1: each caller works on its own connection.
    batch_size: ClassVar[int] = 1000
    #: Which versions keep the state after them: "every" one, or the "last" of each transaction.
    states: ClassVar[Literal["every", "last"]] = "every"
    #: Commands that arrive at another server than the one that leads the entity go there.
    routed: ClassVar[bool] = False
    #: Seconds for which a caller waits, unless it says otherwise.
    timeout: ClassVar[float] = 10.0
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
        timeout: float | None = None,
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
            timeout: Seconds to wait for the answer. Default: the type's.
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
            CommandTimeout: Others were answered first, for all of its time.
            Overloaded: Too many wait; ``retry_after`` is a hint.
            DamagedEntity: The entity's row was edited by hand.
            NotAtomic: A transaction is open on another alias only.
            OutcomeUnknown: The commit may or may not have happened. Repeat with the same id.
        """
        asked = Command(
            id, command, arguments, command_id=command_id, expected_version=expected_version
        )
        outcome = ask(cls, asked, timeout=timeout, using=using or log_alias(cls.versions))
        return raised(outcome) if raise_rejected else outcome

    @classmethod
    async def aexecute(
        cls,
        id: str,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        command_id: str,
        expected_version: ExpectedVersion = ANY,
        timeout: float | None = None,
        using: str | None = None,
        raise_rejected: bool = False,
    ) -> Outcome:
        """As ``execute``, for a coroutine. All that wait in the loop share transactions."""
        asked = Command(
            id, command, arguments, command_id=command_id, expected_version=expected_version
        )
        outcome = await aask(cls, asked, timeout=timeout, using=using or log_alias(cls.versions))
        return raised(outcome) if raise_rejected else outcome

    @classmethod
    def execute_many(
        cls,
        commands: Iterable[Command],
        *,
        timeout: float | None = None,
        using: str | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Ask entities for many things; those of one entity in their order, in one transaction.

        Args:
            commands: ``Command(id, command, arguments, command_id=…)``. All are held in memory.
            timeout, using: As for ``execute``; the time is that of each transaction.
            return_exceptions: Return the error of a command in the place of its answer. Default:
                the first one is raised when all others have been executed.

        Returns:
            The answers, in the order of the commands. Each entity has transactions of its own,
            unless the caller has one open.
        """
        answers = ask_many(cls, commands, timeout=timeout, using=using or log_alias(cls.versions))
        for answer in answers:
            if isinstance(answer, BaseException) and not return_exceptions:
                raise answer
        return answers

    def stage(self, task: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """In a command: stage a job that leaves if and only if the command commits.

        Takes and raises what ``outbox_app.stage`` does.
        """
        return stage(task, args, kwargs, using=require_running().using, **options)

    def publish(
        self,
        type: str,
        data: Any = None,
        *,
        stream: str = "",
        topic: str = "",
        metadata: Mapping[str, Any] | None = None,
        message_id: UUID | None = None,
        log: builtins.type[EventLog] = Event,
    ) -> None:
        """In a command: publish an event of another log, in the same transaction.

        Args:
            stream: Default: the entity's id.
            type, data, topic, metadata, message_id, log: As for ``outbox_app.publish``.

        Raises:
            InvalidEvent, UnknownLog, NotAtomic: The log could not take it.
        """
        event = NewEvent(
            stream or self.pk, type, {} if data is None else data, metadata or {}, topic, message_id
        )
        require_running().publish(event, log)

    @classmethod
    def at(
        cls, id: str, *, version: int, using: str | None = None, archive: str | None = None
    ) -> Any:
        """Return the state of an entity at a version.

        Args:
            id, using, archive: As for ``history``.
            version: An integer from 1 on.

        Raises:
            UnknownEntity: It has no such version, or none any more.
            ArchiveRefused, NoSpark: As ``history``.
        """
        rows = list(cls.history(id, using=using).filter(version=version))
        if archive and not rows:
            rows = cls.history(id, using=using, archive=archive)
        for row in rows:
            if row.version == version:
                return row.state
        raise UnknownEntity(f"{cls.__name__} {id!r} has no version {version}, or none any more.")

    @overload
    @classmethod
    def history(
        cls, id: str, *, using: str | None = None, archive: None = None
    ) -> QuerySet[EntityVersion]: ...
    @overload
    @classmethod
    def history(cls, id: str, *, using: str | None = None, archive: str) -> list[EntityVersion]: ...
    @classmethod
    def history(cls, id: str, *, using: str | None = None, archive: str | None = None) -> Any:
        """Return the versions of an entity, the oldest first.

        Args:
            id: Of the entity.
            using: Database alias. Default: the log's.
            archive: Folder or address of the log's archive: the versions that have sunk are
                returned, too, and the result is a list. Default: those of the database.

        Raises:
            ArchiveRefused: There is no archive of the versions, or it is damaged.
            NoSpark: An archive needs pyarrow and deltalake.
        """
        alias = using or log_alias(cls.versions)
        rows: Any = CommandsOnly(cls.versions, using=alias)
        rows = rows.filter(stream=id, command_id__isnull=False).order_by("version")
        if archive is None:
            return rows
        # These first: what sinks after that is in the archive by then.
        found = {row.version: row for row in rows}
        sunk = archived_versions(cls.versions, id, folder=archive, using=alias)
        found = {row.version: row for row in sunk if row.command_id is not None} | found
        return [found[version] for version in sorted(found)]
