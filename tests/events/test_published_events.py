"""Events published per minute, from the growth of positions, which readers sample."""

from __future__ import annotations

import pytest
from django.db import transaction

from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events import series as events_series
from outbox_app.events.models import Event
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.models import Statistic
from outbox_app.monitoring import series

from ..process.counters.planted import NOW, plant

LOG = ("log", "outbox_event")


@pytest.mark.django_db(transaction=True)
def test_a_reader_samples_the_newest_position(alias):
    subscriber("sampled")(lambda events: None)
    with transaction.atomic(using=alias):
        publish_many(NewEvent(f"s{n}", "made") for n in range(7))
    newest = Event.objects.using(alias).order_by("-id").values_list("id", flat=True)[0]
    assert not Statistic.objects.using(alias).exists(), "publishing writes no figure"

    Runner([subscriber_named("sampled")]).run(once=True)

    samples = Statistic.objects.using(alias).filter(name="newest_position", dimension="log")
    assert set(samples.values_list("label", "value")) == {("outbox_event", newest)}


@pytest.mark.django_db(transaction=True)
def test_a_minute_is_sampled_once(alias, settings):
    subscriber("sampled")(lambda events: None)
    runner = Runner([subscriber_named("sampled")], lease_seconds=600)
    runner.run_once()
    [worker] = runner.workers
    worker._sampled = minute = worker.counters.of(worker.holder).begins
    with transaction.atomic(using=alias):
        publish_many([NewEvent("s", "made")])
    before = dict(worker.counters.of(worker.holder).values)
    worker._sample_if_due()
    if worker.counters.of(worker.holder).begins == minute:  # or another one has just begun
        assert worker.counters.of(worker.holder).values == before
    worker.leave()


@pytest.fixture
def at_noon(monkeypatch):
    monkeypatch.setattr(series, "_now", lambda using: NOW)


@pytest.mark.usefixtures("at_noon")
class TestByTheMinute:
    def test_growth_is_between_two_samples_of_a_log(self, alias):
        for ago, position in ((5, 100.0), (4, 110.0), (2, 140.0), (1, 141.0)):
            plant(alias, (ago, "newest_position", position, "one", *LOG))
        plant(alias, (4, "newest_position", 105.0, "slower", *LOG))
        plant(alias, (2, "newest_position", 9.0, "one", "log", "shop_ledger"))

        found = events_series.published(using=alias, minutes=6)

        assert found["outbox_event"] == [10.0, 15.0, 15.0, 1.0, None, None]
        assert found["shop_ledger"] == [None] * 6

    def test_a_log_that_was_emptied_has_no_negative_figure(self, alias):
        for ago, position in ((3, 100.0), (2, 4.0), (1, 102.0)):
            plant(alias, (ago, "newest_position", position, "one", *LOG))
        assert events_series.published(using=alias, minutes=4)["outbox_event"] == [
            0.0,
            2.0,
            None,
            None,
        ]

    def test_nothing_is_known_without_samples(self, alias):
        assert events_series.published(using=alias) == {}
