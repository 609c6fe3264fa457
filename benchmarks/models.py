"""The tables of the benchmarks: a log that can be read by time, and what its readers were given.

A page that a reader was given is one row, written in the transaction that moves its cursor: what is
in the table is what took effect, whatever was tried again.
"""

from __future__ import annotations

from django.db import models

from outbox_app.models import EventLog


class TimedEvent(EventLog):
    """A log with the index that reading by time needs. All contestants read it in the same run."""

    class Meta(EventLog.Meta):
        abstract = False
        db_table = "benchmark_event"
        indexes = [*EventLog.Meta.indexes, models.Index(fields=["recorded_at", "id"])]


class Delivery(models.Model):
    """A page: positions in the order in which they were delivered, eight bytes each."""

    id = models.BigAutoField(primary_key=True)
    reader = models.CharField(max_length=80)
    #: Seconds since 1970, by the clock that the writers note their commits with.
    at = models.FloatField()
    positions = models.BinaryField()

    class Meta:
        db_table = "benchmark_delivery"

    def __str__(self) -> str:
        return f"{self.reader} at {self.at}"


class Place(models.Model):
    """Where a reader stands that is not the product's."""

    id = models.BigAutoField(primary_key=True)
    reader = models.CharField(max_length=80)
    position = models.BigIntegerField(default=0)
    at = models.CharField(max_length=40, default="")

    class Meta:
        db_table = "benchmark_place"

    def __str__(self) -> str:
        return f"{self.reader} at {self.at}, {self.position}"


class Stock(models.Model):
    """A view with a row for each stream."""

    stream = models.CharField(max_length=255, primary_key=True)
    events = models.IntegerField(default=0)
    last = models.BigIntegerField(default=0)

    class Meta:
        db_table = "benchmark_stock"

    def __str__(self) -> str:
        return f"{self.stream}: {self.events}"
