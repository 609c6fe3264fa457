"""Every error that the package raises on purpose.

::

    OutboxError
    ├── StagingRefused          the job is not staged; the caller's transaction stays usable
    │   ├── NotAtomic           no transaction, or one on another alias
    │   ├── InvalidJob          a field of the job is out of bounds   (also a ValueError)
    │   └── UnknownTask         strict mode: the app has no such task (also a LookupError)
    ├── BrokerUnavailable       nothing was sent; the drain backs off and tries again
    ├── UnsafeBroker            the broker is configured to lose messages
    ├── LeaseLost               this drainer's shards belong to somebody else by now
    ├── Undeliverable           the job is dead, with this as its reason
    │   ├── UnknownApp          its Celery app is not loaded in the drainer's process
    │   ├── Unroutable          no queue is bound for its exchange and routing key
    │   └── KeyBlocked          an earlier job of its ordering key is dead
    └── InboxError              an idempotent task cannot be noted; nothing of it is committed

What refuses a job is raised before any statement, so it never breaks a transaction.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Base of all errors of outbox_app."""


class StagingRefused(OutboxError):
    """The job was not staged. The message names the field, what was expected, and what to do."""


class NotAtomic(StagingRefused):
    """Staging needs ``transaction.atomic()`` on the outbox's own database alias."""


class InvalidJob(StagingRefused, ValueError):
    """A field of the job could never be sent."""


class UnknownTask(StagingRefused, LookupError):
    """Strict mode is on and the Celery app has no task of this name."""


class BrokerUnavailable(OutboxError):
    """The broker could not be reached. Nothing of the batch was sent."""


class UnsafeBroker(OutboxError):
    """The broker's configuration loses messages, so the drain refuses to hand it jobs."""


class LeaseLost(OutboxError):
    """The lease ran out: the shards may have been taken over."""


class Undeliverable(OutboxError):
    """A job cannot leave. Kept as the reason of a dead job; the names are part of the API."""


class UnknownApp(Undeliverable, LookupError):
    """The row names a Celery app that is not loaded in the drainer's process."""


class Unroutable(Undeliverable):
    """No queue is bound for the message; the broker would drop it without a word."""


class KeyBlocked(Undeliverable):
    """An earlier job of the same ordering key is dead, and ``OUTBOX["DEAD_KEY"]`` is "block"."""


class InboxError(OutboxError):
    """An idempotent task's id or result cannot be kept, so its effects are not committed."""
