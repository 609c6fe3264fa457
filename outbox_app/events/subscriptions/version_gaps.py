"""Version gaps of one partition: streams that wait for versions that are missing.

A stream is held by a ``ParkedStream`` and an open ``Gap``, written in the transaction in which the
cursor passes its events: no kill loses them. The missing versions are looked for again after 50 ms,
doubling to 5 s; when they are there, the events are handled in order. After ``max_backtracks``
looks the stream counts as parked, with a look every 30 s; ``on_gap="skip"`` skips the gap instead,
and its row says so. A person may skip the gap, too (``subscriptions.skips``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from django.db import transaction

from ...database.upsert import upsert
from ...text import get_logger
from ..log.completeness import Completeness, MissingVersions, contiguous
from ..log.filter import EventFilter
from ..log.reader import LogReader
from ..log.record import RecordedEvent
from ..log.state import WindowState
from ..log.windows.time import TOP, TimeState
from ..models import DeliveredVersion, Gap, GapQuerySet, ParkedStream
from ..signals import stream_parked
from .parking import Parking

logger = get_logger("outbox_app.events.subscriptions")

#: First and longest pause between two looks, in seconds; and the pause once a stream is parked.
FIRST_PAUSE, LAST_PAUSE, PARKED_PAUSE = 0.05, 5.0, 30.0

#: The most streams that are looked at in one run.
MAX_LOOKS = 100
#: With more parked streams, released ones are looked for once a second: nothing indexes them.
MANY, LOOK_SECONDS = 1000, 1.0


class VersionGaps:
    """The version gaps of one partition. With ``on_gap="off"`` there are none."""

    def __init__(self, parking: Parking, *, clock: Callable[[], float]) -> None:
        self.parking = parking
        self.subscriber, self.part, self.using = parking.subscriber, parking.part, parking.using
        self.clock = clock
        self.active = self.subscriber.on_gap != "off"
        #: When to look again for each held stream, by log and stream.
        self._due: dict[tuple[str, str], float] = {}
        #: When to look again for released streams, by log.
        self._look_at: dict[str, float] = {}

    @property
    def pause(self) -> float | None:
        """Seconds until the next look; None: no stream is held."""
        return max(0.0, min(self._due.values()) - self.clock()) if self._due else None

    def load(self) -> None:
        self._due = {}
        if self.active and self.parking.parked:
            held = set(self._open().values_list("log", "stream"))
            self._due = dict.fromkeys(held & self.parking.parked.keys(), self.clock())

    def check(
        self, reader: LogReader, state: WindowState, events: list[RecordedEvent]
    ) -> tuple[list[RecordedEvent], list[MissingVersions]]:
        """Return the events of a page to handle, and the versions that other streams wait for."""
        if not self.active:
            return self.parking.without(events), []
        for event in events:
            key = (event.log, event.stream)
            if key in self._due and event.version <= self.parking.parked[key]:
                self._due[key] = self.clock()  # the page brings what it waits for
        events = self.parking.without(events)
        handled: dict[str, int] = {}
        if isinstance(state, TimeState):
            rows = DeliveredVersion.objects.using(self.using).filter(
                subscription=self.subscriber.name,
                log=reader.table,
                stream__in={event.stream for event in events},
                run=state.run,
            )
            handled = dict(rows.values_list("stream", "version"))
        return Completeness(reader, state).check(events, handled)

    def wanted(self, events: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return the events that the subscription asks for; all were read, to find the gaps."""
        only = EventFilter(self.subscriber.topics, self.subscriber.types)
        if not self.active or only == EventFilter():
            return events
        return [event for event in events if only.matches(event.topic, event.type)]

    def record(
        self,
        reader: LogReader,
        state: WindowState,
        events: Sequence[RecordedEvent],
        missing: Sequence[MissingVersions],
    ) -> None:
        """Record in the open transaction which versions were handled, and which streams wait."""
        parked = self.parking.parked
        for each in missing:
            # The handler may just have parked this stream; its release will find the gap again.
            if (reader.table, each.stream) not in parked:
                at = {"stream": each.stream, "version": each.first, "position": each.position}
                self.parking.park(log=reader.table, error=_text(each), **at)
                self._hold(reader.table, each)
        if not isinstance(state, TimeState):
            return
        versions = {
            event.stream: event.version
            for event in events
            if event.version < parked.get((event.log, event.stream), TOP)
        }
        record_versions(self.subscriber.name, reader.table, state, versions, using=self.using)

    def due(self, log: str) -> list[ParkedStream]:
        """Return the streams of a log that are to be looked at now: held, or released."""
        now = self.clock()
        held = [key for key, due in self._due.items() if key[0] == log and due <= now]
        held = sorted(held, key=self._due.__getitem__)[:MAX_LOOKS]
        # A stream whose row was deleted is not found below: do not look again without a pause.
        self._due |= dict.fromkeys(held, now + LAST_PAUSE)
        looks = len(self.parking.parked) <= MANY or now >= self._look_at.get(log, now)
        found = self.parking.due(log, [stream for _, stream in held], released=looks)
        if looks and not any(each.released for each in found):
            self._look_at[log] = now + LOOK_SECONDS
        return found

    def next_events(
        self, reader: LogReader, state: WindowState, parked: ParkedStream, limit: int
    ) -> tuple[list[RecordedEvent], MissingVersions | None, bool]:
        """Return a parked stream's events to handle, the gap after them, and if more may follow."""
        wanted, params = reader.only.sql()
        # The state of a reader by time does not say which rows were passed.
        ahead = "1 = 0" if isinstance(state, TimeState) else reader.window.unread(state)
        rows = reader.run(
            f"SELECT {', '.join(reader.columns)} FROM {reader.window.source} "
            f"WHERE stream = %s AND version >= %s {wanted and f'AND {wanted}'} AND NOT ({ahead}) "
            f"ORDER BY version LIMIT {limit}",
            [parked.stream, parked.version, *params],
        )
        events = reader.records(rows)
        ready, missing = contiguous(parked.version, events) if self.active else (events, None)
        return ready, missing, len(rows) == limit

    def wait(self, parked: ParkedStream, missing: MissingVersions) -> None:
        """Look again later for versions that are still missing, or give up."""
        subscriber = self.subscriber
        with transaction.atomic(using=self.using):
            if not parked.compare_and_set(
                version=missing.first,
                position=missing.position,
                error=_text(missing),
                released=False,
            ):
                return  # a person has skipped it just now
            gap = self._record_missing(parked.log, missing)
            gap.attempts += 1
            gap.save(using=self.using, update_fields=["attempts"])
            if subscriber.on_gap == "skip" and gap.attempts >= subscriber.max_backtracks:
                self._skip(parked, gap, missing)
                return
            if gap.attempts == max(1, subscriber.max_backtracks):
                self._announce_parked(parked, gap)
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(gap.attempts, 20))
        if gap.attempts >= subscriber.max_backtracks:
            pause = PARKED_PAUSE
        self.parking.parked[parked.log, parked.stream] = missing.first
        self._due[parked.log, parked.stream] = self.clock() + pause

    def filled(
        self,
        parked: ParkedStream,
        state: WindowState,
        events: Sequence[RecordedEvent],
        missing: MissingVersions | None,
    ) -> None:
        """Record in the open transaction that events of a parked stream were handled."""
        gaps = self.open_of(parked)
        if events and self.active:
            if missing:  # only a part of the gap may have been filled
                gaps.filter(last__gte=missing.first).update(last=missing.first - 1)
            gaps.settle(Gap.State.FILLED)
        else:
            gaps.settle(Gap.State.CLOSED, reason="No event waits for these versions.")
        # If there are no events, a person may have skipped the last one.
        versions = {parked.stream: events[-1].version if events else parked.version - 1}
        record_versions(self.subscriber.name, parked.log, state, versions, using=self.using)
        self._due.pop((parked.log, parked.stream), None)
        if missing:
            self._hold(parked.log, missing)

    def failed(self, parked: ParkedStream) -> None:
        """Settle the gap: its versions are there, but the handler failed; a person has to act."""
        if self.active:
            self.open_of(parked).settle(Gap.State.FILLED)
            self._due.pop((parked.log, parked.stream), None)

    def _hold(self, log: str, missing: MissingVersions) -> None:
        self._record_missing(log, missing)
        self._due[log, missing.stream] = self.clock() + FIRST_PAUSE

    def _record_missing(self, log: str, missing: MissingVersions) -> Gap:
        key = {"kind": Gap.Kind.VERSION, "subscription": self.subscriber.name, "log": log}
        of_stream = {**key, "stream": missing.stream, "first": missing.first}
        gaps = Gap.objects.using(self.using)
        return gaps.record_missing(of_stream, partition=self.part, last=missing.last)

    def _skip(self, parked: ParkedStream, gap: Gap, missing: MissingVersions) -> None:
        by = f"subscription {self.subscriber.name}"
        reason = f'Still missing after {gap.attempts} looks (on_gap="skip").'
        give_up(gap, by=by, reason=reason, using=self.using)
        self._due.pop((parked.log, parked.stream), None)
        logger.warning(
            "Gap skipped subscription=%s log=%s stream=%s first=%d last=%d",
            *(self.subscriber.name, parked.log, parked.stream, missing.first, missing.last),
        )

    def _announce_parked(self, parked: ParkedStream, gap: Gap) -> None:
        logger.warning("Gap stays open subscription=%s gap=%s", self.subscriber.name, gap)
        tell = partial(stream_parked.send_robust, ParkedStream, using=self.using, parked=parked)
        transaction.on_commit(tell, using=self.using)

    def open_of(self, parked: ParkedStream) -> GapQuerySet:
        """Return the open gap of a parked stream; none if the stream waits for a person."""
        return self._open().filter(log=parked.log, stream=parked.stream)

    def _open(self) -> GapQuerySet:
        gaps = Gap.objects.using(self.using).open()
        return gaps.filter(kind=Gap.Kind.VERSION, subscription=self.subscriber.name)


