"""Metrics for Prometheus: a collector that reads the figures when it is scraped.

This module needs the extra ``prometheus``; only the view imports it. The collector keeps no state
between two scrapes, so any process may answer, and all give the same answer. The number of names
and labels is bounded. If the database is unreachable, a scrape returns ``outbox_up 0`` only, and
the other metrics of the registry are still served.
"""

from __future__ import annotations

from collections import Counter
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
from .jobs.drain.status import DrainerStatus
from .monitoring.diagnosis import CODES, problems
from .monitoring.series import Commands, Decisions
from .monitoring.status import OutboxStatus, outbox_status
from .prepared.status import PreparedStatus
from .text import get_logger

logger = get_logger("outbox_app.metrics")

#: By name, the help text and the labels beside ``database``. Names that end in _total are counters.
METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "outbox_up": ("1 if the outbox could be read, else 0.", ()),
    "outbox_problem": ("1 for each problem found, 0 for every other.", ("code", "severity")),
    "outbox_backlog_jobs": ("Jobs that are ready to leave, counted up to 100001.", ()),
    "outbox_oldest_ready_seconds": ("For how long the oldest job has been ready.", ()),
    "outbox_held_jobs": ("Jobs held until they are due, by when they are due.", ("due",)),
    "outbox_jobs_per_minute": ("Jobs of the last full minute, by outcome.", ("outcome",)),
    "outbox_publish_delay_seconds": (
        "Seconds from staging to the broker's confirm, percentiles of the last five minutes.",
        ("percentile",),
    ),
    "outbox_dead_jobs": (
        "Dead jobs by class of the error; other: all but the most frequent.",
        ("error",),
    ),
    "outbox_incidents": ("Recorded causes of extra publishes in 24 hours.", ("kind",)),
    "outbox_drainers": ("Drainers whose lease has not run out.", ()),
    "outbox_drainers_silent": ("Drainers whose lease has run out.", ()),
    "outbox_drainers_troubled": ("Drainers that wait for a broker or a database.", ()),
    "outbox_shards_unowned": ("Shards without a drainer: their jobs do not leave.", ()),
    "outbox_drainer_shards": ("Shards that a drainer owns.", ("host", "pid")),
    "outbox_drainer_heartbeat_age_seconds": ("Age of a drainer's heartbeat.", ("host", "pid")),
    "outbox_published_jobs_total": ("Jobs that a drainer has published.", ("host", "pid")),
    "outbox_died_jobs_total": ("Jobs that a drainer gave up on.", ("host", "pid")),
    "outbox_events_per_minute": ("Events of the last full minute, by outcome.", ("outcome",)),
    "outbox_subscription_state": (
        "1 for the state of a subscription: running, stopped, failing, paused, waiting, "
        "undeclared.",
        ("subscription", "state"),
    ),
    "outbox_subscription_behind_events": (
        "Events that a subscription has not passed, as far as they were counted.",
        ("subscription",),
    ),
    "outbox_subscription_oldest_seconds": (
        "Age of the oldest event that a subscription has not passed.",
        ("subscription",),
    ),
    "outbox_subscription_handled_events_total": (
        "Events that a subscription has handled.",
        ("subscription",),
    ),
    "outbox_subscription_parked_streams": (
        "Streams that a subscription has parked.",
        ("subscription",),
    ),
    "outbox_gaps_open": ("Gaps of the logs that are open.", ()),
    "outbox_entity_commands_per_minute": ("Commands recorded in the last full minute.", ()),
    "outbox_entity_rejections_per_minute": ("Rejections of the last full minute.", ("code",)),
    "outbox_entity_conflicts_per_minute": ("Attempts repeated in the last full minute.", ()),
    "outbox_entity_routed_per_minute": (
        "Commands of routed types in the last full minute: passed on, executed elsewhere.",
        ("route",),
    ),
    "outbox_entity_batch_size": ("Commands per batch, of the last minutes.", ("percentile",)),
    "outbox_entity_commit_seconds": ("Seconds of a batch's transaction.", ("percentile",)),
    "outbox_entity_waiting": ("Commands that wait in the processes for their batch.", ()),
    "outbox_servers": ("Servers of services whose lease has not run out.", ("service",)),
    "outbox_server_slices": ("Slices of entities, of 1024, that a server leads.", ("address",)),
    "outbox_prepared_events": ("Prepared events that are open, up to 100001.", ("state",)),
    "outbox_prepared_oldest_seconds": ("Age of the oldest event in state prepared.", ()),
    "outbox_prepared_decisions_per_minute": (
        "Prepared events decided in the last full minute.",
        ("outcome", "route"),
    ),
    "outbox_prepared_decide_seconds": ("Seconds from prepared to decided.", ("percentile",)),
    "outbox_prepared_processes": ("Processes that ask senders.", ()),
    "outbox_prepared_senders_silent": ("Senders that do not answer.", ()),
}

Sample = tuple[str, tuple[str, ...], float]


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
            return [("outbox_up", (), 1.0), *_samples(outbox_status(using=using))]
        except django.db.Error as error:
            logger.warning("Metrics could not be read database=%s error=%r", alias, error)
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


