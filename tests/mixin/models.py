# ruff: noqa: DJ008
"""Models that declare jobs in each of the ways there are."""

from __future__ import annotations

from celery import chain, signature
from django.db import models

from outbox_app import OutboxMixin, on_create, on_delete, on_update
from outbox_app.events import PublishingMixin


class Order(PublishingMixin, models.Model):
    """By name, with a condition, in order."""

    outbox = [
        on_create("mixin.created"),
        on_update("mixin.updated", when=lambda order: order.paid, ordered=True),
        on_delete("mixin.deleted", ordered=True),
    ]
    paid = models.BooleanField(default=False)
    note = models.TextField(default="")


class Line(OutboxMixin, models.Model):
    """Deleted by cascade."""

    outbox = (on_delete("mixin.deleted"),)
    order = models.ForeignKey(Order, on_delete=models.CASCADE)


class Letter(OutboxMixin, models.Model):
    """By signature and by callable."""

    outbox = [
        on_create(signature("mixin.created", kwargs={"kind": "letter"}), queue="letters"),
        on_create(chain(signature("mixin.created"), signature("mixin.updated"))),
        on_update(lambda letter: signature("mixin.updated", args=[letter.text])),
        on_update(lambda letter: [signature("mixin.updated", args=[i]) for i in letter.text]),
        on_update(lambda letter: None),
    ]
    text = models.TextField(default="")


class Wrong(OutboxMixin, models.Model):
    """Its callable calls ``delay()`` where it should return a signature."""

    outbox = [on_create(lambda wrong: "mixin.created")]


class Quiet(OutboxMixin, models.Model):
    """Declares nothing."""


class Named(OutboxMixin, models.Model):
    """What an abstract class declares."""

    outbox = [on_create("mixin.created", ordered=True), on_delete("mixin.deleted", ordered=True)]
    name = models.CharField(max_length=100)

    class Meta:
        abstract = True


class Place(Named):
    """Inherits from an abstract class."""


class Venue(Place):
    """The same table."""

    class Meta:
        proxy = True


class Restaurant(Place):
    """A table of its own: its rows are rows of Place, too."""


class Diner(Restaurant):
    """The third table, and a declaration more."""

    outbox = [*Restaurant.outbox, on_delete("mixin.closed")]


class Seat(PublishingMixin, models.Model):
    """Its key is of two columns."""

    pk = models.CompositePrimaryKey("show", "number")
    show = models.UUIDField()
    number = models.IntegerField()
