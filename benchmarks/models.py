"""The tables of the benchmarks: a log that can be read by time, and what its readers were given.

A page that a reader was given is one row, written in the transaction that moves its cursor: what is
in the table is what took effect, whatever was tried again.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import models

from outbox_app.entities import Entity, EntityVersion, command
from outbox_app.models import EventLog

#: Seconds of the processor that ``Hot.work`` takes.
WORK = 0.0002


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


class HotVersion(EntityVersion):
    """What hot entities were asked and answered."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "benchmark_hot_version"


class Hot(Entity):
    """A counter with a state of about 200 bytes."""

    versions = HotVersion

    class Meta:
        db_table = "benchmark_hot"

    @command(creates=True)
    def open(self) -> None:
        self.state = {"count": 0, "text": "x" * 180}

    @command()
    def add(self, amount: int) -> Any:
        self.state["count"] += amount
        return self.state["count"]

    @command()
    def work(self) -> Any:
        """Take a while, and nothing else: its callers count for ``routing``."""
        end = time.perf_counter() + WORK
        while time.perf_counter() < end:
            pass
        self.state["count"] += 1
        return self.state["count"]


class HotterVersion(EntityVersion):
    """As ``HotVersion``, with the last state of each transaction only."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "benchmark_hotter_version"


class Hotter(Entity):
    """The same with a handler of batches."""

    versions = HotterVersion
    states = "last"

    class Meta:
        db_table = "benchmark_hotter"

    @command(creates=True)
    def open(self) -> None:
        self.state = {"count": 0, "text": "x" * 180}

    @command(batch=True)
    def add(self, requests: list[Any]) -> Any:
        answers = []
        for request in requests:
            self.state["count"] += request["amount"]
            answers.append(self.state["count"])
        return answers


class Row(models.Model):
    """The contestant's: a row that is locked, and a table of command ids."""

    id = models.CharField(max_length=255, primary_key=True)
    state = models.JSONField()

    class Meta:
        db_table = "benchmark_row"

    def __str__(self) -> str:
        return self.pk


class RowCommand(models.Model):
    """A command that was answered, in the contestant's way."""

    row = models.CharField(max_length=255)
    command_id = models.CharField(max_length=255)
    request = models.JSONField()
    response = models.JSONField()

    class Meta:
        db_table = "benchmark_row_command"
        constraints = (
            models.UniqueConstraint(fields=["row", "command_id"], name="benchmark_row_answered"),
        )

    def __str__(self) -> str:
        return f"{self.command_id} of {self.row}"
