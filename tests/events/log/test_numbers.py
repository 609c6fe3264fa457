"""Numbers of events: what is read is what publish() returned, on every database."""

from __future__ import annotations

import random
import struct
from math import isfinite
from uuid import uuid4

import pytest
from django.db import transaction

from outbox_app.events import publish
from outbox_app.events.log.newevent import canonical
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Event

pytestmark = pytest.mark.django_db(transaction=True)
EDGES = [0.0, -0.0, 1.0, 1e15, 1e16, 1e22, 1e23, 1.5e300, 5e-324, -1e-7, 2.0**63, 2.0**64]
EDGES += [
    sign * 2**bits + step
    for sign in (1, -1)
    for bits in (31, 53, 63, 64, 70)
    for step in (-1, 0, 1)
]


def numbers(seed: int) -> list[float]:
    """Return doubles of any bits, decimals of every size, and integers of up to 300 bits."""
    dice = random.Random(seed)
    bits = [struct.unpack("<d", dice.randbytes(8))[0] for _ in range(400)]
    decimals = [
        round(dice.random() * 10 ** dice.randint(-9, 25), dice.randint(0, 9)) for _ in range(400)
    ]
    wholes = [dice.choice((1, -1)) * dice.getrandbits(dice.randint(1, 300)) for _ in range(400)]
    return [*EDGES, *filter(isfinite, bits), *decimals, *wholes]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_is_what_publish_has_returned(alias, seed):
    given = numbers(seed)
    content = {"n": given, "each": {repr(number): number for number in given}}
    again = {"data": content, "metadata": {"n": given}, "message_id": uuid4()}
    with transaction.atomic(using=alias):
        row = publish("s", "t", **again, using=alias)
    assert all(float(a) == float(b) for a, b in zip(row.data["n"], given, strict=True))
    with transaction.atomic(using=alias):  # an honest repeat
        assert publish("s", "t", **again, using=alias).version == row.version == 1
    reader = LogReader(Event, using=alias)
    try:
        [read] = reader.read(reader.window.start(0), 10).events
    finally:
        reader.close()
    for seen in (Event.objects.using(alias).get(), read):
        assert repr(in_order(seen.data)) == repr(in_order(row.data))
        assert repr(seen.metadata) == repr(row.metadata)
    assert canonical("data", row.data)[0] == row.data


def in_order(data):
    """PostgreSQL has an order of its own for keys."""
    return {**data, "each": dict(sorted(data["each"].items()))}["each"], data["n"]
