"""Filters in the database find exactly the rows that Spark's own filters find."""

from __future__ import annotations

import operator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from outbox_app import NewEvent, publish_many
from outbox_app.models import Event
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.pushdown import condition
from outbox_app.pipeline.schema import arrow_types
from tests.eventlog.own_log.models import Visit

pytestmark = pytest.mark.django_db(transaction=True)

TEXTS = ["a", "A", "a ", "ä", "100%", "it's", 'say "x"', "back\\slash", "日本語", "🚀", "%s", "\\'"]
OPERATORS = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


@pytest.fixture
def database(alias, source_options):
    with closing(connect(Options.of(source_options(alias)))) as database:
        yield database


def found(database, sql, log="outbox_event"):
    batches = database.batches(f"SELECT id FROM {log} WHERE {sql}", arrow_types("id bigint"))
    return {id for batch in batches for id in batch.column("id").to_pylist()}


@pytest.mark.parametrize("log", [Event, Visit])
def test_texts(alias, database, log):
    with transaction.atomic(using=alias):
        publish_many((NewEvent(text, text, topic=text) for text in TEXTS), log=log, using=alias)
    rows = list(log.objects.using(alias))
    table = log._meta.db_table
    for name in ("topic", "stream", "type"):
        for text in TEXTS:
            sql = condition(EqualTo((name,), text), database)
            assert found(database, sql, table) == {r.pk for r in rows if getattr(r, name) == text}
        sql = condition(In((name,), tuple(TEXTS[:7])), database)
        wanted = {r.pk for r in rows if getattr(r, name) in TEXTS[:7]}
        assert found(database, sql, table) == wanted


def test_numbers_and_times(alias, database):
    for n in range(5):
        with transaction.atomic(using=alias):
            publish_many([NewEvent(f"s{n}", "made")] * (n + 1), using=alias)
    first = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for n, event in enumerate(Event.objects.using(alias)):
        at = first + timedelta(microseconds=n * 60_000)
        Event.objects.using(alias).filter(pk=event.pk).update(recorded_at=at)
    rows = list(Event.objects.using(alias))
    names = ["id", "txid", "version", "slice", "recorded_at"]
    pushed = 0
    for name in names:
        for value in {getattr(row, name) for row in rows}:
            for kind, compare in OPERATORS.items():
                sql = condition(kind((name,), value), database)
                if sql is None:
                    assert (alias, name) == ("default", "recorded_at")
                    continue
                pushed += 1
                wanted = {row.pk for row in rows if compare(getattr(row, name), value)}
                assert found(database, sql) == wanted, sql
    assert pushed > 50


def test_what_is_left_to_spark(alias, database):
    left = [
        StringStartsWith(("type",), "a"),
        Not(EqualTo(("type",), "a")),
        IsNotNull(("type",)),
        EqualNullSafe(("type",), "a"),
        GreaterThan(("type",), "a"),
        EqualTo(("data",), "{}"),
        EqualTo(("message_id",), "x"),
        EqualTo(("type",), None),
        EqualTo(("type",), "a\0b"),
        EqualTo(("type", "x"), "a"),
        EqualTo(("id",), "1"),
        EqualTo(("id",), True),
        In(("id",), ()),
        In(("id",), (1, None)),
        EqualTo(("recorded_at",), datetime(2026, 1, 1)),
    ]
    assert [each for each in left if condition(each, database)] == []


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_local_times_are_left_to_spark(alias, source_options):
    """An hour a year is there twice."""
    options = Options.of(source_options(alias, time_zone="Europe/Berlin"))
    with closing(connect(options)) as database:
        assert condition(EqualTo(("recorded_at",), datetime.now(UTC)), database) is None
        assert condition(EqualTo(("id",), 5), database) == "id = 5"
