"""The drain of one Celery app: its rows, its broker, and its own back-off.

An unreachable broker stops the drain of its own app and of no other, however long its backlog
grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from ...conf import outbox_settings
from ...exceptions import UnknownApp, UnsafeBroker
from ...process.backoff import Backoff
from ..staging.sending import celery_app, staging_apps
from .batch import BatchReader, Row
from .connection import MaySend
from .outcome import PublishResult
from .publisher import Publisher


class AppDrain:
    def __init__(self, name: str, *, using: str, batch_size: int) -> None:
        self.name = name
        self.using = using
        self.backoff = Backoff(self)
        self._reader = BatchReader(using=using, app=name, batch_size=batch_size)
        #: Whether every row of the last batch was accepted, and deleted.
        self.all_left = False
        self._publisher: Publisher | None = None

    def __str__(self) -> str:
        return f"broker of Celery app {self.name!r}"

    def open(self) -> None:
        """Connect to the broker. If it is unreachable, back off; that is no error."""
        publisher = self._find_publisher()
        try:
            if publisher is not None:
                publisher.open()
        except UnsafeBroker:
            raise
        except Exception as error:
            self.backoff.failed(error)
        else:
            self.backoff.succeeded()

    def read(self, shards: Iterable[int], *, but: Mapping[int, int]) -> list[Row]:
        rows = self._reader.read(shards, go_on=self.all_left, but=but)
        self.all_left = False
        return rows

    def publish(self, rows: Sequence[Row], *, now: datetime, may_send: MaySend) -> PublishResult:
        publisher = self._find_publisher()
        if publisher is not None:
            return publisher.publish(rows, using=self.using, now=now, may_send=may_send)
        loaded = sorted({each.main or "" for each in staging_apps()})
        error = UnknownApp(
            f"No Celery app named {self.name!r} is loaded in the drainer's process; loaded: "
            f"{', '.join(map(repr, loaded)) or 'none'}. Import its module in the project's "
            "__init__.py, then requeue the job."
        )
        # If no app is loaded at all, the deployment is wrong and no job is at fault: all jobs wait.
        if loaded:
            return PublishResult(refused=[(row, error) for row in rows])
        return PublishResult(error=error)

    def waiting(self, queues: Iterable[str], *, may_send: MaySend) -> dict[str, int]:
        """Return how many messages wait in each queue; nothing if the app is not loaded here."""
        publisher = self._find_publisher()
        return publisher.waiting(queues, may_send=may_send) if publisher is not None else {}

    def send_events(self, result: PublishResult, keep_alive: Callable[[], object]) -> None:
        """Send Celery's monitors the events of accepted jobs."""
        if self._publisher is not None:
            self._publisher.send_events(result, keep_alive)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _find_publisher(self) -> Publisher | None:
        if self._publisher is None and (app := celery_app(self.name)) is not None:
            self._publisher = Publisher(app, timeout=outbox_settings().PUBLISH_TIMEOUT)
        return self._publisher
