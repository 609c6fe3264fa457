"""The table of statistics: replaced as a whole, the same everywhere, and shown in the admin."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.db import IntegrityError, connections, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox_app.models import Statistic, counting
from outbox_app.models.statistic import BATCH, LABEL_LENGTH, label_of
from outbox_app.pipeline.driver.run import store
from outbox_app.pipeline.statistic_names import COLUMNS, NAMES

LOG = "outbox_event"
MINUTE = datetime(2026, 11, 20, 16, 5, tzinfo=UTC)
LIST = reverse("admin:outbox_app_statistic_changelist")


def row(label="", value=1.0, *, minute=0, name="events", dimension="type", source=LOG):
    return source, MINUTE + timedelta(minutes=minute), name, dimension, label, value


def stored(alias, **where):
    return {*Statistic.objects.using(alias).filter(**where).values_list(*COLUMNS)}


class TestStore:
    def test_rows_are_stored(self, alias):
        rows = [row("a"), row("b", 0.25), row("a", minute=1), row(name="stream_share")]
        store(iter(rows), log=LOG)
        assert stored(alias) == {*rows}
        assert all(Statistic.objects.using(alias).values_list("written_at", flat=True))

    def test_a_second_run_replaces_the_first(self, alias):
        store([row("a"), row("gone"), row("gone", name="handled_events")], log=LOG)
        store([row("a", 2.0), row("new")], log=LOG)
        assert stored(alias) == {row("a", 2.0), row("new")}

    def test_nothing_replaces_them_too(self, alias):
        store([row("a")], log=LOG)
        store([], log=LOG)
        assert stored(alias) == set()

    def test_others_keep_theirs(self, alias):
        others = {row(source="shop_log"), row(name="published"), row(source="jobs", name="events")}
        Statistic.objects.using(alias).bulk_create(
            Statistic(**dict(zip(COLUMNS, each, strict=True))) for each in others
        )
        store([row("a")], log=LOG)
        assert stored(alias) == {*others, row("a")}

    def test_a_run_that_fails_changes_nothing(self, alias):
        def rows():
            yield from (row(str(n)) for n in range(BATCH + 1))
            raise ZeroDivisionError

        store([row("a")], log=LOG)
        with pytest.raises(ZeroDivisionError):
            store(rows(), log=LOG)
        assert stored(alias) == {row("a")}

    def test_everything_is_computed_before_the_transaction_begins(self, alias):
        statements = []

        def note(run, sql, *args):
            statements.append(sql)
            return run(sql, *args)

        def rows():
            assert statements == []
            yield row("a")

        with connections[alias].execute_wrapper(note):
            store(rows(), log=LOG)
        assert statements

    def test_rows_of_several_statements(self, alias):
        store([row(str(n)) for n in range(3 * BATCH + 7)], log=LOG)
        assert Statistic.objects.using(alias).filter(source=LOG).count() == 3 * BATCH + 7

    def test_what_another_run_wrote_meanwhile_is_updated(self, alias):
        def note(run, sql, *args):
            done = run(sql, *args)
            if sql.startswith("DELETE"):
                Statistic.objects.using(alias).create(
                    **dict(zip(COLUMNS, row("a", 1.0), strict=True))
                )
            return done

        with connections[alias].execute_wrapper(note):
            store([row("a", 2.0), row("b")], log=LOG)
        assert stored(alias) == {row("a", 2.0), row("b")}

    def test_labels_are_compared_byte_by_byte(self, alias):
        labels = ["a", "A", "a ", "ä", "a\u0308", "😀", "", "a" * 299, "😀" * 255]
        rows = [row(label) for label in labels]
        store(rows, log=LOG)
        assert stored(alias) == {*rows}

    def test_long_labels_are_cut_and_stay_different(self, alias):
        rows = [row("😀" * 400 + end) for end in "ab"]
        store(rows, log=LOG)
        labels = [*Statistic.objects.using(alias).values_list("label", flat=True)]
        assert len({*labels}) == 2
        assert all(label.startswith("😀" * 200) for label in labels)

    def test_spark_gives_the_rows(self, alias, spark):
        from outbox_app.pipeline.statistics import TABLE_MINUTES, for_table, rows_of

        rows = [
            row("a", minute=-TABLE_MINUTES),
            row("a"),
            row(name="stream_share", dimension="stream"),
        ]
        frame = spark.createDataFrame(
            rows,
            "source string, minute timestamp, name string, dimension string, label string, "
            "value double",
        )
        store(rows_of(for_table(frame)), log=LOG)
        assert stored(alias) == {*rows[1:]}


class TestLabels:
    def test_shorter_ones_stay(self):
        for text in ("", "a", "a" * (LABEL_LENGTH - 1)):
            assert label_of(text) == text

    def test_a_cut_one_is_nobody_elses(self):
        """A text that looks like a cut label is cut itself."""
        cut = label_of("a" * 1000)
        assert len(cut) == LABEL_LENGTH
        assert label_of(cut) != cut
        assert len({label_of("a" * length) for length in range(290, 400)}) == 110


class TestTable:
    def test_a_figure_is_there_once(self, alias):
        fields = dict(zip(COLUMNS, row("a"), strict=True))
        Statistic.objects.using(alias).create(**fields)
        with pytest.raises(IntegrityError), transaction.atomic(using=alias):
            Statistic.objects.using(alias).create(**fields | {"value": 2})

    def test_names_and_dimensions_fit(self):
        limits = {f.name: f.max_length for f in Statistic._meta.fields}
        assert max(map(len, NAMES)) <= limits["name"]
        assert max(map(len, ("", "type", "topic", "stream", "partitions"))) <= limits["dimension"]


@pytest.mark.django_db(databases="__all__")
class TestAdmin:
    @pytest.fixture
    def client(self):
        return self.client_of("view_statistic")

    def client_of(self, *permissions):
        user = User.objects.create_user("viewer", is_staff=True)
        user.user_permissions.set(
            Permission.objects.filter(
                content_type__app_label__startswith="outbox", codename__in=permissions
            )
        )
        client = Client()
        client.force_login(user)
        return client

    def labels(self, response):
        assert response.status_code == 200
        return re.findall(r'field-short_label">([^<]*)<', response.content.decode())

    def test_only_the_permission_to_view_exists(self):
        found = Permission.objects.filter(
            content_type__app_label__startswith="outbox", content_type__model="statistic"
        )
        assert [each.codename for each in found] == ["view_statistic"]

    def test_it_is_for_those_who_may_view(self, client):
        assert client.get(LIST).status_code == 200
        User.objects.all().delete()
        assert self.client_of().get(LIST).status_code == 403
        assert Client().get(LIST).status_code == 302

    def test_nobody_writes(self, alias, client):
        store([row("a")], log=LOG)
        [pk] = Statistic.objects.using(alias).values_list("pk", flat=True)
        for name, args in (("add", []), ("change", [pk]), ("delete", [pk])):
            url = reverse(f"admin:outbox_app_statistic_{name}", args=args)
            assert client.post(url, {"value": "7", "post": "yes"}).status_code == 403
        assert stored(alias) == {row("a")}

    def test_filters(self, alias, client):
        store([row("one"), row("two", name="stream_events")], log=LOG)
        store([row("three", source="shop_log", minute=1)], log="shop_log")
        assert self.labels(client.get(LIST)) == ["three", "two", "one"]
        assert self.labels(client.get(LIST, {"name": "events"})) == ["three", "one"]
        assert self.labels(client.get(LIST, {"source": LOG})) == ["two", "one"]
        assert self.labels(client.get(LIST, {"name": "events", "source": LOG})) == ["one"]
        assert self.labels(client.get(LIST, {"name": "nothing"})) == []

    def test_every_name_is_offered(self, alias, client):
        fields = dict(zip(COLUMNS, row("a", name="of_another_kind"), strict=True))
        Statistic.objects.using(alias).create(**fields)
        page = client.get(LIST).content.decode()
        assert all(f"?name={name}" in page for name in (*NAMES, "of_another_kind"))

    def test_the_newest_minute_of_a_name_comes_first(self, alias, client):
        store([row("new", minute=2), row("old"), row("newer", minute=5)], log=LOG)
        assert self.labels(client.get(LIST, {"name": "events"})) == ["newer", "new", "old"]

    def test_labels_are_harmless(self, alias, client):
        store([row("<script>\x1b[2J\u202e")], log=LOG)
        assert self.labels(client.get(LIST)) == [r"&lt;script&gt;\x1b[2J\u202e"]

    @pytest.mark.parametrize("query", [{}, {"name": "events"}, {"source": LOG}])
    def test_nothing_is_counted_or_sorted_without_a_bound(self, alias, client, query, monkeypatch):
        def statements():
            with CaptureQueriesContext(connections[alias]) as queries:
                assert client.get(LIST, query).status_code == 200
            return [q["sql"] for q in queries if "outbox_statistic" in q["sql"]]

        store([row("a")], log=LOG)
        before = statements()
        store([row(str(n)) for n in range(150)], log=LOG)
        after = statements()
        assert len(after) == len(before) <= 5
        assert all("LIMIT" in sql for sql in after)
        monkeypatch.setattr(counting, "MANY", 120)
        cut = "more than 120" if "name" in query else "Looked through the newest 120 rows"
        assert cut in " ".join(client.get(LIST, query).content.decode().split())

    # ANALYZE ends MariaDB's transaction: the rows would stay for the next test.
    @pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
    @pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
    def test_a_name_is_read_by_the_index(self, alias, client):
        """Since a minute; and the newest ones, which need not be sorted for the admin's list."""
        Statistic.objects.using(alias).bulk_create(
            Statistic(source=LOG, minute=MINUTE + timedelta(minutes=n), name=name, value=n)
            for name in NAMES[:4]
            for n in range(2000)
        )
        table = "outbox_statistic"
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ANALYZE {table}" if alias == "postgres" else f"ANALYZE TABLE {table}")
        since = Statistic.objects.using(alias).filter(
            name=NAMES[1], minute__gte=MINUTE + timedelta(minutes=1990)
        )
        assert "outbox_statistic_figure" in since.explain()
        with CaptureQueriesContext(connections[alias]) as queries:
            client.get(LIST, {"name": NAMES[1]})
        of_name = [q["sql"] for q in queries if "ORDER BY" in q["sql"] and NAMES[1] in q["sql"]]
        [listed] = [sql for sql in of_name if "written_at" in sql]
        with connections[alias].cursor() as cursor:
            cursor.execute(f"EXPLAIN {listed}")
            plan = str(cursor.fetchall())
        assert "outbox_statistic_figure" in plan
        assert "Sort" not in plan
        assert "filesort" not in plan
