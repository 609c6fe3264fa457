"""Lanes: one for each Celery app, with its rows, its broker, and its own troubles.

A broker that is away stops its own lane and no other, however long its backlog grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from ...conf import outbox_settings
from ...exceptions import UnknownApp, UnsafeBroker
from ...process.backoff import Trouble
from ..staging.sending import StagingMixin, celery_app
from .batch import BatchReader, Row
from .outgoing import Outcome
from .publisher import MaySend, Publisher


class Lane:
    """The way out of one Celery app.

    Args:
        app: Its name, as in the rows.
        using: Database alias.
        batch_size: Rows of a batch.
    """

    def __init__(self, app: str, *, using: str, batch_size: int) -> None:
        self.app = app
        self.trouble = Trouble(self)
        self._reader = BatchReader(using=using, app=app, batch_size=batch_size)
        self._publisher: Publisher | None = None

    def __str__(self) -> str:
        return f"broker of Celery app {self.app!r}"

    def read(self, shards: Iterable[int]) -> list[Row]:
        """Return the next batch."""
        return self._reader.read(shards)

    def open(self) -> None:
        """Connect to the broker; one that is away is noted, and no error.

        Raises:
            UnsafeBroker: Its configuration loses messages.
        """
        publisher = self._find_publisher()
        try:
            if publisher is not None:
                publisher.open()
        except UnsafeBroker:
            raise
        except Exception as error:
            self.trouble.note(error)
        else:
            self.trouble.over()

    def publish(self, rows: Sequence[Row], *, now: datetime, may_send: MaySend) -> Outcome:
        """Publish rows; see ``Publisher.publish``."""
        publisher = self._find_publisher()
        if publisher is not None:
            return publisher.publish(rows, now=now, may_send=may_send)
        loaded = staging_apps()
        error = UnknownApp(
            f"No Celery app named {self.app!r} is loaded in the drainer's process; loaded: "
            f"{', '.join(map(repr, loaded)) or 'none'}. Import its module in the project's "
            "__init__.py, then requeue the job."
        )
        # Where no app is loaded at all, the deployment is wrong and no job is: they wait.
        return Outcome(refused=[(row, error) for row in rows]) if loaded else Outcome(error=error)

    def close(self) -> None:
        """Drop the connection to the broker."""
        if self._publisher is not None:
            self._publisher.close()

    def _find_publisher(self) -> Publisher | None:
        if self._publisher is None:
            app = celery_app(self.app)
            if app is not None:
                self._publisher = Publisher(app, timeout=outbox_settings().PUBLISH_TIMEOUT)
        return self._publisher


def staging_apps() -> list[str]:
    """Return the names of the Celery apps of this process that stage by themselves."""
    from celery._state import _get_active_apps  # type: ignore[attr-defined]

    apps = [app for app in _get_active_apps() if isinstance(app, StagingMixin)]
    return sorted({getattr(app, "main", "") or "" for app in apps if app.stages_by_itself})
