"""Metrics for Prometheus: a collector that reads the figures when it is scraped.

This module needs the extra ``prometheus``; only the view imports it. The collector keeps no state
between two scrapes, so any process may answer, and all give the same answer. The number of names
and labels is bounded. If the database is unreachable, a scrape returns ``outbox_up 0`` only, and
the other metrics of the registry are still served.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import django.db
from django.db import connections
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .aliases import outbox_alias
from .capability import Figure, Sample, all_doors, kinds
from .monitoring.diagnosis import problems
from .monitoring.status import OutboxStatus, outbox_status
from .text import get_logger

logger = get_logger("outbox_app.metrics")


class OutboxCollector(Collector):
    """Collects the metrics of one outbox or several; register it once in a registry.

    Args:
        aliases: Database aliases. Default: the outbox's.
    """

    def __init__(self, *aliases: str) -> None:
        self.aliases = aliases

    def describe(self) -> list[Metric]:
        """Return the metrics without a sample: registering asks no database."""
        return list(_families().values())

    def collect(self) -> Iterator[Metric]:
        families = _families()
        for alias in self.aliases or (outbox_alias(),):
            for name, labels, value in self._ask(alias):
                families[name].add_metric((alias, *labels), value)
        yield from families.values()

    def _ask(self, alias: str) -> list[Sample]:
        using = alias if self.aliases else None
        was_open = [each for each in connections.all(initialized_only=True) if each.connection]
        try:
            figures = _figures(outbox_status(using=using))
            return [sample for each in figures for sample in each.samples()]
        except django.db.Error as error:
            logger.warning("Metrics could not be read database=%s error=%s", alias, error)
            return [("outbox_up", (), 0.0)]
        finally:
            # A thread of a metrics server has no request whose end would close the connections.
            # Several may be open, as logs may be on other aliases.
            for each in connections.all(initialized_only=True):
                if each not in was_open:
                    each.close()


def exposition(accept: str, *, using: str | None = None) -> tuple[bytes, str]:
    """Return the metrics of an outbox as text, and the content type of the text.

    Args:
        accept: The header ``Accept`` of the request.
        using: Database alias. Default: the outbox's.
    """
    registry = CollectorRegistry()
    registry.register(OutboxCollector(*([using] if using else [])))
    encode, content_type = choose_encoder("")
    with suppress(TypeError):  # a version that is no number, such as "0.0.4" in quotes
        encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def all_metrics() -> dict[str, Figure]:
    """Return all metrics by name, without a sample: nothing is read."""
    sections = {doors.name: doors.empty for doors in all_doors() if doors.empty}
    empty = OutboxStatus(database="", drainers=[], sections=sections)
    return {each.metric: each for each in _figures(empty)}


def _figures(facts: OutboxStatus) -> Iterator[Figure]:
    """Yield the figures that have a metric."""
    yield Figure(1, "outbox_up", "1 if the outbox could be read, else 0.")
    found = {each.code for each in problems(facts)}
    # Metrics know no limits: alerts set them.
    codes = {(code, kind.severity): code in found for code, kind in kinds().items()
             if not code.startswith("max_")}  # fmt: skip
    help_text = "1 for each problem found, 0 for every other."
    yield Figure(codes, "outbox_problem", help_text, ("code", "severity"))
    yield from (each for each in facts.figures() if each.metric)


def _families() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, figure in all_metrics().items():
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        found[name] = family(name, figure.help, labels=("database", *figure.labels))
    return found
