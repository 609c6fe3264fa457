"""A view whose rows Spark has made is what ``outbox_rebuild`` makes, and no event is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from random import Random

import pytest
from django.core.management import CommandError
from django.db import connections, transaction

from outbox_app import NewEvent, publish_many, subscriber
from outbox_app.delivery.runner import Runner
from outbox_app.delivery.subscriber import subscriber_named
from outbox_app.failpoints import set_failpoint
from outbox_app.models import Cursor, Event
from outbox_app.operations import spark_rebuild
from outbox_app.operations.pipeline import log_options
from outbox_app.operations.rebuild import rebuild
from outbox_app.operations.spark_rebuild import rebuild_on_spark
from outbox_app.pipeline.archive import Archiver
from tests.faults.tools import ROOT, eventually, on
from tests.own_log.models import Ledger
from tests.pipeline.rebuilt import Here
from tests.projections.models import Sold, Status

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]

MODELS = {"spark_sold": Sold, "spark_status": Status}


@pytest.fixture(autouse=True)
def failpoints_end_with_the_test():
    from outbox_app import failpoints

    yield
    failpoints._actions.clear()


@pytest.fixture(params=sorted(MODELS))
def name(request, alias):
    """The projection under test, declared."""
    from tests.pipeline.rebuilt import declared

    declared(request.param)
    return request.param


@pytest.fixture
def options(alias):
    password = connections[alias].settings_dict.get("PASSWORD") or ""
    return log_options(Event, using=alias, password=password)


@pytest.fixture
def spark_rebuilds(alias, options, request):
    """``spark_rebuilds(name, …)``: by Spark, or by what stands for it. Returns the lines."""

    def make(name, *, session=None, **given):
        lines = []
        session = session or Here()
        make.result = rebuild_on_spark(session, options, name, write=lines.append, **given)
        return lines

    return make


def work(alias, count, *, seed=0, streams=8):
    """Publish so many transactions of all kinds of events; every fifth is rolled back."""
    random = Random(seed)

    def event(topic):
        return NewEvent(
            f"{len(topic)}-{topic[0].islower()}-{random.randrange(streams)}",
            random.choice(["made", "made", "gone", "xé", "other", "Made"]),
            {"article": random.randrange(12), "count": random.choice([1, 2, -1])},
            topic=topic,
        )

    for n in range(count):
        with transaction.atomic(using=alias):
            for topic in random.sample(["shop", "bob's % \\ shop", "other", "Shop"], 2):
                publish_many(event(topic) for _ in range(3))
            if n % 5 == 4:
                transaction.set_rollback(True, using=alias)


def run(name, **options):
    """Run the subscription until nothing is left."""
    return Runner([subscriber_named(name)], **options).run(once=True)


def rows(alias, name):
    return list(MODELS[name].objects.using(alias).order_by("pk").values())


def rebuilt(alias, name):
    """Return the rows that outbox_rebuild makes."""
    rebuild(name)
    return rows(alias, name)


def damage(alias, name):
    model = MODELS[name]
    rows = model.objects.using(alias)
    first = rows.order_by("pk").first()
    rows.filter(pk=first.pk).delete()
    if model is Sold:
        rows.update(count=77)
        rows.create(article=999, count=1)
    else:
        rows.update(path="wrong")
        rows.create(stream="nobody", status="made")


def tables_left(alias):
    names = connections[alias].introspection.table_names()
    return [name for name in names if "__rebuild_" in name]


def test_spark_makes_the_rows_of_outbox_rebuild(alias, name, spark, spark_rebuilds):
    work(alias, 30)
    run(name)
    expected = rebuilt(alias, name)
    assert len(expected) > 5
    damage(alias, name)
    lines = spark_rebuilds(name, session=spark)
    assert rows(alias, name) == expected
    assert spark_rebuilds.result == len(expected)
    assert lines[0].startswith(f"rebuild started name={name} table=projections_")
    assert lines[-1].endswith(f"rows={len(expected)}")
    assert tables_left(alias) == []
    assert run(name) == 0
    work(alias, 5, seed=1)
    assert run(name)
    assert rows(alias, name) == rebuilt(alias, name)
