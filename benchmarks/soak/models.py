"""The tables of the soak: what is committed, and what took effect.

Each row is written in the transaction of what it tells of, so that the database itself says what
became of every transaction, that of a killed writer included. Ids ascend in the order in which
things happened, where one waited for the other.
"""

from __future__ import annotations

from django.db import models


class Entry(models.Model):
    """Base of all."""

    id = models.BigAutoField(primary_key=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.pk)


class Committed(Entry):
    """A transaction of a writer that has committed."""

    number = models.CharField(max_length=40, unique=True)


class Key(Entry):
    """An ordering key, to be locked before jobs with it are staged."""

    name = models.CharField(max_length=40, unique=True)


class Staged(Entry):
    """A job that was staged: an entry for each row of the outbox that it has had."""

    task_id = models.CharField(max_length=80)
    row = models.BigIntegerField()
    shard = models.IntegerField()
    key = models.CharField(max_length=80)


class Executed(Entry):
    """An effect of an idempotent task."""

    task_id = models.CharField(max_length=80)


class Handled(Entry):
    """An effect of a subscription."""

    subscription = models.CharField(max_length=40)
    position = models.BigIntegerField()
