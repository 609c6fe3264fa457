"""Every error that the package raises on purpose.

::

    OutboxError
    ├── StagingRefused: NotAtomic, InvalidJob, UnknownTask
    ├── Undeliverable: UnknownApp, Unroutable, KeyBlocked
    ├── PublishRefused: InvalidEvent, UnknownLog, VersionConflict, MessageIdConflict
    ├── EntityError: InvalidCommand, UnknownEntity, CommandIdConflict, EntityContended,
    │   CommandTimeout, Overloaded, DamagedEntity, WrittenByCommands, AnswerGone: AnswerArchived
    ├── PreparedError: KeeperUnavailable, FencedOut, UnknownPrepared, Contradiction
    │   └── PrepareRefused: InvalidPrepared, PreparedConflict
    ├── PeerError: InvalidPeer, PeerUnavailable
    ├── ReadRefused: DamagedCursor, UnsafeLog, TooManyGaps, ForeignCursor: LogSetBack
    ├── PipelineError: NoSpark, InvalidOption, InvalidSchema, Unreachable, ArchiveRefused
    └── SentInTransaction, UnsafeCallback, CallbackFailed, StillStaged, InvalidArgument,
        NotMigrated, UnfitSession, BrokerUnavailable, UnsafeBroker, LeaseLost, InboxError,
        StatementRefused, TransactionEnded, OutcomeUnknown, NoNode, InvalidSubscriber,
        UnknownSubscription, ReplayRefused, GapNotSkippable, RebuildRefused, RebuildFailed

An error that refuses a job or an event is raised before any statement that could break the
transaction. A command that ends with an error prints its message and exits with its ``returncode``.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Base of all errors of outbox_app."""

    #: Exit code of a command that ends with it: 2 if nothing was tried, as with wrong arguments.
    returncode = 1


class StagingRefused(OutboxError):
    """The job was not staged. The message names the field, what was expected, and what to do."""


class NotAtomic(StagingRefused):
    """Staging needs ``transaction.atomic()`` on the outbox's own database alias."""


class InvalidJob(StagingRefused, ValueError):
    """A field of the job could never be sent."""


class UnknownTask(StagingRefused, LookupError):
    """Strict mode is on and the Celery app has no task of this name."""


class SentInTransaction(OutboxError):
    """A task was called in a transaction while the setting DETECT is "raise". It was not sent."""


class UnsafeCallback(OutboxError):
    """Code that does not run again has called ``on_commit`` while DETECT is "raise".

    Nothing was committed.
    """


class CallbackFailed(OutboxError):
    """An idempotent task is committed, but an ``on_commit`` callback of it did not run to its end.

    It does not run again: a repeated delivery raises this error, too.
    """


class StillStaged(OutboxError, RuntimeError):
    """The code waits for a result inside the transaction that staged its job."""


class InvalidArgument(OutboxError, ValueError):
    """An argument is out of bounds, or names something that does not exist. Nothing was done."""

    returncode = 2


class NotMigrated(OutboxError):
    """The outbox's tables do not exist, or do not exist yet when a data migration needs them."""

    returncode = 2


class UnfitSession(OutboxError):
    """A session has settings under which statements of the outbox fail, or a transaction open."""

    returncode = 2


class BrokerUnavailable(OutboxError):
    """The broker could not be reached, or failed. Jobs without its confirm are tried again."""


class UnsafeBroker(OutboxError):
    """The broker's configuration loses messages, so the drain refuses to hand it jobs."""


class LeaseLost(OutboxError):
    """The lease ran out: the shards may have been taken over."""


class Undeliverable(OutboxError):
    """A job cannot be sent. The dead job keeps the class's name, which is part of the API."""


class UnknownApp(Undeliverable, LookupError):
    """The row names a Celery app that is not loaded in the drainer's process."""


class Unroutable(Undeliverable):
    """No queue is bound for the message; the broker would drop it silently."""


class KeyBlocked(Undeliverable):
    """An earlier job of the same ordering key is dead, and ``OUTBOX["DEAD_KEY"]`` is "block"."""


class InboxError(OutboxError):
    """An idempotent task's id or result cannot be stored, so its effects are not committed."""


class StatementRefused(OutboxError):
    """A statement would have ended the transaction of a handler or task. It was not executed."""


