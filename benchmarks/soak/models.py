"""The tables of the soak: the commits of writers, the staged jobs, and the effects.

Each row is written in the transaction that it records. So the rows show the outcome of every
transaction, even if its writer was killed. If one transaction waited for another, their ids are in
the order of the transactions.
"""

from __future__ import annotations

from django.db import models


class Entry(models.Model):
    """The base class of the tables."""

    id = models.BigAutoField(primary_key=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.pk)


class Committed(Entry):
    """A transaction of a writer that has committed."""

    number = models.CharField(max_length=40, unique=True)


class Key(Entry):
    """An ordering key. Writers lock its row before they stage jobs with the key."""

    name = models.CharField(max_length=40, unique=True)


class Staged(Entry):
    """A staged job, with an entry for each of its rows in the outbox."""

    task_id = models.CharField(max_length=80)
    row = models.BigIntegerField()
    shard = models.IntegerField()
    key = models.CharField(max_length=80)


class Executed(Entry):
    """An effect of the idempotent task."""

    task_id = models.CharField(max_length=80)


class Handled(Entry):
    """An effect of a subscription."""

    subscription = models.CharField(max_length=40)
    position = models.BigIntegerField()
