"""Counters for tests: planted ones, and what is in the table."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox_app.models import Statistic

#: The time of tests that set it: 12:30:30.
NOW = datetime(2026, 3, 29, 12, 30, 30, tzinfo=UTC)


def ago(minutes: float) -> datetime:
    """The minute of NOW, or an earlier one."""
    return NOW.replace(second=0) - timedelta(minutes=minutes)


def plant(alias: str, *rows: tuple[Any, ...]) -> None:
    """Write rows of (minutes ago, name, value[, source[, dimension, label]])."""
    made = []
    for minutes, name, value, *rest in rows:
        source, dimension, label = (*rest, *("one", "", "")[len(rest) :])
        made.append(
            Statistic(
                minute=ago(minutes),
                name=name,
                value=value,
                source=source,
                dimension=dimension,
                label=label,
            )
        )
    Statistic.objects.using(alias).bulk_create(made)


def totals(alias: str, **only: Any) -> dict[str, float]:
    """What is in the table, by name and label, over minutes and processes."""
    found: dict[str, float] = defaultdict(float)
    for row in Statistic.objects.using(alias).filter(**only):
        found[f"{row.name} {row.label}".strip()] += row.value
    return dict(found)
