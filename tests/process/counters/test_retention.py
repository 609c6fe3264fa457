"""Counters are deleted when they have been kept for long enough, and no other rows."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.capability import all_doors
from outbox_app.models import Statistic
from outbox_app.monitoring import series
from outbox_app.process import counters
from outbox_app.process.counters import prune_if_worth_it

from .planted import NOW, ago, plant
from .test_samples import minute_of

pytestmark = pytest.mark.django_db(transaction=True)

DAYS = 24 * 60
#: The counters of all apps.
NAMES = [name for doors in all_doors() for name in doors.counters]


def left(alias):
    rows = Statistic.objects.using(alias).order_by("name", "-minute")
    return [(row.name, (ago(0) - row.minute).total_seconds() / 60) for row in rows]


def test_old_counters_go_and_names_of_nobody_stay(alias):
    plant(
        alias,
        *((9 * DAYS, name, 1.0) for name in ("events", "handled_events")),
        *((9 * DAYS, name, 1.0) for name in NAMES),
        *((2 * DAYS - 1, name, 1.0) for name in ("published", "ready")),
    )
    assert prune_if_worth_it(NOW, using=alias) == len(NAMES)
    assert left(alias) == [
        ("events", 9 * DAYS),
        ("handled_events", 9 * DAYS),
        ("published", 2 * DAYS - 1),
        ("ready", 2 * DAYS - 1),
    ]


def test_it_waits_until_an_hour_has_piled_up(alias):
    minutes = [2 * DAYS + more for more in (1, 30, 59)]
    plant(alias, *((m, n, 1.0) for m in minutes for n in ("dead", "ready")))
    with CaptureQueriesContext(connections[alias]) as statements:
        assert prune_if_worth_it(NOW, using=alias) == 0
    assert len(statements) == 1
    plant(alias, (2 * DAYS + 62, "ready", 1.0))
    assert prune_if_worth_it(NOW, using=alias) == 7
    assert left(alias) == []


def test_a_great_many_go_bit_by_bit(alias, monkeypatch):
    monkeypatch.setattr(counters, "PRUNE_BATCH", 5)
    monkeypatch.setattr(counters, "PRUNE_MOST", 12)
    plant(alias, *((3 * DAYS + m, n, 1.0) for m in range(12) for n in ("handled", "ready")))
    removed = []
    while count := prune_if_worth_it(NOW, using=alias):
        removed.append(count)
    assert sum(removed) == 24
    assert max(removed) <= 12 + 5
    assert left(alias) == []


def test_the_drainer_that_takes_samples_removes_them(alias, drainer):
    plant(alias, (3 * DAYS, "published", 1.0), (3 * DAYS, "ready", 1.0), (5, "dead", 1.0))
    drain = drainer()
    drain.holder.join()
    minute_of(drain, NOW.minute)
    drain._counters.keep()
    assert left(alias) == [("dead", 5)]


def test_others_remove_nothing(alias, drainer):
    plant(alias, (3 * DAYS, "published", 1.0), (3 * DAYS, "ready", 1.0))
    drain = drainer()
    drain.holder.join()
    drain.holder.owned -= {0}
    minute_of(drain, NOW.minute)
    drain._counters.keep()
    assert len(left(alias)) == 2


def prune(*arguments):
    output = StringIO()
    call_command("outbox_prune", *arguments, stdout=output)
    return output.getvalue()


def test_the_command_removes_them_too(alias, settings):
    now = series._now(alias)
    ages = [("dead", 47.9), ("dead", 48.2), ("published", 100), ("events", 100)]
    Statistic.objects.using(alias).bulk_create(
        Statistic(source="one", name=name, minute=now - timedelta(hours=age), value=age)
        for name, age in ages
    )
    rows = Statistic.objects.using(alias).order_by("value").values_list("name", "value")

    said = prune("--counters", "--batch-size", "1", "--dry-run")
    assert f"would prune counters rows=2 older_than=2d database={alias} " in said
    assert rows.count() == 4

    said = prune("--counters", "--batch-size", "1")
    assert f"pruned counters removed=2 older_than=2d database={alias} " in said
    assert list(rows.all()) == [("dead", 47.9), ("events", 100)]

    said = prune("--counters", "--older-than", "1")
    assert "pruned counters removed=1 older_than=1d" in said
    assert list(rows.all()) == [("events", 100)]
    with pytest.raises(CommandError, match="--older-than must be at least 1 day"):
        prune("--counters", "--older-than", "0")


def test_the_command_has_nothing_to_do_in_an_empty_table(alias):
    assert "pruned counters removed=0 " in prune("--counters")
