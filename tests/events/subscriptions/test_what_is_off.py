"""What is off costs a page no call: ``on_gap="off"``, and parking where nothing is parked."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from outbox_app.events import subscriber
from outbox_app.events.models import Subscription
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.subscriber import subscriber_named

pytestmark = pytest.mark.django_db(transaction=True)


def entered(run: Callable[[], object]) -> set[str]:
    """Return the modules of ``subscriptions`` whose code a run enters."""
    found = set()

    def note(frame, event, arg):
        room, _, module = frame.f_globals.get("__name__", "").rpartition(".")
        if event == "call" and room == "outbox_app.events.subscriptions":
            found.add(module)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def partition(alias, request):
    """One whose handler has no options but those of a test."""
    options, seen = getattr(request, "param", {}), []
    subscriber("walk", **options)(lambda events: seen.extend(events))
    Subscription.objects.using(alias).create(name="walk", partitions=1)
    found = Partition(subscriber_named("walk"), 0)
    found.seen = seen
    yield found
    found.close()


@pytest.mark.parametrize("partition", [{}, {"on_error": "park"}], indirect=True)
def test_no_page_enters_what_is_off(partition, published):
    off = {"version_gaps", "parking"}
    for count, page in enumerate(("a", "b"), start=1):  # the first one takes the cursor
        published(page)
        assert off.isdisjoint(entered(partition.run_once))
        assert len(partition.seen) == count
    assert off.isdisjoint(entered(partition.run_once))  # an empty one
    assert off.isdisjoint(entered(lambda: partition.pause))


@pytest.mark.parametrize("partition", [{"on_gap": "skip"}], indirect=True)
def test_a_page_enters_what_is_on(partition, published):
    published("a")
    assert {"version_gaps", "parking"} <= entered(partition.run_once)
    assert len(partition.seen) == 1
