"""A partition that is driven by hand, and effects in the database that tell what was handled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction

from outbox_app.events import subscriber
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.log.windows.time import TimeWindow
from outbox_app.events.models import Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.models import Incident
from tests.events.log.sessions import truncate

#: How the same events are read: by the window of the database, and by time.
WAYS = [pytest.param({}, id="window"), pytest.param({"by_time": True}, id="time")]


class Reading:
    """A subscription with one partition, and a clock that only the test moves."""

    def __init__(self, alias: str, **options: Any) -> None:
        self.alias = alias
        self.now = 1000.0
        options.setdefault("on_gap", "park")
        subscriber("reads", **options)(self.note)
        self.broken: set[str] = set()
        self.error: type[Exception] = ValueError
        Subscription.objects.using(alias).get_or_create(name="reads")
        self.start()

    def note(self, events: list[Any]) -> None:
        rows = []
        for event in events:
            if event.stream in self.broken:
                raise self.error(event.stream)
            text = f"{event.stream}:{event.version}"
            rows.append(Incident(kind="requeue", first_id=0, last_id=0, detail=text))
        Incident.objects.using(self.alias).bulk_create(rows)

    def start(self) -> Reading:
        """As a process that begins: all that is in memory is new."""
        self.partition = Partition(subscriber_named("reads"), 0, clock=lambda: self.now)
        return self

    def poll(self) -> Reading:
        """Turn until there is nothing more to do at this moment."""
        for _ in range(1000):
            if not self.partition.run_once():
                return self
        raise AssertionError("it turns for ever")

    def later(self, seconds: float = 60.0) -> Reading:
        """Let time go by, from one pause to the next."""
        self.poll()
        end = self.now + seconds
        while (pause := self.partition.pause) is not None and self.now + pause <= end:
            self.now += max(pause, 0.01)
            self.poll()
        self.now = end
        return self.poll()

    @property
    def handled(self) -> list[str]:
        """What has been handled and committed, in order."""
        rows = Incident.objects.using(self.alias).order_by("id")
        return list(rows.values_list("detail", flat=True))

    @property
    def gaps(self) -> list[tuple[str, int, int, str]]:
        rows = Gap.objects.using(self.alias).filter(kind=Gap.Kind.VERSION).order_by("id")
        rows = rows.exclude(subscription="")  # those of audits
        return list(rows.values_list("stream", "first", "last", "state"))

    @property
    def parked(self) -> list[tuple[str, int]]:
        rows = ParkedStream.objects.using(self.alias).order_by("stream")
        return list(rows.values_list("stream", "version"))


class Log:
    """Events that are made, moved and taken away by hand, as no program of ours would."""

    def __init__(self, alias: str, log: Any = Event) -> None:
        self.events = log.objects.using(alias)
        self.alias = alias

    def add(self, stream: str, *versions: int, id: int | None = None, **columns: Any) -> None:
        """Write versions of a stream, also where its head says otherwise, in one transaction."""
        with transaction.atomic(using=self.alias):
            for version in versions:
                at = {} if id is None else {"id": id}
                self.events.create(
                    stream=stream,
                    version=version,
                    type=columns.get("type", "made"),
                    topic=columns.get("topic", ""),
                    slice=slice_of(stream),
                    **at,
                )

    def age(self, stream: str, *versions: int, seconds: float) -> None:
        """As if they were written so long ago, or in the future."""
        rows = self.events.filter(stream=stream, version__in=versions)
        assert rows.update(recorded_at=datetime.now(UTC) - timedelta(seconds=seconds))

    def take(self, stream: str, *versions: int) -> None:
        assert self.events.filter(stream=stream, version__in=versions).delete()[0] == len(versions)


@pytest.fixture
def log(alias: str) -> Log:
    return Log(alias)


@pytest.fixture
def reading(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reading]]:
    """``reading(on_gap="park", …)``: a subscription. If it reads by time, it reads up to now."""
    monkeypatch.setattr(TimeWindow, "behind", 0)
    truncate(alias)
    made: list[Reading] = []

    def make(**options: Any) -> Reading:
        made.append(Reading(alias, **options))
        return made[-1]

    yield make
    for each in made:
        each.partition.close()
