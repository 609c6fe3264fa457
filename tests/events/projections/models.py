# ruff: noqa: DJ008
"""Views of all kinds."""

from __future__ import annotations

from django.db import models


class Status(models.Model):
    """A row for each stream; it can be pushed."""

    stream = models.CharField(max_length=255, primary_key=True)
    status = models.CharField(max_length=100, db_index=True)
    #: Versions that were applied, in order.
    path = models.TextField(default="")
    changed_at = models.DateTimeField(null=True)
    version = models.BigIntegerField(default=0)
    deleted = models.BooleanField(default=False)


class Bare(models.Model):
    """The same, without a field for deleted rows."""

    stream = models.CharField(max_length=255, primary_key=True)
    version = models.BigIntegerField(default=0)


class Sold(models.Model):
    """A row for each article, fed by many streams."""

    article = models.IntegerField(primary_key=True)
    count = models.IntegerField(default=0)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(count__lt=10**6), name="sold_possible")
        ]


class Seat(models.Model):
    """Whose seat a number is: no number is two people's."""

    stream = models.CharField(max_length=255, primary_key=True)
    number = models.IntegerField(null=True, unique=True)
    version = models.BigIntegerField(default=0)


class Hourly(models.Model):
    """A row for each hour."""

    hour = models.DateTimeField(primary_key=True)
    count = models.IntegerField(default=0)


class Numbered(models.Model):
    """Its key is given out by the database."""

    stream = models.CharField(max_length=255, unique=True)


class Pointed(models.Model):
    """A view that another table points at."""

    stream = models.CharField(max_length=255, primary_key=True)


class Pointing(models.Model):
    """Points at a view."""

    view = models.ForeignKey(Pointed, on_delete=models.CASCADE)


class Hinting(models.Model):
    """Points at a view that does not know of it."""

    view = models.ForeignKey(Pointed, on_delete=models.CASCADE, related_name="+")


class Stamped(models.Model):
    """Knows when its rows were made, and when they changed."""

    stream = models.CharField(max_length=255, primary_key=True)
    count = models.IntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)
