"""The tables of the soak: what is committed, and what took effect.

Each row is written in the transaction of what it tells of, so that the database itself says what
became of every transaction, that of a killed writer included.
"""

from __future__ import annotations

from django.db import models


class Committed(models.Model):
    """A transaction of a writer that has committed."""

    number = models.CharField(max_length=40, primary_key=True)

    class Meta:
        db_table = "soak_committed"

    def __str__(self) -> str:
        return self.number


class Key(models.Model):
    """An ordering key, to be locked before jobs with it are staged."""

    name = models.CharField(max_length=40, primary_key=True)

    class Meta:
        db_table = "soak_key"

    def __str__(self) -> str:
        return self.name


class Staged(models.Model):
    """A job that was staged: a row for each row of the outbox that it has had."""

    #: Ascends in the order in which the jobs of one key were staged.
    id = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=80)
    row = models.BigIntegerField()
    shard = models.IntegerField()
    key = models.CharField(max_length=80)

    class Meta:
        db_table = "soak_staged"

    def __str__(self) -> str:
        return self.task_id


class Executed(models.Model):
    """An effect of an idempotent task."""

    id = models.BigAutoField(primary_key=True)
    task_id = models.CharField(max_length=80)

    class Meta:
        db_table = "soak_executed"

    def __str__(self) -> str:
        return self.task_id


class Handled(models.Model):
    """An effect of a subscription."""

    #: Ascends in the order in which the events of one stream were handled.
    id = models.BigAutoField(primary_key=True)
    subscription = models.CharField(max_length=40)
    position = models.BigIntegerField()

    class Meta:
        db_table = "soak_handled"

    def __str__(self) -> str:
        return f"{self.subscription} {self.position}"
