"""What the tests of the counters share."""

from __future__ import annotations

import pytest
from django.db import transaction

from outbox_app.jobs.drain.drain import Drain
from tests import tasks


def stop_the_clock_of(counters):
    """Let no time pass between two writes."""
    stopped = counters.clock()
    counters.clock = lambda: stopped


@pytest.fixture
def note(make_app):
    """A task of an app with a broker of its own."""
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def stage(alias, note):
    """``stage(5)``: so many jobs, committed."""

    def make(count, **options):
        with transaction.atomic(using=alias):
            for i in range(count):
                note.apply_async(("", i), **options)

    return make


@pytest.fixture
def drainer(alias):
    """``drainer()``: a drainer that is turned by hand; it keeps its shards for the whole test.

    The ten seconds after which it writes its counters pass when ``due(drain)`` says so.
    """
    made = []

    def make(**options):
        made.append(Drain(using=alias, **{"lease_seconds": 600, **options}))
        stop_the_clock_of(made[-1]._counters)
        return made[-1]

    yield make
    for drain in made:
        if drain.holder.joined:
            drain.holder.leave()


@pytest.fixture
def due():
    """``due(drain)``: ten seconds have passed since it wrote its counters."""

    def make(drain):
        drain._counters._tried_at = float("-inf")

    return make
