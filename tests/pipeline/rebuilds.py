"""What the tests of rebuilds on Spark share: a workload, views and their rows, and fixtures."""

from __future__ import annotations

from random import Random

import pytest
from django.db import connections, transaction

from outbox_app import failpoints
from outbox_app.events import NewEvent, publish_many
from outbox_app.events.models import Event
from outbox_app.events.projections.rebuild import rebuild
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.pipeline.driver.pipeline import log_options
from outbox_app.pipeline.driver.rebuild import rebuild_on_spark
from tests.events.projections.models import Sold, Status
from tests.pipeline.local_context import LocalContext

MODELS = {"spark_sold": Sold, "spark_status": Status}


@pytest.fixture(autouse=True)
def failpoints_end_with_the_test():
    yield
    failpoints._actions.clear()


@pytest.fixture(params=sorted(MODELS))
def name(request, alias):
    """The projection under test, declared."""
    projection(request.param)
    return request.param


def projection(name):
    """Declare a projection. Imported no sooner: whatever is declared ends with the test."""
    from tests.pipeline.rebuilt import declared

    declared(name)


@pytest.fixture
def options(alias, monkeypatch):
    """The log, which even so small is read in parts."""
    monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 7)
    password = connections[alias].settings_dict.get("PASSWORD") or ""
    return log_options(Event, using=alias, password=password, partitions="4")


@pytest.fixture
def spark_rebuilds(alias, options, request):
    """``spark_rebuilds(name, …)``: by Spark, or by what stands for it. Returns the lines."""

    def make(name, *, session=None, **given):
        lines = []
        session = session or LocalContext()
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
            topics = random.sample(["shop", "bob's % \\ shop", "other", "Shop"], 2)
            publish_many(event(topic) for topic in topics for _ in range(3))
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
