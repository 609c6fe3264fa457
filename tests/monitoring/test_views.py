"""The health view: its answers, who may ask, and the details that it never shows."""

from __future__ import annotations

import sys

import pytest
from django.db import connections
from django.test import Client, RequestFactory
from django.urls import include, path, reverse

from outbox_app import views
from outbox_app.events.models import Cursor
from tests.monitoring.conftest import SECRET

pytestmark = pytest.mark.django_db

urlpatterns = [
    path("outbox/", include("outbox_app.urls")),
    path("strict/", views.health, {"max_age": 60, "max_backlog": 5, "max_dead": 0}),
]


@pytest.fixture(autouse=True)
def urlconf(settings):
    settings.ROOT_URLCONF = __name__


def asked(client, address="/outbox/health/"):
    response = client.get(address)
    told = response.json()
    return response.status_code, [each["code"] for each in told["problems"]], told


def test_it_answers_200_where_work_is_leaving(alias, client, staged, died, drainer):
    drainer(shards=128)
    staged(2, age=100)
    died()
    code, problems, told = asked(client)
    assert (code, problems) == (200, ["dead"])
    assert 100 <= told.pop("oldest_seconds") < 200
    assert told == {
        "status": "ok",
        "problems": [
            {"code": "dead", "severity": "warning", "text": "1 job has died in the last hour."}
        ],
        "backlog": 2,
        "dead": 1,
        "drainers": 1,
        "unowned_shards": 0,
    }


def test_it_answers_503_where_work_waits_and_nobody_drains(alias, client, staged):
    staged()
    code, problems, told = asked(client)
    assert (code, problems, told["status"]) == (503, ["no_drainer"], "failing")


def test_the_url_conf_says_what_decides(alias, client, staged, died, drainer):
    drainer(shards=128)
    assert asked(client, "/strict/")[:2] == (200, [])
    staged(6, age=100)
    died()
    assert asked(client)[:2] == (200, ["dead"])
    assert asked(client, "/strict/")[:2] == (503, ["max_age", "max_backlog", "max_dead"])


@pytest.mark.django_db(transaction=True)
def test_it_tells_numbers_only(alias, client, staged, died, drainer, published, run, seen_by):
    seen_by("stock")
    published("a")
    run("stock")
    Cursor.objects.using(alias).update(error=SECRET)
    staged()
    died(reason=SECRET, error=SECRET, task=SECRET)
    drainer(trouble=SECRET, host=SECRET)
    response = client.get("/strict/")
    assert response.status_code == 503
    assert [each["code"] for each in response.json()["problems"]] == [
        "trouble",
        "failing",
        "max_dead",
    ]
    assert "hunter2" not in response.text
    assert "stock" not in response.text


@pytest.mark.parametrize("alias", ["default"])
@pytest.mark.parametrize("name", ["health", "metrics"])
def test_methods_and_caching(alias, client, name, drainer):
    drainer(shards=128)
    address = reverse(f"outbox:{name}")
    assert address == f"/outbox/{name}/"
    got = client.get(address)
    assert got.status_code == 200
    assert {"no-store", "no-cache", "private"} <= set(got["Cache-Control"].split(", "))
    head = client.head(address)
    assert (head.status_code, head.content) == (200, b"")
    for method in ("post", "put", "patch", "delete", "options"):
        refused = getattr(client, method)(address)
        assert (refused.status_code, refused["Allow"]) == (405, "GET, HEAD")
    strict = Client(enforce_csrf_checks=True)
    assert strict.post(address).status_code in (403, 405)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", ["health", "metrics"])
def test_it_begins_outside_a_transaction(alias, client, name, monkeypatch, drainer):
    """With ATOMIC_REQUESTS, Django would ask the database before the view could answer."""
    drainer(shards=128)
    monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    began = []

    def view(execute, *statement):
        began.append(connections[alias].in_atomic_block)
        return execute(*statement)

    with connections[alias].execute_wrapper(view):
        assert client.get(f"/outbox/{name}/").status_code == 200
    assert began
    assert not began[0]
    # What asks for the sessions of others has a transaction of its own, which it may lose.
    assert sum(began) < len(began) / 2


def test_a_limit_that_makes_no_sense_is_an_error_of_the_project(client):
    with pytest.raises(ValueError, match="max_dead must be a number from 0 on"):
        views.health(RequestFactory().get("/"), max_dead=-1)


@pytest.mark.parametrize("alias", ["default"])
def test_metrics_without_their_package_say_what_to_install(alias, client, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "outbox_app.metrics", raising=False)
    response = client.get("/outbox/metrics/")
    assert response.status_code == 501
    assert response.text == "Metrics need prometheus_client: pip install prometheus-client.\n"


@pytest.mark.parametrize("alias", ["default"])
@pytest.mark.parametrize("version", ['"0.0.4"', "x", ".", "1.x"])
@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_any_version_that_is_asked_for_is_answered(alias, client, kind, version):
    """The header comes from outside: an error would be mailed to the admins with each request."""
    response = client.get("/outbox/metrics/", headers={"Accept": f"{kind}; version={version}"})
    assert response.status_code == 200
    assert b"outbox_up{" in response.content
