"""What the project does with events. Only the app of events imports this module."""

from __future__ import annotations

from outbox_app.events import RecordedEvent, subscriber

#: The streams of the events that the subscription was given in this process.
heard: list[str] = []


@subscriber("shop")
def hear(events: list[RecordedEvent]) -> None:
    heard.extend(event.stream for event in events)
