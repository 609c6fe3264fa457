"""``Entity``: one JSON document in a row, changed by commands that are answered once.

An answer, accepted or rejected, is committed before the caller gets it. The same command id gets
the same answer again, and no handler runs. A command that raises any other error writes nothing.
Inside ``atomic()`` on the entity's alias a command belongs to that transaction, and is undone by
its rollback.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db.models import QuerySet

from ..aliases import model_alias
from ..events.log.newevent import ANY, ExpectedVersion, NewEvent
from ..events.models import Event, EventLog
from ..exceptions import InvalidArgument
from ..jobs.staging.stage import stage
from ..pipeline.driver.archive_lookup import archived_versions
from .exceptions import AnswerArchived, UnknownEntity
from .handlers import require_running
from .models import CommandsOnly, EntityRow, EntityVersion
from .pruned import ArchivedAnswers
from .queue import aask, ask, ask_many
from .request import Command, Outcome, raised

if TYPE_CHECKING:
    from typing import Unpack

    from ..typed import EntityOptions


class Entity(EntityRow):
    """Base of an entity type. Its commands are methods with ``@command``; the ORM reads it."""

    #: The log of the type: a concrete model derived from ``EntityVersion``.
    versions: ClassVar[type[EntityVersion]]
    #: The most commands in one transaction. With 1, each caller uses its own connection.
    batch_size: ClassVar[int] = 1000
    #: Which versions store the state: "every" version, or the "last" one of each transaction.
    states: ClassVar[Literal["every", "last"]] = "every"
    #: Whether other servers pass their commands on to the server that leads the entity.
    routed: ClassVar[bool] = False
    #: Seconds that a caller waits, unless it gives a timeout.
    timeout: ClassVar[float] = 10.0
    #: Inside a command, the time by the database's clock.
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
        archive: str | None = None,
    ) -> Outcome:
        """Execute a command on an entity, once.

        Args:
            id: The entity's id; at most 255 characters.
            command: The name of a method with ``@command``.
            arguments: A mapping by name, of values that JSON can hold. Default: none.
            command_id: Makes a repeat safe: the same id gets the first answer again. At most 255
                characters; ids that differ in case are different.
            expected_version: The version that the entity must be at, ``NO_STREAM``, or ``ANY``
                (default). A repeated command id gets its first answer in any case.
            timeout: Seconds to wait for the answer. Default: the type's.
            using: Database alias. Default: the alias of the type's versions.
            raise_rejected: Raise ``Rejected`` instead of returning it.
            archive: Folder or address of an archive of the type's versions. It is read only if the
                command was executed before, and its version has sunk. Default: none is read.

        Returns:
            The committed answer. Inside ``atomic()`` on the alias, that transaction commits it.

        Raises:
            InvalidCommand: Arguments, ids or results of the command cannot be stored, or do not
                fit. Nothing was written, as with each of the following but the last.
            UnknownEntity: The entity does not exist, and the command does not create it.
            CommandIdConflict: The command id belongs to another request.
            AnswerArchived: The command was executed before, and its version has sunk into the
                archive; ``version`` says which. With ``archive`` the first answer is returned.
            AnswerGone: The command was executed before, and no archive has its answer: its version
                was pruned without an archive, or the entity was erased.
            ArchiveRefused, Unreachable, NoSpark: ``archive`` cannot be read, or lacks the version.
            VersionConflict: The entity is at another version; ``current`` says which.
            EntityContended: Other commands were first, ten times.
            CommandTimeout: Other commands were answered first, until the timeout.
            Overloaded: Too many commands wait; ``retry_after`` is a hint.
            DamagedEntity: The entity's row was edited by hand, or its table does not compare ids
                byte by byte.
            NotAtomic: A transaction is open on another alias only.
            OutcomeUnknown: The commit may or may not have happened. Repeat with the same id.
        """
        asked = Command(
            id, command, arguments, command_id=command_id, expected_version=expected_version
        )
        alias = using or model_alias(cls.versions)
        try:
            outcome = ask(cls, asked, timeout=timeout, using=alias)
        except AnswerArchived as error:
            if archive is None:
                raise
            outcome = ArchivedAnswers(cls, archive, using=alias).get(asked, error)
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
        archive: str | None = None,
    ) -> Outcome:
        """Do what ``execute`` does. Coroutines that wait for an entity share transactions."""
        asked = Command(
            id, command, arguments, command_id=command_id, expected_version=expected_version
        )
        alias = using or model_alias(cls.versions)
        try:
            outcome = await aask(cls, asked, timeout=timeout, using=alias)
        except AnswerArchived as error:
            if archive is None:
                raise
            answers = ArchivedAnswers(cls, archive, using=alias)
            outcome = await sync_to_async(answers.get)(asked, error)
        return raised(outcome) if raise_rejected else outcome

    @classmethod
    def execute_many(
        cls,
        commands: Iterable[Command],
        *,
        timeout: float | None = None,
        using: str | None = None,
        return_exceptions: bool = False,
        archive: str | None = None,
    ) -> list[Any]:
        """Execute many commands. Those for one entity keep their order and share transactions.

        Args:
            commands: ``Command(id, command, arguments, command_id=…)``. All are held in memory.
            timeout, using: As for ``execute``; each transaction has the whole timeout.
            return_exceptions: Return a command's error in place of its answer. Default: the first
                error is raised, after all commands have been executed.
            archive: As for ``execute``.

        Returns:
            The answers, in the order of the commands. Each entity has transactions of its own,
            unless the caller has one open.
        """
        alias, commands = using or model_alias(cls.versions), list(commands)
        answers = ask_many(cls, commands, timeout=timeout, using=alias)
        if archive is not None:
            ArchivedAnswers(cls, archive, using=alias).fill(commands, answers)
        for answer in answers:
            if isinstance(answer, BaseException) and not return_exceptions:
                raise answer
        return answers

    def stage(
        self, task: Any, args: Any = None, kwargs: Any = None, **options: Unpack[EntityOptions]
    ) -> Any:
        """Inside a command, stage a job. It is sent if and only if the command commits.

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
        """Inside a command, publish an event to another log, in the same transaction.

        Args:
            stream: Default: the entity's id.
            type, data, topic, metadata, message_id, log: As for ``outbox_app.events.publish``.

        Raises:
            InvalidEvent, UnknownLog, NotAtomic: The log cannot take the event.
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
            UnknownEntity: The entity has no such version, or no longer has it.
            InvalidArgument: ``version`` is no integer.
            ArchiveRefused, NoSpark: As ``history``.
        """
        if type(version) is not int:
            raise InvalidArgument(f"version must be an integer from 1 on; got {version!r}.")
        rows = list(cls.history(id, using=using).filter(version=version))
        if archive and not rows:
            rows = cls.history(id, using=using, archive=archive)
        for row in rows:
            if row.version == version:
                return row.state
        raise UnknownEntity(f"{cls.__name__} {id!r} has no version {version}, or no longer has it.")

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
            id: The entity's id.
            using: Database alias. Default: the log's.
            archive: Folder or address of the log's archive. Versions that have sunk into it are
                returned, too, in a list. Default: only the versions in the database.

        Raises:
            ArchiveRefused: There is no archive of the versions, or it is damaged.
            NoSpark: An archive needs pyarrow and deltalake.
        """
        alias = using or model_alias(cls.versions)
        rows: Any = CommandsOnly(cls.versions, using=alias)
        rows = rows.filter(stream=id, command_id__isnull=False).order_by("version")
        if archive is None:
            return rows
        # The database is read first: a version that sinks meanwhile is in the archive by then.
        found = {row.version: row for row in rows}
        sunk = archived_versions(cls.versions, id, folder=archive, using=alias)
        found = {row.version: row for row in sunk if row.command_id is not None} | found
        return [found[version] for version in sorted(found)]
