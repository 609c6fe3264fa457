"""Errors of entities.

::

    OutboxError
    ├── EntityError: InvalidCommand, UnknownEntity, CommandIdConflict, EntityContended,
    │   CommandTimeout, Overloaded, DamagedEntity, WrittenByCommands, AnswerGone: AnswerArchived
    └── OutcomeUnknown, StatementRefused
"""

from __future__ import annotations

from ..exceptions import OutboxError


class EntityError(OutboxError):
    """A command of an entity got no answer, and wrote nothing."""


class InvalidCommand(EntityError, ValueError):
    """A part of a command, or of the state that it left, is invalid or cannot be stored."""


class UnknownEntity(EntityError, LookupError):
    """The entity does not exist, or has no such version."""


class CommandIdConflict(EntityError):
    """The command id belongs to another request."""


class EntityContended(EntityError):
    """Other transactions changed or locked what it needs, in each attempt. Send it again."""


class CommandTimeout(EntityError):
    """The command was not begun before its timeout. It will not be executed."""


class Overloaded(EntityError):
    """Too many commands wait. ``retry_after`` says after how many seconds to send it again."""

    def __init__(self, message: str = "", *, retry_after: float = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DamagedEntity(EntityError):
    """The entity's row cannot be trusted.

    The row or the head is not at the newest version, because it was edited by hand; or the table
    on MySQL or MariaDB does not distinguish the id from another one.
    """


class WrittenByCommands(EntityError, TypeError):
    """Rows of entities and of their versions are written by commands only."""


class AnswerGone(EntityError):
    """The command was executed before, at ``version``, and its answer was removed since."""

    def __init__(self, message: str = "", *, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class AnswerArchived(AnswerGone):
    """The answer, at ``version``, is in the log's archive: ``execute(…, archive=…)`` reads it."""


class OutcomeUnknown(OutboxError):
    """The command may or may not be committed. Repeat it with the same command id."""


class StatementRefused(OutboxError):
    """A command queried a database without ``atomic=True``, or another one: not executed."""
