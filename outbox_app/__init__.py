"""Transactional outbox for Django and Celery.

Importing this module imports neither Django nor Celery, so that setup tools and Spark's executors
can. The public names below are imported when they are first asked for, which needs a configured
Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .exports import lazy

if TYPE_CHECKING:
    from .delivery.inbox import idempotent as idempotent
    from .delivery.projection import Projection as Projection
    from .delivery.subscriber import subscriber as subscriber
    from .intake.declaration import on_create as on_create
    from .intake.declaration import on_delete as on_delete
    from .intake.declaration import on_update as on_update
    from .intake.model import OutboxMixin as OutboxMixin
    from .intake.stage import stage as stage
    from .intake.stage import stage_many as stage_many
    from .log.newevent import ANY as ANY
    from .log.newevent import NO_STREAM as NO_STREAM
    from .log.newevent import NewEvent as NewEvent
    from .log.publish import publish as publish
    from .log.publish import publish_many as publish_many
    from .log.record import RecordedEvent as RecordedEvent

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "ANY": "outbox_app.log.newevent",
        "NO_STREAM": "outbox_app.log.newevent",
        "NewEvent": "outbox_app.log.newevent",
        "OutboxMixin": "outbox_app.intake.model",
        "Projection": "outbox_app.delivery.projection",
        "RecordedEvent": "outbox_app.log.record",
        "idempotent": "outbox_app.delivery.inbox",
        "on_create": "outbox_app.intake.declaration",
        "on_delete": "outbox_app.intake.declaration",
        "on_update": "outbox_app.intake.declaration",
        "publish": "outbox_app.log.publish",
        "publish_many": "outbox_app.log.publish",
        "stage": "outbox_app.intake.stage",
        "stage_many": "outbox_app.intake.stage",
        "subscriber": "outbox_app.delivery.subscriber",
    },
)