def _text(missing: MissingVersions) -> str:
    return f"Versions {missing.first} to {missing.last} are missing; later versions wait."


def give_up(gap: Gap, *, by: str, reason: str, using: str) -> bool:
    """Settle a gap and release its stream after it, in the open transaction.

    Returns False if another transaction has changed one of the two.
    """
    # Write the stream first, then the gap, as the reader does, which may be filling it right now.
    parked = ParkedStream.objects.using(using).filter(
        subscription=gap.subscription,
        log=gap.log,
        stream=gap.stream,
        version__range=(gap.first, gap.last),
    )
    moved = parked.update(version=gap.last + 1, released=True)
    same = Gap.objects.using(using).filter(pk=gap.pk, first=gap.first, last=gap.last)
    settled = same.settle(Gap.State.SKIPPED, by=by, reason=reason)
    return bool(settled and (moved or not gap.subscription))


def record_versions(
    subscription: str, log: str, state: WindowState, versions: Mapping[str, int], *, using: str
) -> None:
    """Record how far a reader by time has handled streams, in the transaction of the effects.

    A row that commits late lies behind its cursor, although it was not read.
    """
    if not isinstance(state, TimeState) or not versions:
        return
    # The rows are sorted, so that two transactions never wait for one another.
    rows = [
        DeliveredVersion(
            subscription=subscription, log=log, stream=stream, version=version, run=state.run
        )
        for stream, version in sorted(versions.items())
    ]
    upsert(
        DeliveredVersion.objects.using(using),
        rows,
        update=["version", "run"],
        unique=["subscription", "log", "stream"],
    )
