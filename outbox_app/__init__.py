"""Transactional outbox for Django and Celery.

Importing this module imports neither Django nor Celery, so that setup tools and Spark's executors
can. The public names below are imported when they are first asked for, which needs a configured
Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exports import lazy

if TYPE_CHECKING:
    from .jobs.idempotent import idempotent as idempotent
    from .jobs.staged import cancel as cancel
    from .jobs.staged import reschedule as reschedule
    from .jobs.staging.stage import stage as stage
    from .jobs.staging.stage import stage_many as stage_many
    from .mixin import OutboxMixin as OutboxMixin
    from .mixin import on_create as on_create
    from .mixin import on_delete as on_delete
    from .mixin import on_update as on_update

__version__ = "0.1.0"

if not TYPE_CHECKING:  # so that type checkers report a name that does not exist
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".jobs.idempotent": ["idempotent"],
            ".jobs.staged": ["cancel", "reschedule"],
            ".jobs.staging.stage": ["stage", "stage_many"],
            ".mixin": ["OutboxMixin", "on_create", "on_delete", "on_update"],
        },
    )
