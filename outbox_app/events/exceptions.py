"""Errors of events.

::

    OutboxError
    ├── PublishRefused: InvalidEvent, UnknownLog, VersionConflict, MessageIdConflict
    ├── ReadRefused: DamagedCursor, UnsafeLog, TooManyGaps, ForeignCursor: LogSetBack
    └── ArchiveError, InvalidSubscriber, UnknownSubscription, ReplayRefused, GapNotSkippable,
        RebuildRefused, RebuildFailed
"""

from __future__ import annotations

from ..exceptions import OutboxError


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


class ArchiveError(OutboxError):
    """The archive of a log cannot be read."""

    returncode = 2
