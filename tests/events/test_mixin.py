"""``self.publish()``: events into the stream of the row, on the database of the row."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import transaction

from outbox_app.events import NO_STREAM
from outbox_app.events.exceptions import InvalidEvent, VersionConflict
from outbox_app.events.models import Event
from outbox_app.exceptions import InvalidJob
from tests.mixin.models import Order, Seat

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_atomic")]


def test_the_stream_is_the_row(alias):
    order = Order.objects.using(alias).create()
    with transaction.atomic(using=alias):
        order.publish("order.placed", {"total": 3}, expected_version=NO_STREAM, topic="eu")
        event = order.publish("order.paid", expected_version=1)
    assert (event.stream, event.version) == (f"mixin.order:{order.pk}", 2)
    assert list(Event.objects.using(alias).values_list("type", "topic")) == [
        ("order.placed", "eu"),
        ("order.paid", ""),
    ]
    with pytest.raises(VersionConflict):
        order.publish("order.paid", expected_version=1)
    with pytest.raises(TypeError, match="stream"):
        order.publish("order.paid", stream="another")


def test_a_row_that_is_not_saved_has_no_stream(alias):
    with pytest.raises(InvalidEvent, match="Save it before you publish"):
        Order().publish("order.placed")


def test_a_row_with_a_composite_key_has_one_stream(alias):
    """As a form gives its key, and as the database returns it."""
    show = uuid4()
    given = Seat.objects.using(alias).create(show=str(show), number="7").publish("seat.sold")
    read = Seat.objects.using(alias).get(show=show).publish("seat.returned")
    assert (given.stream, given.version, read.version) == (f"mixin.seat:({show!r}, 7)", 1, 2)
    with pytest.raises(InvalidJob, match=r"Seat has no primary key"):
        Seat(show=show).stage("mixin.created", ordered=True, using=alias)


@pytest.mark.django_db(databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_the_alias_of_the_row_counts(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": "default"}
    order = Order.objects.using(alias).create()
    order.publish("order.placed")
    assert Event.objects.using(alias).count() == 1
    assert not Event.objects.using("default").exists()
