"""Version gaps of one partition: streams that wait for versions that are missing.

A stream is held by a ``ParkedStream`` and an open ``Gap``, written in the transaction in which the
cursor passes its events: no kill loses them. It is looked for again after 50 ms, doubling to 5 s;
when the versions are there the events are handled in order. After ``max_backtracks`` looks the
stream counts as parked, and is looked for every 30 s; ``on_gap="skip"`` skips the gap instead, and
says so in its row. A person may skip it (``subscriptions.gaps``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import transaction

from ..eventlog.completeness import Checked, Completeness, Hole
from ..eventlog.reader import LogReader
from ..eventlog.record import RecordedEvent
from ..eventlog.state import WindowState
from ..eventlog.windows.time import TOP
from ..models import DatabaseNow, Gap, ParkedStream
from ..signals import stream_parked
from ..text import get_logger
from .delivered import note, noted
from .parking import Parking
from .subscriber import Subscriber

logger = get_logger("outbox_app.subscriptions")

#: First and longest pause between two looks, in seconds; and the pause once a stream is parked.
FIRST_PAUSE, LAST_PAUSE, PARKED_PAUSE = 0.05, 5.0, 30.0

#: Streams that are looked at in one turn.
MAX_LOOKS = 100


@dataclass(slots=True)
class Hold:
    """A held stream, in memory."""

    #: First version that was not handled.
    version: int
    #: When to look for it, by the clock.
    due: float


class Gaps:
    """The version gaps of one partition. With ``on_gap="off"`` there are none.

    Args:
        subscriber: The subscription.
        part: Its partition.
        parking: Its parked streams.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, subscriber: Subscriber, part: int, parking: Parking, *, clock: Callable[[], float]
    ) -> None:
        self.subscriber = subscriber
        self.part = part
        self.parking = parking
        self.using = parking.using
        self.clock = clock
        self.active = subscriber.on_gap != "off"
        self._holds: dict[tuple[str, str], Hold] = {}
        self._checks: dict[str, Completeness] = {}

    @property
    def pause(self) -> float | None:
        """Seconds until the next look; None: no stream is held."""
        dues = [hold.due for hold in self._holds.values()]
        return max(0.0, min(dues) - self.clock()) if dues else None

    def load(self) -> None:
        """Read which streams are held."""
        self._holds = {}
        if self.active and self.parking.parked:
            held = set(self._open().values_list("log", "stream"))
            now = self.clock()
            self._holds = {
                key: Hold(version, now)
                for key, version in self.parking.parked.items()
                if key in held
            }

    def check(self, reader: LogReader, state: WindowState, events: list[RecordedEvent]) -> Checked:
        """Return what of a page is to be handled, and the streams that have to wait."""
        if not self.active:
            return Checked(self.parking.without(events), [])
        for event in events:
            hold = self._holds.get((event.log, event.stream))
            if hold and event.version <= hold.version:
                hold.due = self.clock()  # the page brings what it waits for
        events = self.parking.without(events)
        streams = {event.stream for event in events}
        handled = noted(self.subscriber.name, reader.table, state, streams, using=self.using)
        return self._completeness(reader).check(state, events, handled)

    def wanted(self, events: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return the events that the subscription has asked for: all versions were read."""
        only = self.subscriber.only(self.part)
        if not self.active or (only.topics is None and only.types is None):
            return events
        return [event for event in events if only.matches(event.topic, event.type)]

    def passed(
        self,
        reader: LogReader,
        state: WindowState,
        events: Sequence[RecordedEvent],
        holes: Sequence[Hole],
    ) -> None:
        """Note in the open transaction what was handled, and what has to wait."""
        for hole in holes:
            self._hold(reader.table, hole)
        if not self.active:
            return
        parked = self.parking.parked
        versions = {
            event.stream: event.version
            for event in events
            if event.version < parked.get((event.log, event.stream), TOP)
        }
        note(self.subscriber.name, reader.table, state, versions, using=self.using)

    def due(self, log: str) -> list[ParkedStream]:
        """Return the streams of a log that are to be looked at now: held, or released."""
        now = self.clock()
        streams = [key[1] for key, hold in self._holds.items() if key[0] == log and hold.due <= now]
        found = self.parking.due(log, streams[:MAX_LOOKS])
        for gone in set(streams[:MAX_LOOKS]).difference(row.stream for row in found):
            # Somebody has deleted its row.
            del self._holds[log, gone]
            self.parking.parked.pop((log, gone), None)
        return found

    def following(
        self, reader: LogReader, state: WindowState, parked: ParkedStream, limit: int
    ) -> tuple[list[RecordedEvent], Hole | None, bool]:
        """Return what can be handled of a parked stream, what is missing then, and if more is."""
        if self.active:
            check = self._completeness(reader)
            return check.following(state, parked.stream, parked.version, limit)
        events = self.parking.missed(parked, reader, state, limit)
        return events, None, len(events) == limit

    def held(self, parked: ParkedStream) -> bool:
        """Say whether the stream waits for versions, and not for a person."""
        return bool(self._open().filter(log=parked.log, stream=parked.stream).exists())

    def wait(self, parked: ParkedStream, hole: Hole) -> None:
        """It is still missing: look again later, or give up."""
        subscriber, key = self.subscriber, (parked.log, parked.stream)
        with transaction.atomic(using=self.using):
            if not self.parking.move(parked, hole.first, hole.position, _text(hole)):
                return  # a person has skipped it just now
            gap = self._gap(parked.log, hole)
            gap.attempts += 1
            gap.save(using=self.using, update_fields=["attempts"])
            if subscriber.on_gap == "skip" and gap.attempts >= subscriber.max_backtracks:
                self._skip(parked, gap, hole)
                return
            if gap.attempts == max(1, subscriber.max_backtracks):
                self._say_parked(parked, gap)
        parked_by_now = gap.attempts >= subscriber.max_backtracks
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2 ** min(gap.attempts, 20))
        due = self.clock() + (PARKED_PAUSE if parked_by_now else pause)
        self._holds[key] = Hold(hole.first, due)

    def made_up(
        self,
        parked: ParkedStream,
        state: WindowState,
        events: Sequence[RecordedEvent],
        hole: Hole | None,
    ) -> None:
        """Note in the open transaction that events of a parked stream were handled."""
        if not self.active:
            return
        rows = self._open().filter(log=parked.log, stream=parked.stream)
        settled: dict[str, Any] = {"state": Gap.State.FILLED, "settled_at": DatabaseNow()}
        if not events:
            settled.update(state=Gap.State.CLOSED, reason="Nothing is there that waits for it.")
        elif hole:  # of what was missing it may have been a part
            rows.filter(last__gte=hole.first).update(last=hole.first - 1)
        rows.update(**settled)
        if events:
            versions = {parked.stream: events[-1].version}
            note(self.subscriber.name, parked.log, state, versions, using=self.using)
        key = (parked.log, parked.stream)
        self._holds.pop(key, None)
        if hole:
            self._gap(parked.log, hole)
            self._holds[key] = Hold(hole.first, self.clock() + FIRST_PAUSE)

    def failed(self, parked: ParkedStream) -> None:
        """The versions are there, but the handler refused them: the stream waits for a person."""
        if self.active:
            rows = self._open().filter(log=parked.log, stream=parked.stream)
            rows.update(state=Gap.State.FILLED, settled_at=DatabaseNow())
            self._holds.pop((parked.log, parked.stream), None)

    def _hold(self, log: str, hole: Hole) -> None:
        if (log, hole.stream) in self.parking.parked:
            return  # its handler failed in this page; when it is released, the hole is met again
        self.parking.hold(log, hole.stream, hole.first, hole.position, _text(hole))
        self._gap(log, hole)
        self._holds[log, hole.stream] = Hold(hole.first, self.clock() + FIRST_PAUSE)

    def _gap(self, log: str, hole: Hole) -> Gap:
        """Return the row of an open gap; it may have been settled before, and be open again."""
        key = {
            "kind": Gap.Kind.VERSION,
            "subscription": self.subscriber.name,
            "log": log,
            "stream": hole.stream,
            "first": hole.first,
        }
        values: dict[str, Any] = {"partition": self.part, "last": hole.last}
        again: dict[str, Any] = {
            "state": Gap.State.OPEN,
            "attempts": 0,
            "settled_at": None,
            "settled_by": "",
            "reason": "",
        }
        gaps = Gap.objects.using(self.using)
        gap, created = gaps.get_or_create(**key, defaults=values)
        if not created:
            if gap.state != Gap.State.OPEN:
                values |= again
            for name, value in values.items():
                setattr(gap, name, value)
            gap.save(using=self.using, update_fields=list(values))
        return gap

    def _skip(self, parked: ParkedStream, gap: Gap, hole: Hole) -> None:
        gap.state = Gap.State.SKIPPED
        gap.settled_at = DatabaseNow()
        gap.settled_by = f"subscription {self.subscriber.name}"
        gap.reason = f'Not there after {gap.attempts} looks (on_gap="skip").'
        gap.save(using=self.using)
        rows = ParkedStream.objects.using(self.using).filter(pk=parked.pk)
        rows.update(version=hole.last + 1, released=True)
        self._holds.pop((parked.log, parked.stream), None)
        logger.warning(
            "Gap skipped subscription=%s log=%s stream=%s first=%d last=%d",
            *(self.subscriber.name, parked.log, parked.stream, hole.first, hole.last),
        )

    def _say_parked(self, parked: ParkedStream, gap: Gap) -> None:
        logger.warning("Gap stays open subscription=%s gap=%s", self.subscriber.name, gap)
        transaction.on_commit(
            lambda: stream_parked.send_robust(ParkedStream, using=self.using, parked=parked),
            using=self.using,
            robust=True,
        )

    def _completeness(self, reader: LogReader) -> Completeness:
        if reader.table not in self._checks:
            self._checks[reader.table] = Completeness(reader)
        return self._checks[reader.table]

    def _open(self) -> Any:
        return Gap.objects.using(self.using).filter(
            kind=Gap.Kind.VERSION, state=Gap.State.OPEN, subscription=self.subscriber.name
        )


def _text(hole: Hole) -> str:
    return f"Versions {hole.first} to {hole.last} are missing; what follows them waits."
