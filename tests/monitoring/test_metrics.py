"""The text of the metrics: it parses, passes promtool's lint, is correct, bounded and escaped."""

from __future__ import annotations

import re
from collections import Counter as Count
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import connections
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from outbox_app import metrics
from outbox_app.conf import SHARDS
from outbox_app.database.clock import DatabaseNow
from outbox_app.entities import series as entities_series
from outbox_app.events.models import Cursor
from outbox_app.fleet.models import Server
from outbox_app.metrics import OutboxCollector, all_metrics, exposition
from outbox_app.models import DeadJob, Incident, Lease, StagedJob, counting
from outbox_app.monitoring import series, status
from outbox_app.prepared import doors as prepared_doors
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.series import Decisions

pytestmark = pytest.mark.django_db(transaction=True)

DOCS = Path(__file__).resolve().parents[2] / "docs"
SERVER = "http://127.0.0.1:1/outbox/"
HOSTILE = 'E"\\\n{x="1"} 7\n# HELP outbox_up no\u202e'
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


HOUR = timedelta(hours=1)


@pytest.fixture
def lively(alias, staged, died, drainer, published, run, seen_by, monkeypatch, settings):
    """An outbox in which every metric has a sample."""
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": {"SERVICE": "shop"}}
    for node, weight in (("host:1", 1), ("host:2", 0)):
        Server.objects.using(alias).create(
            service="shop", node=node, address=SERVER, weight=weight, lease_seconds=600
        )
    seen_by("stock")
    published("a")
    run("stock")
    published("a", "b")
    staged(3, age=50)
    [job] = staged(1)
    StagedJob.objects.using(alias).filter(pk=job.pk).update(
        receipt=60, publishes=2, sent_at=DatabaseNow(), available_at=DatabaseNow() + HOUR
    )
    died(2, error=HOSTILE)
    drainer(shards=100, done=9, dead=1)
    Lease.objects.using(alias).bulk_create(  # the oldest job is looked for in shards that have one
        (Lease(resource="jobs", part=part) for part in range(SHARDS)), ignore_conflicts=True
    )
    drainer(host="web-2", silent=600)
    drainer(host="web-3", trouble="away")
    Incident.objects.using(alias).create(kind="takeover", first_id=1, last_id=1)
    monkeypatch.setattr(series, "delays", lambda using: series.Delays(0.1, 0.5, 2.0))
    told = entities_series.Commands(60, 3, {"balance": 9, "": 1}, (1, 20), (0.002, 0.04), 5, 8, 4)
    monkeypatch.setattr(entities_series, "commands", lambda aliases: told)
    prepared = {"decide_by": DatabaseNow(), "unreachable": 3, "last_answer": "OSError: away"}
    for sender in ("alias:billing", "alias:shop"):
        PreparedEvent.objects.using(alias).create(sender=sender, event_id=uuid4(), **prepared)
    rates = {("confirmed", "call"): 30, ("cancelled", "policy"): 2}
    decided = Decisions(rates, 0.02, 1.5)
    monkeypatch.setattr(prepared_doors, "decisions", lambda using: decided)


def scraped(accept=""):
    text = exposition(accept)[0].decode()
    parse = openmetrics if accept else prometheus
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def value(samples, name, **labels):
    [found] = [
        number
        for (sample, *pairs), number in samples.items()
        if sample == name and labels.items() <= dict(pairs).items()
    ]
    return found


def test_what_is_told_is_so(alias, lively):
    found = scraped()
    assert {dict(pairs)["database"] for _, *pairs in found} == {alias}
    assert value(found, "outbox_up") == 1
    assert value(found, "outbox_backlog_jobs") == 3
    assert 50 <= value(found, "outbox_oldest_ready_seconds") < 150
    assert value(found, "outbox_held_jobs", due="now") == 0
    assert value(found, "outbox_publish_delay_seconds", percentile="95") == 0.5
    assert value(found, "outbox_dead_jobs", error=HOSTILE) == 2
    assert value(found, "outbox_incidents", kind="takeover") == 1
    assert value(found, "outbox_drainers") == 2
    assert value(found, "outbox_drainers_silent") == 1
    assert value(found, "outbox_drainers_troubled") == 1
    assert value(found, "outbox_shards_unowned") == 28
    assert value(found, "outbox_drainer_shards", host="web-1", pid="7") == 100
    assert value(found, "outbox_published_jobs_total", host="web-1", pid="7") == 9
    assert value(found, "outbox_died_jobs_total", host="web-1") == 1
    assert value(found, "outbox_drainer_heartbeat_age_seconds", host="web-2") >= 600
    assert value(found, "outbox_subscription_state", subscription="stock", state="stopped") == 1
    assert value(found, "outbox_subscription_behind_events", subscription="stock") == 2
    assert value(found, "outbox_subscription_handled_events_total", subscription="stock") == 1
    assert value(found, "outbox_gaps_open") == 0
    assert value(found, "outbox_entity_commands_per_minute") == 60
    assert value(found, "outbox_entity_rejections_per_minute", code="balance") == 9
    assert value(found, "outbox_entity_conflicts_per_minute") == 3
    assert value(found, "outbox_entity_routed_per_minute", route="passed_on") == 8
    assert value(found, "outbox_entity_routed_per_minute", route="elsewhere") == 4
    assert value(found, "outbox_entity_batch_size", percentile="95") == 20
    assert value(found, "outbox_entity_commit_seconds", percentile="50") == 0.002
    assert value(found, "outbox_entity_waiting") == 5
    assert value(found, "outbox_servers", service="shop") == 2
    assert value(found, "outbox_server_slices", address=SERVER) == 1024
    assert value(found, "outbox_prepared_events", state="prepared") == 2
    assert value(found, "outbox_prepared_events", state="undecided") == 0
    assert 0 <= value(found, "outbox_prepared_oldest_seconds") < 60
    decisions = "outbox_prepared_decisions_per_minute"
    assert value(found, decisions, outcome="confirmed", route="call") == 30
    assert value(found, decisions, outcome="cancelled", route="policy") == 2
    assert value(found, "outbox_prepared_decide_seconds", percentile="95") == 1.5
    assert value(found, "outbox_prepared_processes") == 0
    assert value(found, "outbox_prepared_senders_silent") == 2


