"""Projections that Spark rebuilds in tests, and a session that is none.

Executors are other processes, which have no projection that a test makes: they import this module.
As a program: ``python -m tests.pipeline.rebuilt NAME`` rebuilds one, in a process to be killed.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from outbox_app.delivery.projection import declare
from tests.projections.declared import SoldOf, StatusOf


class SparkSold(SoldOf):
    """Rows that many streams feed; some events are not asked for, and some rows go."""

    name = "spark_sold"
    topics = ("shop", "bob's % \\ shop")
    batch_size = 10


class SparkStatus(StatusOf):
    """Rows with versions, and deleted ones."""

    name = "spark_status"
    types = ("made", "gone", "bad", "x*")
    push = True
    batch_size = 10


PROJECTIONS = {each.name: each for each in (SparkSold, SparkStatus)}


def declared(name: str) -> Any:
    """Declare one anew: tests forget what was declared."""
    declare(PROJECTIONS[name]())
    return PROJECTIONS[name]


class Here:
    """What a rebuild asks of Spark, done in this process: tasks one after the other."""

    defaultParallelism = 3

    def __init__(self) -> None:
        os.environ.setdefault("PYTHONHASHSEED", "0")

    @property
    def sparkContext(self):
        return self

    def parallelize(self, parts, count):
        return Partitions([[part] for part in parts])


class Partitions:
    """What stands for an RDD."""

    def __init__(self, parts):
        self.parts = parts

    def mapPartitions(self, function):
        return Partitions([list(function(iter(part))) for part in self.parts])

    def repartitionAndSortWithinPartitions(self, count, partitionFunc):
        rows = sorted(itertools.chain(*self.parts), key=lambda row: row[0])
        parts = [[] for _ in range(count)]
        for row in rows:
            parts[partitionFunc(row[0]) % count].append(row)
        return Partitions(parts)

    def persist(self, level):
        return self

    def unpersist(self):
        pass

    def count(self):
        return sum(map(len, self.parts))

    def toLocalIterator(self, prefetchPartitions=False):
        return itertools.chain(*self.parts)


if __name__ == "__main__":
    from outbox_app.operations.pipeline import log_options
    from outbox_app.operations.spark_rebuild import log_of, rebuild_on_spark

    log, using = log_of(sys.argv[1])
    options = log_options(log, using=using, password=os.environ.get("PASSWORD", ""))
    rebuild_on_spark(Here(), options, sys.argv[1], write=print)
