"""The list of figures: read-only, in the order of its index, and bounded."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox_app.models import Statistic, counting

MINUTE = datetime(2026, 11, 20, 16, 5, tzinfo=UTC)
LIST = reverse("admin:outbox_app_statistic_changelist")

pytestmark = pytest.mark.django_db(databases="__all__")


def figure(label, *, minute=0, name="handled", source="one"):
    moment = MINUTE + timedelta(minutes=minute)
    return Statistic(
        source=source, minute=moment, name=name, dimension="subscription", label=label, value=1.0
    )


@pytest.fixture
def write(alias):
    """``write(figure, …)``: write figures, one after the other."""

    def make(*figures):
        for each in figures:
            each.save(using=alias)

    return make


def client_of(*permissions):
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label__startswith="outbox", codename__in=permissions
        )
    )
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def client():
    return client_of("view_statistic")


def labels(response):
    assert response.status_code == 200
    return re.findall(r'field-short_label">([^<]*)<', response.content.decode())


def test_only_the_permission_to_view_exists():
    found = Permission.objects.filter(
        content_type__app_label__startswith="outbox", content_type__model="statistic"
    )
    assert [each.codename for each in found] == ["view_statistic"]


def test_it_is_for_those_who_may_view(client):
    assert client.get(LIST).status_code == 200
    User.objects.all().delete()
    assert client_of().get(LIST).status_code == 403
    assert Client().get(LIST).status_code == 302


def test_nobody_writes(alias, client, write):
    write(figure("a"))
    [row] = Statistic.objects.using(alias).values()
    for name, args in (("add", []), ("change", [row["id"]]), ("delete", [row["id"]])):
        url = reverse(f"admin:outbox_app_statistic_{name}", args=args)
        assert client.post(url, {"value": "7", "post": "yes"}).status_code == 403
    assert [*Statistic.objects.using(alias).values()] == [row]


def test_filters(client, write):
    write(figure("one"), figure("two", name="failed"), figure("three", source="other", minute=1))
    assert labels(client.get(LIST)) == ["three", "two", "one"]
    assert labels(client.get(LIST, {"name": "handled"})) == ["three", "one"]
    assert labels(client.get(LIST, {"source": "one"})) == ["two", "one"]
    assert labels(client.get(LIST, {"name": "handled", "source": "one"})) == ["one"]
    assert labels(client.get(LIST, {"name": "nothing"})) == []


def test_names_that_are_there_are_offered(client, write):
    write(figure("a"), figure("b", name="of_another_kind"))
    page = client.get(LIST).content.decode()
    assert all(f"?name={name}" in page for name in ("handled", "of_another_kind"))


def test_the_newest_minute_of_a_name_comes_first(client, write):
    write(figure("new", minute=2), figure("old"), figure("newer", minute=5))
    assert labels(client.get(LIST, {"name": "handled"})) == ["newer", "new", "old"]


def test_labels_are_harmless(client, write):
    write(figure("<script>\x1b[2J\u202e"))
    assert labels(client.get(LIST)) == [r"&lt;script&gt;\x1b[2J\u202e"]


@pytest.mark.parametrize("query", [{}, {"name": "handled"}, {"source": "one"}])
def test_nothing_is_counted_or_sorted_without_a_bound(alias, client, write, query, monkeypatch):
    def statements():
        with CaptureQueriesContext(connections[alias]) as queries:
            assert client.get(LIST, query).status_code == 200
        return [q["sql"] for q in queries if "outbox_statistic" in q["sql"]]

    write(figure("a"))
    before = statements()
    Statistic.objects.using(alias).bulk_create(figure(str(n)) for n in range(150))
    after = statements()
    assert len(after) == len(before) <= 5
    assert all("LIMIT" in sql for sql in after)
    monkeypatch.setattr(counting, "MANY", 120)
    cut = "more than 120" if "name" in query else "Looked through the newest 120 rows"
    assert cut in " ".join(client.get(LIST, query).content.decode().split())


# ANALYZE ends MariaDB's transaction: the rows would stay for the next test.
@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_name_is_read_by_the_index(alias, client):
    """Since a minute; and the newest ones, which need not be sorted for the list."""
    Statistic.objects.using(alias).bulk_create(
        figure("", minute=n, name=name)
        for name in ("dead", "failed", "handled", "published")
        for n in range(2000)
    )
    table = "outbox_statistic"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {table}" if alias == "postgres" else f"ANALYZE TABLE {table}")
    since = Statistic.objects.using(alias).filter(
        name="failed", minute__gte=MINUTE + timedelta(minutes=1990)
    )
    assert "outbox_statistic_figure" in since.explain()
    with CaptureQueriesContext(connections[alias]) as queries:
        client.get(LIST, {"name": "failed"})
    of_name = [q["sql"] for q in queries if "ORDER BY" in q["sql"] and "failed" in q["sql"]]
    [listed] = [sql for sql in of_name if "written_at" in sql]
    with connections[alias].cursor() as cursor:
        cursor.execute(f"EXPLAIN {listed}")
        plan = str(cursor.fetchall())
    assert "outbox_statistic_figure" in plan
    assert "Sort" not in plan
    assert "filesort" not in plan


@pytest.mark.parametrize(("value", "shown"), [(24.0, "24"), (40.94, "40.94"), (1e6, "1000000")])
def test_counts_are_whole(client, write, value, shown):
    row = figure("a")
    row.value = value
    write(row)
    for address in (LIST, f"{LIST}{row.pk}/change/"):
        found = re.findall(
            r'(?:field-figure"|readonly")>([^<]*)<', client.get(address).content.decode()
        )
        assert shown in found
