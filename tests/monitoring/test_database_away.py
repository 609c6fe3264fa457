"""The database is unreachable: the views still answer, and say so. They affect nothing else."""

from __future__ import annotations

import logging

from django.db import connections
from django.test import RequestFactory
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from outbox_app import views
from outbox_app.metrics import OutboxCollector


def test_health_answers_503_with_a_reason(away, caplog):
    response = views.health(RequestFactory().get("/"))
    assert response.status_code == 503
    assert response.content == (
        b'{"status": "unknown", "problems": [{"code": "database", "severity": "bad", "text": '
        b'"The database cannot be read, or has no outbox tables."}]}'
    )
    [record] = caplog.records
    assert (record.name, record.levelno) == ("outbox_app.views", logging.WARNING)


def test_metrics_say_that_it_is_away(away):
    response = views.metrics(RequestFactory().get("/"))
    assert response.status_code == 200
    samples = [line for line in response.text.splitlines() if not line.startswith("#")]
    assert samples == [f'outbox_up{{database="{away}"}} 0.0']


def test_the_rest_of_a_registry_is_served_all_the_same(away, caplog):
    registry = CollectorRegistry()
    registry.register(OutboxCollector())
    Gauge("shop_orders", "Orders.", registry=registry).set(3)
    text = generate_latest(registry).decode()
    assert f'outbox_up{{database="{away}"}} 0.0\n' in text
    assert "shop_orders 3.0\n" in text
    assert [record.name for record in caplog.records] == ["outbox_app.metrics"]


def test_of_two_databases_the_other_one_is_told(away, django_db_setup):
    registry = CollectorRegistry()
    registry.register(OutboxCollector(away, "default"))
    text = generate_latest(registry).decode()
    assert f'outbox_up{{database="{away}"}} 0.0\n' in text
    assert 'outbox_up{database="default"} 1.0\n' in text
    assert 'outbox_backlog_jobs{database="default"} ' in text
    assert connections[away].connection is None
