"""The messages of a canvas, and its results, equal those of plain Celery."""

from __future__ import annotations

import pytest
from celery import VERSION, chain, chord, group
from celery.canvas import StampingVisitor

pytestmark = pytest.mark.django_db(transaction=True, databases=["default"])


class Stamps(StampingVisitor):
    def on_signature(self, sig, **headers):
        return {"customer": 17, "stamped_headers": ["customer"]}


def stamped(signature):
    signature.stamp(visitor=Stamps())
    return signature


CANVAS = {
    "signature": lambda t: t.add.s(2, 2).delay(),
    "signature with options": lambda t: t.add.signature((2,), {"y": 3}, countdown=9).delay(),
    "signature, called": lambda t: t.add.s(2).apply_async((3,), priority=2),
    "immutable signature": lambda t: t.add.si(2, 2).apply_async((9,)),
    "signature by name": lambda t: t.app.signature("elsewhere", (1,)).delay(),
    "chain": lambda t: chain(t.add.s(1, 2), t.add.s(3), t.double.s()).delay(),
    "chain with options": lambda t: (t.add.s(1, 2) | t.add.s(3)).apply_async(
        countdown=100, link=t.double.s(), link_error=t.double.s(), expires=3000
    ),
    "chain of chains": lambda t: chain(
        chain(t.add.s(1, 2), t.add.s(3)), chain(t.double.s(), t.double.s())
    ).delay(),
    "chain of one": lambda t: chain(t.add.s(1, 2)).delay(),
    "group": lambda t: group(t.add.s(i, i) for i in range(5)).delay(),
    "group with options": lambda t: group(t.add.s(1), t.add.s(2)).apply_async(
        (5,), countdown=100, priority=1, headers={"h": 1}
    ),
    "group of groups": lambda t: group(group(t.add.s(1, 1), t.add.s(2, 2)), t.double.s(3)).delay(),
    "group of chains": lambda t: group(
        chain(t.add.s(1, 2), t.double.s()), chain(t.add.s(3, 4), t.double.s())
    ).delay(),
    "chain that ends in a group": lambda t: chain(
        t.add.s(1, 2), group(t.add.s(3), t.add.s(4))
    ).delay(),
    "chunks": lambda t: t.add.chunks([(i, i) for i in range(10)], 4).apply_async(),
    "chunks as a group": lambda t: t.add.chunks([(i, i) for i in range(10)], 4).group().delay(),
    "map": lambda t: t.double.map([1, 2, 3]).delay(),
    "starmap": lambda t: t.add.starmap([(1, 2), (3, 4)]).apply_async(countdown=100),
    "stamped signature": lambda t: stamped(t.add.s(1, 2)).delay(),
    "stamped chain": lambda t: stamped(chain(t.add.s(1, 2), t.double.s())).delay(),
    "stamped group": lambda t: stamped(group(t.add.s(1, 2), t.double.s(1))).delay(),
    "stamped link": lambda t: stamped(t.add.s(1, 2).on_error(t.double.s())).delay(),
}
CHORDS = {
    "chord": lambda t: chord([t.add.s(i, i) for i in range(3)], t.total.s()).delay(),
    "chord, called": lambda t: chord([t.add.s(i, i) for i in range(3)])(t.total.s()),
    "chord with options": lambda t: chord([t.add.s(1, 1)] * 2, t.total.s()).apply_async(
        countdown=100, link=t.double.s(), link_error=t.double.s()
    ),
    "group in a chain": lambda t: chain(
        t.add.s(1, 2), group(t.add.s(3), t.add.s(4)), t.total.s()
    ).delay(),
    "group first in a chain": lambda t: (
        group(t.add.s(3, 3), t.add.s(4, 4)) | t.total.s() | t.double.s()
    ).delay(),
    "chord of chains": lambda t: chord(
        [chain(t.add.s(1, 1), t.double.s()), t.double.s(4)], t.total.s()
    ).delay(),
    "chord in a chord": lambda t: chord(
        [chord([t.add.s(1, 1), t.double.s(1)], t.total.s()), t.double.s(4)], t.total.s()
    ).delay(),
    "chord in a group": lambda t: group(
        chord([t.add.s(1, 1), t.double.s(1)], t.total.s()), t.double.s(4)
    ).delay(),
    "chord of a group of groups": lambda t: chord(
        group(group(t.add.s(1, 1), t.double.s(1)), t.double.s(4)), t.total.s()
    ).delay(),
    "chord without a header": lambda t: chord([], t.total.s()).delay(),
    "stamped chord": lambda t: stamped(chord([t.double.s(1)] * 2, t.total.s())).delay(),
}


if VERSION < (5, 7):  # a chord takes no links, with the plain app either
    del CHORDS["chord with options"]


@pytest.mark.parametrize("send", CANVAS.values(), ids=CANVAS)
def test_canvas(send, assert_equal):
    assert_equal(send)


@pytest.mark.parametrize("send", CHORDS.values(), ids=CHORDS)
def test_chord_counted_by_its_result_backend(send, assert_equal, redis_url):
    assert_equal(send, result_backend=redis_url)


@pytest.mark.parametrize("send", CHORDS.values(), ids=CHORDS)
def test_chord_that_polls_its_result_backend(send, assert_equal, tmp_path):
    assert_equal(send, result_backend=f"file://{tmp_path}")
