"""Every error that the core raises on purpose. Each app has its own in its ``exceptions``.

::

    OutboxError
    ├── StagingRefused: NotAtomic, InvalidJob
    ├── Undeliverable: UnknownApp, Unroutable, KeyBlocked, NoReceipt
    └── SentInTransaction, UnsafeCallback, CallbackFailed, StillStaged, InvalidArgument,
        NotMigrated, UnfitSession, BrokerUnavailable, UnsafeBroker, LeaseLost, InboxError,
        TransactionEnded

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


class NoReceipt(Undeliverable):
    """No worker has executed a job with a receipt: it was published, or begun, too often."""


class InboxError(OutboxError):
    """An idempotent task's id or result cannot be stored, so its effects are not committed."""


class TransactionEnded(OutboxError):
    """A handler or a task has ended its transaction; its effects may be committed in part."""
