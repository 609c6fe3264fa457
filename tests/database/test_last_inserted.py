"""MySQL: the ids of several rows of one INSERT, which does not return them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import stage_many
from outbox_app.events import NewEvent, publish_many
from outbox_app.events.models import Event
from outbox_app.models import StagedJob
from tests.faults.tools import on
from tests.mysql import explain, plan_of

pytestmark = [on("mysql"), pytest.mark.django_db(transaction=True)]
WRITERS = 16


def execute(alias, *statements):
    with connections[alias].cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def published(count, using):
    with transaction.atomic(using=using):
        return publish_many(
            [NewEvent(f"{random.random()}", "made") for _ in range(count)], using=using
        )


def assert_right(rows, using):
    """The ids are those of the rows, in their order."""
    stored = dict(Event.objects.using(using).values_list("message_id", "id"))
    assert [stored[row.message_id] for row in rows] == [row.pk for row in rows]
    assert [row.pk for row in rows] == sorted(row.pk for row in rows)


@contextmanager
def triggers(alias, columns="id int AUTO_INCREMENT PRIMARY KEY, event bigint"):
    """Triggers that write to a table with an AUTO_INCREMENT of its own, before and after a row."""
    execute(alias, f"CREATE TABLE seen ({columns})")
    insert = "FOR EACH ROW INSERT INTO seen (event) VALUES (NEW.id), (1), (2)"
    try:
        execute(
            alias,
            "INSERT INTO seen (event) SELECT 1 FROM information_schema.collations",
            f"CREATE TRIGGER seen_before BEFORE INSERT ON outbox_event {insert}",
            f"CREATE TRIGGER seen_after AFTER INSERT ON outbox_event {insert}",
        )
        yield
    finally:
        execute(
            alias,
            "DROP TRIGGER IF EXISTS seen_before",
            "DROP TRIGGER IF EXISTS seen_after",
            "DROP TABLE seen",
        )


def test_sixteen_writers_beside_inserts_of_an_unknown_number_of_rows(alias):
    """With sessions of other increments, and with ids that a caller chose."""
    names = "(topic, stream, version, type, data, metadata, slice, message_id)"
    values = "'', UUID(), 1, 'other', '{}', '{}', 0, REPLACE(UUID(), '-', '')"

    def write(writer):
        chance = random.Random(writer)
        try:
            if writer % 4 == 1:
                step = f"SET auto_increment_increment = {chance.choice([2, 7])}"
                execute(alias, step, "SET auto_increment_offset = 3")
            for _ in range(20):
                if writer % 4 == 3:
                    some = "(SELECT 1 FROM information_schema.collations LIMIT 37) AS some"
                    execute(alias, f"INSERT INTO outbox_event {names} SELECT {values} FROM {some}")
                    chosen = 10**6 + chance.randrange(10**9)
                    row = f"({chosen}, {values})"
                    execute(alias, f"INSERT INTO outbox_event (id, {names[1:]} VALUES {row}")
                else:
                    assert_right(published(chance.randrange(2, 60), alias), alias)
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, range(WRITERS)))


def test_triggers_and_upserts_and_increments(alias):
    with triggers(alias):
        assert_right(published(50, alias), alias)
        assert_right(published(1, alias), alias)
        for increment in (7, 1):
            execute(alias, f"SET auto_increment_increment = {increment}")
            assert_right(published(30, alias), alias)
        execute(alias, "INSERT INTO seen (id) VALUES (1) ON DUPLICATE KEY UPDATE id = id")
        assert_right(published(30, alias), alias)


def test_a_primary_key_that_is_made_where_there_is_none(alias):
    execute(alias, "SET sql_generate_invisible_primary_key = ON")
    with triggers(alias, "event bigint"):
        execute(alias, "SELECT my_row_id FROM seen LIMIT 1")
        assert_right(published(30, alias), alias)


def test_only_these_rows_are_read(alias):
    with CaptureQueriesContext(connections[alias]) as queries:
        published(30, alias)
    [sql] = [each["sql"] for each in queries if "LAST_INSERT_ID" in each["sql"]]
    published(300, alias)
    with connections[alias].cursor() as cursor:
        cursor.execute(explain(sql))
        [step] = plan_of(cursor)
    assert (step["type"], step["key"]) == ("range", "PRIMARY")
    assert step["rows"] <= 30


def test_more_jobs_than_one_insert_leave_immediately(alias, make_app, settings):
    settings.OUTBOX = {**settings.OUTBOX, "IMMEDIATE": True}
    app = make_app()

    @app.task(name="note")
    def note(n): ...

    with transaction.atomic(using=alias):
        stage_many([note.s(n) for n in range(40)], using=alias)
        assert StagedJob.objects.using(alias).count() == 40
    assert not StagedJob.objects.using(alias).exists()
