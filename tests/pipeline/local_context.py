"""A session that is none: what an archiver or a rebuild asks of Spark, done in this process."""

from __future__ import annotations

import itertools
import os


class LocalContext:
    """What stands for a session. Tasks run one after the other."""

    defaultParallelism = 2

    def __init__(self) -> None:
        os.environ.setdefault("PYTHONHASHSEED", "0")

    @property
    def sparkContext(self):
        return self

    def parallelize(self, parts, count):
        assert count == len(parts) > 0
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

    def map(self, function):
        return Partitions([list(map(function, part)) for part in self.parts])

    def collect(self):
        return list(itertools.chain(*self.parts))

    def count(self):
        return sum(map(len, self.parts))

    def toLocalIterator(self, prefetchPartitions=False):
        return itertools.chain(*self.parts)
