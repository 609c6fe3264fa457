"""Models that publish: ``class Order(PublishingMixin, models.Model)``.

Jobs are the core, and know no events: so publishing is a mixin of its own, which also stages.
"""

from __future__ import annotations

from typing import Any

from ..mixin import OutboxMixin, alias_of, key_of
from .exceptions import InvalidEvent
from .log.publish import publish
from .models import EventLog


class PublishingMixin(OutboxMixin):
    """Gives a model ``self.publish()``, and all that ``OutboxMixin`` gives."""

    class Meta:
        abstract = True

    def publish(self, type: str, data: Any = None, **options: Any) -> EventLog:
        """Publish an event of this instance, on the database that the instance is saved to.

        Its stream is ``app_label.model:pk``.

        Args:
            type, data: As for ``outbox_app.events.publish``.
            **options: Further options of ``publish()``, for example ``expected_version``.

        Returns:
            The row, not committed yet.

        Raises:
            InvalidEvent: The instance has no primary key yet.
            OutboxError: The errors of ``outbox_app.events.publish``.
        """
        options.setdefault("using", alias_of(self))
        without = "its events have no stream. Save it before you publish."
        return publish(key_of(self, InvalidEvent, without), type, data, **options)
