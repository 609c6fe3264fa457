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
    """A task of an app with its own broker."""
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def stage(alias, note):
    """``stage(5)``: stage and commit 5 jobs."""

    def make(count, **options):
        with transaction.atomic(using=alias):
            for i in range(count):
                note.apply_async(("", i), **options)

    return make


@pytest.fixture
def drainer(alias):
    """``drainer()``: a drainer that the test runs turn by turn. It keeps its shards to the end.

    It writes its counters only after ``due(drain)``, instead of every ten seconds.
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
    """``due(drain)``: make the drainer's counters due, as after ten seconds."""

    def make(drain):
        drain._counters._tried_at = float("-inf")

    return make