def _families() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (text, labels) in METRICS.items():
        family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        found[name] = family(name, text, labels=("database", *labels))
    return found


def _samples(facts: OutboxStatus) -> Iterator[Sample]:
    held, rate = facts.held, facts.per_minute
    found = {each.code for each in problems(facts)}
    for code, (severity, *_) in CODES.items():
        if not code.startswith("max_"):  # metrics know no limits: alerts set them
            yield "outbox_problem", (code, severity), code in found
    yield "outbox_backlog_jobs", (), facts.backlog.rows
    yield "outbox_oldest_ready_seconds", (), facts.backlog.oldest_seconds
    for due, jobs in (("now", held.due), ("hour", held.within_the_hour), ("later", held.later)):
        yield "outbox_held_jobs", (due,), jobs
    for outcome in ("staged", "published", "dead", "immediate"):
        if (value := getattr(rate, outcome)) is not None:
            yield "outbox_jobs_per_minute", (outcome,), value
    yield from _percentiles("outbox_publish_delay_seconds", *facts.delay)
    for row in facts.dead.errors:
        yield "outbox_dead_jobs", (row.name,), row.total
    if others := facts.dead.total - sum(row.total for row in facts.dead.errors):
        yield "outbox_dead_jobs", ("other",), others
    for kind, count in facts.incidents.items():
        yield "outbox_incidents", (kind,), count
    yield "outbox_drainers", (), len(facts.alive)
    yield "outbox_drainers_silent", (), len(facts.drainers) - len(facts.alive)
    yield "outbox_drainers_troubled", (), sum(bool(each.drainer.trouble) for each in facts.alive)
    yield "outbox_shards_unowned", (), len(facts.unowned_shards)
    for name, each in _by_process(facts.drainers).items():
        yield "outbox_drainer_shards", name, each.shards
        yield "outbox_drainer_heartbeat_age_seconds", name, each.silent_seconds
        yield "outbox_published_jobs_total", name, each.drainer.done
        yield "outbox_died_jobs_total", name, each.drainer.dead
    yield "outbox_events_per_minute", ("handled",), rate.handled
    yield "outbox_events_per_minute", ("failed",), rate.failed
    for lag in facts.subscriptions:
        yield "outbox_subscription_state", (lag.name, lag.state), 1
        if lag.cursors and all(each.behind for each in lag.cursors):  # else it is unknown
            yield "outbox_subscription_behind_events", (lag.name,), lag.behind
            yield "outbox_subscription_oldest_seconds", (lag.name,), lag.oldest_seconds
        yield "outbox_subscription_handled_events_total", (lag.name,), lag.handled
        yield "outbox_subscription_parked_streams", (lag.name,), lag.parked
    yield "outbox_gaps_open", (), facts.gaps
    if facts.commands:
        yield from _of_entities(facts.commands)
    for service, count in Counter(each.service for each in facts.servers).items():
        yield "outbox_servers", (service,), count
    for address, count in facts.slices.items():
        yield "outbox_server_slices", (address,), count
    if facts.prepared:
        yield from _of_prepared(facts.prepared, facts.decisions)


def _of_entities(commands: Commands) -> Iterator[Sample]:
    yield "outbox_entity_commands_per_minute", (), commands.recorded
    for code, count in commands.rejected.items():
        yield "outbox_entity_rejections_per_minute", (code,), count
    yield "outbox_entity_conflicts_per_minute", (), commands.conflicts
    yield "outbox_entity_routed_per_minute", ("passed_on",), commands.passed_on
    yield "outbox_entity_routed_per_minute", ("elsewhere",), commands.elsewhere
    yield from _percentiles("outbox_entity_batch_size", *commands.batch_size)
    yield from _percentiles("outbox_entity_commit_seconds", *commands.commit_seconds)
    yield "outbox_entity_waiting", (), commands.waiting


def _of_prepared(facts: PreparedStatus, decisions: Decisions) -> Iterator[Sample]:
    for state in ("prepared", "undecided"):
        yield "outbox_prepared_events", (state,), getattr(facts, state)
    yield "outbox_prepared_oldest_seconds", (), facts.oldest_seconds
    for labels, count in decisions.per_minute.items():
        yield "outbox_prepared_decisions_per_minute", labels, count
    yield from _percentiles("outbox_prepared_decide_seconds", decisions.p50, decisions.p95)
    yield "outbox_prepared_processes", (), facts.processes
    yield "outbox_prepared_senders_silent", (), len(facts.silent)


def _percentiles(name: str, *values: float | None) -> Iterator[Sample]:
    for percentile, value in zip(("50", "95", "99"), values, strict=False):
        if value is not None:
            yield name, (percentile,), value


def _by_process(drainers: list[DrainerStatus]) -> dict[tuple[str, str], DrainerStatus]:
    """Return the drainers by host and process id.

    A container that was killed restarts with the same host and id while its old row still exists:
    the row with the later heartbeat is returned.
    """
    by_age = sorted(drainers, key=lambda each: each.silent_seconds, reverse=True)
    return {(each.drainer.host, str(each.drainer.pid)): each for each in by_age}
