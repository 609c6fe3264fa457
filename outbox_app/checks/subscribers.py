"""Subscriptions that cannot run, and what makes those slow that read by time.

Only declarations are looked at, no database. An index that was made by hand and is not in the
model's ``Meta`` is not seen: silence the warning then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Warning
from django.db import connections, models

from ..models import EventLog
from ..subscriptions.subscriber import Subscriber, all_subscribers

#: What a reader by time sorts by.
COLUMNS = ["recorded_at", "id"]


def check_declared_logs(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Name the subscriptions that cannot run. A warning, so that the others are started."""
    hint = "Correct its logs=[…]: models derived from EventLog on one database."
    wrong = [each for each in all_subscribers() if each.fault]
    return [Warning(each.fault, hint=hint, obj=each.name, id="outbox.W030") for each in wrong]


def check_time_readers(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    return [
        message
        for subscriber in all_subscribers()
        if subscriber.by_time and not subscriber.fault
        for message in (*_check_alias(subscriber), *_check_logs(subscriber))
    ]


def _check_alias(subscriber: Subscriber) -> Iterator[CheckMessage]:
    if subscriber.read_from is not None and subscriber.read_from not in connections:
        yield Warning(
            f"Subscription {subscriber.name!r} reads from the database {subscriber.read_from!r}, "
            "which does not exist.",
            hint=f"Name one of DATABASES: {', '.join(connections)}.",
            id="outbox.W014",
        )


def _check_logs(subscriber: Subscriber) -> Iterator[CheckMessage]:
    for log in subscriber.logs:
        if not _is_indexed(log):
            yield Warning(
                f"Subscription {subscriber.name!r} reads the log by time, and the log has no index "
                "on recorded_at and id: each page would sort the whole table.",
                hint='Add models.Index(fields=["recorded_at", "id"]) to the indexes of its Meta, '
                "and migrate. outbox_event has none: its own window serves it better.",
                obj=log,
                id="outbox.W013",
            )


def _is_indexed(log: type[EventLog]) -> bool:
    unique = (c for c in log._meta.constraints if isinstance(c, models.UniqueConstraint))
    fields = [*(list(i.fields) for i in log._meta.indexes), *(list(c.fields) for c in unique)]
    names = [["id" if name == "pk" else name for name in each] for each in fields]
    return any(each[:2] == COLUMNS for each in names)