def test_what_is_unknown_is_not_told_as_none(alias, published, run, seen_by):
    """Of a subscription that has never run, and of one whose cursor cannot be read."""
    for name in ("damaged", "never_run"):
        seen_by(name)
    published("a")
    run("damaged")
    published("a")
    assert value(scraped(), "outbox_subscription_behind_events") == 1
    Cursor.objects.using(alias).update(state="nonsense")
    found = scraped()
    for state, name in (("failing", "damaged"), ("waiting", "never_run")):
        assert value(found, "outbox_subscription_state", subscription=name, state=state) == 1
    assert not {name for name, *_ in found} & {
        "outbox_subscription_behind_events",
        "outbox_subscription_oldest_seconds",
    }


def test_both_formats_say_the_same(alias, lively):
    plain, open_ = scraped(), scraped(OPENMETRICS)
    changing = {"outbox_oldest_ready_seconds", "outbox_drainer_heartbeat_age_seconds"}
    changing |= {"outbox_subscription_oldest_seconds", "outbox_prepared_oldest_seconds"}
    changing |= {"outbox_jobs_per_minute", "outbox_events_per_minute"}  # a minute may end between
    assert plain.keys() == open_.keys()
    assert {key: number for key, number in plain.items() if key[0] not in changing} == {
        key: number for key, number in open_.items() if key[0] not in changing
    }
    assert exposition("")[1].startswith("text/plain; version=0.0.4")
    assert exposition(OPENMETRICS)[1].startswith("application/openmetrics-text; version=1.0.0")


def test_lint(alias, lively):
    """The rules of ``promtool check metrics``."""
    text = exposition("")[0].decode()
    families = list(prometheus(text))
    helped = re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)
    typed = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert [name for name, _ in helped] == list(typed) == list(all_metrics())
    for family in families:
        assert family.samples, f"{family.name} has no sample: the test says nothing of it"
    for name, kind in typed.items():
        assert kind == ("counter" if name.endswith("_total") else "gauge")
        assert re.fullmatch(r"outbox(_[a-z]+)+", name)
        assert not name.endswith(("_bucket", "_count", "_sum", "_info"))
        # Base units, written out, and no type in the name.
        words = set(name.split("_"))
        assert not words & {"s", "ms", "sec", "min", "minutes", "hours", "days", "milliseconds"}
        assert not words & {"counter", "gauge", "histogram", "summary", "metric"}
    for metric in all_metrics().values():
        assert not set(metric.labels) & {"le", "quantile", "instance", "job"}
        assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)
    lines = Count(line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#")
    assert [each for each, count in lines.items() if count > 1] == []


def test_two_drainers_of_one_host_and_pid_are_one_series(alias, drainer):
    """The row of a container that was killed, and that of the one which came after it."""
    drainer(host="pod-1", pid=1, silent=5, done=1000)
    drainer(host="pod-1", pid=1, done=3)
    found = scraped()
    assert value(found, "outbox_published_jobs_total", host="pod-1", pid="1") == 3
    assert value(found, "outbox_drainers") == 2


def test_labels_are_bounded(alias, died, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    for error in "ABBCCDE":
        died(1, error=error)
    found = scraped()
    dead = {dict(pairs)["error"]: n for (name, *pairs), n in found.items() if "dead_jobs" in name}
    assert dead == {"B": 2, "C": 2, "other": 3}


def test_what_nobody_measured_has_no_sample(alias):
    text = exposition("")[0].decode()
    assert "outbox_publish_delay_seconds{" not in text
    assert "outbox_entity_commit_seconds{" not in text
    assert "outbox_entity_rejections_per_minute{" not in text
    assert "outbox_prepared_events{" not in text
    assert 'outcome="published"} 0.0' in text


def test_counters_do_not_go_down_with_the_rows(alias, lively):
    before = scraped()
    Cursor.objects.using(alias).update(handled=5)
    DeadJob.objects.using(alias).all().delete()
    after = scraped()
    totals = [key for key in before if key[0].endswith("_total")]
    assert totals
    assert all(after[key] >= before[key] for key in totals)


def test_registering_asks_no_database(alias):
    with connections[alias].execute_wrapper(lambda *_: pytest.fail("a statement")):
        registry = CollectorRegistry()
        registry.register(OutboxCollector(alias))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(OutboxCollector())
    assert registry.get_sample_value("outbox_up", {"database": alias}) == 1


def test_a_connection_that_was_open_stays_so(alias):
    exposition("")
    connections[alias].ensure_connection()
    exposition("")
    assert connections[alias].connection is not None
    connections[alias].close()
    exposition("")
    assert connections[alias].connection is None


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_so_does_that_of_a_log_on_another_alias(alias, monkeypatch):
    """A thread of a metrics server keeps it else, and scrapes nothing after it has broken."""
    for module in (metrics, status):
        monkeypatch.setattr(module, "outbox_alias", lambda: "default")
    connections[alias].close()
    assert 'outbox_up{database="default"} 1.0' in exposition("")[0].decode()
    assert connections[alias].connection is None
