"""Readers killed at any point: no event is lost or handled twice, and streams keep their order."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outbox_app.failpoints import set_failpoint

from .conftest import WAYS

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("way", WAYS),
]

POINTS = ["page_read", "advanced", "handled", "committed"]


class Killed(BaseException):
    """As kill -9: nothing of the process is left but what was committed."""


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_pass_of_every_point(reading, log, way, point):
    reader = reading(batch_size=3, **way)
    countdown, every = 1, 1

    def maybe():
        nonlocal countdown, every
        countdown -= 1
        if countdown == 0:
            every += 1
            countdown = every  # the next one a little later
            raise Killed

    kills = 0

    def live(seconds=0.0):
        nonlocal kills
        for _ in range(100):
            try:
                reader.later(seconds)
                return
            except Killed:
                kills += 1
                reader.partition.close()
                reader.start()
        raise AssertionError("it never gets anywhere")

    set_failpoint(point, maybe)
    try:
        log.add("a", 1, 2)
        log.add("b", 1, 3)  # 2 is missing
        log.add("c", 1, 2, 5)  # 3 and 4 are
        live()
        log.add("a", 3)
        log.add("b", 4)
        live(1)
        log.add("b", 2)
        log.add("c", 4)
        live(1)
        log.add("c", 3, 6)
        log.add("b", 5)
        live(10)
        live(60)
    finally:
        set_failpoint(point, None)
    assert kills
    expected = [f"a:{v}" for v in (1, 2, 3)] + [f"b:{v}" for v in range(1, 6)]
    expected += [f"c:{v}" for v in range(1, 7)]
    assert sorted(reader.handled) == expected
    for stream in "abc":
        mine = [int(text[2:]) for text in reader.handled if text[0] == stream]
        assert all(later == earlier + 1 for earlier, later in pairwise(mine))
    assert reader.parked == []
    assert {state for *_, state in reader.gaps} == {"filled"}


def test_rolled_back_with_the_page_the_hold_is_made_again(reading, log, way):
    reader = reading(**way)
    log.add("a", 1, 3)
    log.add("b", 1)
    reader.broken = {"b"}
    reader.poll()
    assert (reader.parked, reader.gaps, reader.handled) == ([], [], [])
    reader.broken = set()
    assert reader.later(60).handled == ["a:1", "b:1"]
    log.add("a", 2)
    assert reader.later(60).handled == ["a:1", "b:1", "a:2", "a:3"]


def test_a_second_reader_that_holds_the_same_page_changes_nothing(reading, log, way):
    first = reading(**way)
    log.add("a", 1)
    first.poll()
    old = first.partition
    log.add("a", 2, 4)
    first.start().poll()
    assert old.run_once()  # overtaken: it reads its rows anew
    assert not old.run_once()
    assert first.handled == ["a:1", "a:2"]
    assert first.gaps == [("a", 3, 3, "open")]
    log.add("a", 3)
    first.later(60)
    old.run_once()
    old.run_once()
    assert first.handled == ["a:1", "a:2", "a:3", "a:4"]


def test_a_commit_that_fails_after_the_hold_was_noted(reading, log, way, monkeypatch):
    """As a deferred constraint does: then the page is handled event by event, holds included."""
    reader = reading(on_error="park", **way)
    log.add("a", 1, 3)
    log.add("b", 1)
    record, failures = reader.partition.gaps.record, iter(range(3))

    def fail_at_first(*arguments):
        record(*arguments)
        if next(failures, None) is not None:
            raise ValueError("deferred")

    monkeypatch.setattr(reader.partition.gaps, "record", fail_at_first)
    reader.later(10)
    assert reader.handled == ["a:1", "b:1"]
    assert reader.gaps == [("a", 2, 2, "open")]
    log.add("a", 2)
    assert reader.later(10).handled[2:] == ["a:2", "a:3"]