class TransactionEnded(OutboxError):
    """A handler or a task has ended its transaction; its effects may be committed in part."""


class PublishRefused(OutboxError):
    """The event was not published. The message names the field, what was expected, what to do."""


class InvalidEvent(PublishRefused, ValueError):
    """A field of the event could not be stored, or not on every database."""


class UnknownLog(PublishRefused, LookupError):
    """The argument ``log`` is not a concrete model derived from ``EventLog``."""

    returncode = 2


class VersionConflict(PublishRefused):
    """``stream`` is not at the expected version, but at ``current``; 0: it has no event."""

    def __init__(self, message: str = "", *, stream: str = "", current: int = 0) -> None:
        super().__init__(message)
        self.stream = stream
        self.current = current


class MessageIdConflict(PublishRefused):
    """The message id was used for an event with different content."""


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


class PreparedError(OutboxError):
    """A prepared event is not in the state that the call expects. The message says which it is."""


class PrepareRefused(PreparedError):
    """The event was not recorded. Do not begin the transaction that it depends on."""


class InvalidPrepared(PrepareRefused, ValueError):
    """A field of the event, or of the request to prepare it, is invalid."""


class PreparedConflict(PrepareRefused):
    """The event id belongs to an event with different content, or to an event already decided."""


class KeeperUnavailable(PreparedError):
    """The keeper gave no answer. If a confirm or cancel was lost, a check-back makes up for it."""


class FencedOut(PreparedError):
    """The fence contradicts the call: the transaction cannot commit, or has not committed."""


class UnknownPrepared(PreparedError, LookupError):
    """The keeper has no such event of this sender."""


class Contradiction(PreparedError):
    """The event was decided differently before. An incident records the contradiction."""


class PeerError(OutboxError):
    """Another service cannot be called."""


class InvalidPeer(PeerError):
    """The peer is not registered, has no key that is valid, or the extra ``door`` is missing."""

    returncode = 2


class PeerUnavailable(PeerError):
    """The peer gave no answer that can be trusted. If ``sent``, it may have received the call."""

    def __init__(self, message: str = "", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class NoNode(OutboxError):
    """No id can be made: every node is taken, or the database that reserves time is unreachable."""


class InvalidSubscriber(OutboxError):
    """A subscription is declared in a way that cannot work."""

    returncode = 2


class UnknownSubscription(OutboxError, LookupError):
    """No subscription of this name is declared in this process."""

    returncode = 2


class ReplayRefused(OutboxError):
    """A subscription cannot be changed as requested, or not now. Nothing was changed."""


class GapNotSkippable(OutboxError):
    """The gap is not open, or the subscription does not fail at the event. Nothing was changed."""


class RebuildRefused(OutboxError):
    """A view cannot be rebuilt, or the events that are left do not suffice. Nothing was written."""

    returncode = 2


class RebuildFailed(OutboxError):
    """A rebuild has failed. View and subscription are unchanged, unless its COMMIT has worked."""


class ReadRefused(OutboxError):
    """A log cannot be read exactly from here. Nothing was delivered, no cursor was moved."""

    returncode = 2


class DamagedCursor(ReadRefused):
    """A cursor's stored state was not written by the window of its log."""


class ForeignCursor(ReadRefused):
    """The cursor was made in another database cluster, or after the backup that was restored."""


class LogSetBack(ForeignCursor):
    """The log was emptied, or restored alone: positions behind the cursor are given out again."""


class UnsafeLog(ReadRefused):
    """The server or the connection cannot tell what has been committed: a standby, for example."""


class TooManyGaps(ReadRefused):
    """More positions are missing than a cursor may keep. The cursor skips none of them."""


class PipelineError(OutboxError):
    """A pipeline on Spark cannot run or continue. The log is unchanged."""

    returncode = 2


class NoSpark(PipelineError):
    """PySpark, pyarrow or Java is missing, or too old. The message says what to install."""


class InvalidOption(PipelineError, ValueError):
    """An option of the data source ``outbox`` is missing, unknown, or invalid."""


class InvalidSchema(PipelineError, ValueError):
    """A schema names a column that no log has, or gives it another type."""


class Unreachable(PipelineError):
    """A database or an object store does not answer, or refuses. The message has no password."""


class ArchiveRefused(PipelineError):
    """A folder is not an archive of this log, or is a damaged one. Nothing was written to it."""
