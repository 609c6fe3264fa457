"""The findings of ``manage.py check`` about subscriptions that read by time."""

from __future__ import annotations

from django.db import models
from django.test.utils import isolate_apps

from outbox_app import subscriber
from outbox_app.checks.logs import check_time_readers
from outbox_app.models import Event, EventLog
from outbox_app.subscriptions.subscriber import Subscriber


def found(monkeypatch, log=None, **options):
    if log is not None:
        monkeypatch.setattr(Subscriber, "logs", property(lambda self: [log]))
    subscriber("timed", by_time=True, on_gap="park", **options)(lambda events: None)
    return [(message.id, message.obj) for message in check_time_readers()]


def test_others_are_not_looked_at():
    subscriber("windowed", on_gap="park")(lambda events: None)
    assert list(check_time_readers()) == []


def test_a_log_without_an_index(monkeypatch):
    assert found(monkeypatch) == [("outbox.W013", Event)]
    [message] = check_time_readers()
    assert 'models.Index(fields=["recorded_at", "id"])' in message.hint


@isolate_apps("tests")
def test_a_log_with_an_index(monkeypatch):
    class Imported(EventLog):
        class Meta(EventLog.Meta):
            app_label = "tests"
            indexes = [models.Index(fields=["recorded_at", "id", "topic"])]

    assert found(monkeypatch, Imported) == []


@isolate_apps("tests")
def test_a_log_with_another_index(monkeypatch):
    class Imported(EventLog):
        class Meta(EventLog.Meta):
            app_label = "tests"
            indexes = [models.Index(fields=["recorded_at", "topic"])]

    assert found(monkeypatch, Imported) == [("outbox.W013", Imported)]


def test_an_alias_that_does_not_exist(monkeypatch):
    ids = [id for id, _ in found(monkeypatch, read_from="nowhere")]
    assert ids == ["outbox.W014", "outbox.W013"]
    assert "nowhere" in next(check_time_readers()).msg


def test_an_unknown_log_is_said_elsewhere(monkeypatch):
    assert found(monkeypatch, logs=["shop.Nothing"]) == []
