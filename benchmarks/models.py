"""The tables of the benchmarks: a log that can be read by time, and the deliveries to its readers.

A page delivered to a reader is one row, written in the transaction that moves the reader's cursor:
so the table has only the pages that took effect, without failed attempts.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import models

from outbox_app.entities import Entity, EntityVersion, command
from outbox_app.events.models import EventLog

#: Seconds of CPU time that ``Hot.work`` takes.
WORK = 0.0002


class TimedEvent(EventLog):
    """A log with the index that reading by time needs. All contestants read it in the same run."""

    class Meta(EventLog.Meta):
        abstract = False
        db_table = "benchmark_event"
        indexes = [*EventLog.Meta.indexes, models.Index(fields=["recorded_at", "id"])]


class Delivery(models.Model):
    """A page: its positions in the order of delivery, eight bytes each."""

    id = models.BigAutoField(primary_key=True)
    reader = models.CharField(max_length=80)
    #: Seconds since 1970, by the clock with which the writers note their commits.
    at = models.FloatField()
    positions = models.BinaryField()

    class Meta:
        db_table = "benchmark_delivery"

    def __str__(self) -> str:
        return f"{self.reader} at {self.at}"


class Place(models.Model):
    """The position of a reader that is not outbox_app's."""

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
    """The commands to hot entities, and their answers."""

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
        """Use CPU time, for ``routing``."""
        end = time.perf_counter() + WORK
        while time.perf_counter() < end:
            pass
        self.state["count"] += 1
        return self.state["count"]


class HotterVersion(EntityVersion):
    """As ``HotVersion``, with only the last state of each transaction."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "benchmark_hotter_version"


class Hotter(Entity):
    """As ``Hot``, with a handler for batches of commands."""

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
    """The row that the contestant by hand locks; ``RowCommand`` has the ids of its commands."""

    id = models.CharField(max_length=255, primary_key=True)
    state = models.JSONField()

    class Meta:
        db_table = "benchmark_row"

    def __str__(self) -> str:
        return self.pk


class RowCommand(models.Model):
    """A command that the contestant by hand has answered."""

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
