"""Writing counters: each process writes its own rows whole, and retries until it succeeds."""

from __future__ import annotations

from datetime import timedelta

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import OperationalError, connections

from outbox_app.models import Statistic
from outbox_app.process import counters
from outbox_app.process.counters import Counters
from outbox_app.process.lease import LeaseHolder

from .planted import NOW, ago, plant, totals

pytestmark = pytest.mark.django_db(transaction=True)


class Time:
    """Seconds since NOW, moved by hand."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Time()


@pytest.fixture
def holder(alias, clock):
    """A holder whose database's clock says NOW."""
    made = LeaseHolder(using=alias, lease_seconds=10, clock=clock)
    made._same_moment = NOW, 0.0
    return made


@pytest.fixture
def written(alias, clock):
    return Counters(using=alias, clock=clock)


def test_figures_are_those_of_their_minute_so_far(alias, written, holder, clock):
    for seconds, count in [(0, 5), (20, 2), (29, 1), (31, 10), (45, 3)]:
        clock.seconds = seconds
        written.of(holder).add("published", count)
        written.write()
    rows = Statistic.objects.using(alias).order_by("minute")
    assert [(row.minute, row.value) for row in rows] == [(ago(0), 8), (ago(-1), 13)]
    assert {(row.source, row.dimension, row.label) for row in rows} == {(str(holder.id), "", "")}
    assert abs(rows[0].written_at - rows[1].written_at) < timedelta(minutes=1)


def test_without_the_databases_time_there_is_no_minute(alias, written):
    assert written.of(LeaseHolder(using=alias, lease_seconds=10)) is None


def test_it_is_due_every_ten_seconds(alias, written, holder, clock):
    for seconds, expected in [(0, {}), (9.9, {}), (10, {"dead": 3}), (19, {"dead": 3})]:
        clock.seconds = seconds
        written.of(holder).add("dead", 1)
        written.write_if_due()
        assert totals(alias) == expected
    clock.seconds = 20
    written.write_if_due()
    assert totals(alias) == {"dead": 4}


def test_a_write_of_which_the_outcome_is_unknown_is_repeated(alias, written, holder, monkeypatch):
    connection = connections[alias]
    commit, lost = connection._commit, []

    def commit_and_lose():
        commit()
        if not lost:
            lost.append(True)
            raise OperationalError("The answer was lost.")

    monkeypatch.setattr(connection, "_commit", commit_and_lose)
    minute = written.of(holder)
    minute.add("published", 5)
    minute.add("delay", 5, dimension="le", label="0.1")
    written.write()
    assert lost
    assert totals(alias) == {"published": 5, "delay 0.1": 5}  # nobody knows
    minute.add("published", 2)
    written.write()
    assert totals(alias) == {"published": 7, "delay 0.1": 5}
    assert Statistic.objects.using(alias).count() == 2


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_it_waits_for_nobody_for_long(alias, written, holder):
    other = connections.create_connection(alias)
    minute = connections[alias].ops.adapt_datetimefield_value(ago(0))
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_statistic (source, minute, name, dimension, label, value) "
                "VALUES (%s, %s, 'published', '', '', 1)",
                [str(holder.id), minute],
            )
        written.of(holder).add("published", 5)
        written.write()  # a lock is waited for as long as the database does by itself: for ever
        assert totals(alias) == {}
        other.rollback()
        written.write()
        assert totals(alias) == {"published": 5}
    finally:
        other.close()


def test_a_clock_that_is_put_back_goes_on_with_the_figures_that_are_there(
    alias, written, holder, clock
):
    written.of(holder).add("published", 5)
    clock.seconds = 120
    written.of(holder).add("published", 1)
    written.write()
    clock.seconds = 0
    written.of(holder).add("published", 2)
    written.write()
    rows = Statistic.objects.using(alias).order_by("minute")
    assert [row.value for row in rows] == [7, 1]


def test_memory_is_bounded_while_the_database_is_away(alias, written, holder, clock):
    def refuse(execute, sql, *args):
        raise OperationalError("refused on purpose")

    with connections[alias].execute_wrapper(refuse):
        for minute in range(counters.KEPT + 30):
            clock.seconds = minute * 60
            written.of(holder).add("published", 1)
            written.write()
    written.write()
    begun = Statistic.objects.using(alias).order_by("minute").values_list("minute", flat=True)
    assert list(begun) == [ago(-minute) for minute in range(30, counters.KEPT + 30)]


def test_a_process_with_many_sources_loses_no_figure(alias, written, clock):
    """A runner of many subscriptions has a source for each."""
    sources = [LeaseHolder(using=alias, lease_seconds=10, clock=clock) for _ in range(150)]
    for minute in range(2):
        clock.seconds = minute * 60
        for _ in range(2):
            for each in sources:
                each._same_moment = NOW, 0.0
                written.of(each).add("handled", 1, dimension="subscription", label="a")
    written.write()
    rows = Statistic.objects.using(alias)
    assert rows.count() == 2 * len(sources)
    assert set(rows.values_list("value", flat=True)) == {2}


def test_a_long_label_is_cut(alias, written, holder):
    written.of(holder).add("handled", 1, dimension="subscription", label="x" * 900)
    written.write()
    assert len(Statistic.objects.using(alias).get().label) == 300


def test_rows_of_others_are_left_alone(alias, written, holder):
    plant(alias, (0, "published", 3, "another"))
    written.of(holder).add("published", 5)
    written.write()
    assert totals(alias) == {"published": 8}


def test_the_time_limit_of_a_task_ends_the_task(alias, monkeypatch):
    """It came while what the task has counted was written, as for a database that is slow."""

    def limited(*args, **options):
        raise SoftTimeLimitExceeded

    with counters.counting(NOW, using=alias) as minute:
        minute.add("published", 1)
    shared = counters._shared[counters._key(alias)]
    monkeypatch.setattr(shared, "_tried_at", float("-inf"))
    monkeypatch.setattr(counters, "write_figures", limited)
    with pytest.raises(SoftTimeLimitExceeded):
        counters.write_shared(alias)
    assert not shared.writing.locked()
    # A statement that was interrupted would let the next one fail.
    assert alias == "default" or connections[alias].connection is None
