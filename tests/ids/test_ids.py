"""Ids are increasing numbers of 63 bits, fill shards evenly, and only use reserved time."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from threading import Thread

import pytest
from django.core.exceptions import ImproperlyConfigured

from outbox_app.exceptions import InvalidArgument
from outbox_app.ids import IdParts, parts_of, shard_of, snowflake, snowflakes
from outbox_app.ids.generator import EPOCH, Snowflakes, _Reserved

pytestmark = pytest.mark.django_db(transaction=True)


def endless(clock) -> Snowflakes:
    """A maker that never has to ask a database."""
    ids = Snowflakes(clock=clock)
    ids._reserved = _Reserved("", (5, 9), 0, 2**43 - 1, 0.0)
    return ids


def test_ids_grow_and_know_what_they_are_made_of(alias, nodes):
    ids = [snowflake(), *snowflakes(10_000), snowflake()]
    assert ids == sorted(set(ids))
    parts = [parts_of(id) for id in ids]
    assert {(each.datacentre, each.node) for each in parts} == {parts[0][1:3]}
    assert abs(parts[0].time - datetime.now(UTC)) < timedelta(minutes=1)
    assert 2**53 < ids[0] < 2**63


def test_parts():
    id = 77 << 20 | 5 << 17 | 9 << 12 | 4094
    assert parts_of(id) == IdParts(EPOCH + timedelta(milliseconds=77), 5, 9, 4094)
    assert parts_of(2**63 - 1).time.year == 2303
    assert (shard_of(id), shard_of(id, 10), shard_of(0, 1)) == (126, id % 10, 0)


@pytest.mark.parametrize("id", [-1, 2**63, "7", 7.0, True, None])
def test_what_is_no_id_is_refused(id):
    for take in (parts_of, shard_of):
        with pytest.raises(InvalidArgument, match="whole number"):
            take(id)


@pytest.mark.parametrize("shards", [0, -1, 129, "8", True])
def test_shards_that_ids_do_not_fill_are_refused(shards):
    with pytest.raises(InvalidArgument, match="1 to 128"):
        shard_of(1, shards)


@pytest.mark.parametrize("n", [-1, 1.0, "1", True, None])
def test_no_count(n):
    with pytest.raises(InvalidArgument, match="whole number"):
        snowflakes(n)
    assert snowflakes(0) == []


@pytest.mark.slow
def test_a_quiet_process_fills_128_tables_evenly(clock):
    make, tables = endless(clock).make, [0] * 128
    for milliseconds in range(1_000_000):
        clock.seconds = milliseconds / 1000
        tables[make() % 128] += 1
    assert max(tables) / min(tables) <= 1.1


def test_a_millisecond_that_is_used_up_is_followed_by_the_next(clock):
    ids = endless(clock)
    made = ids.make_many(20_000)
    times = [id >> 20 for id in made]
    assert made == sorted(set(made))
    assert {id >> 12 & 255 for id in made} == {5 << 5 | 9}
    # Counters begin at random: how few ids the last millisecond has is chance.
    *used_up, _last = Counter(times).values()
    assert min(used_up) >= 3969
    assert 1_000_000 <= times[0] <= times[-1] <= times[0] + 6
    clock.seconds -= 500  # no clock goes back; if one does, ids do not
    assert ids.make() > made[-1]


def test_threads_share_a_process(clock):
    ids, made = endless(clock), []

    def make():
        own = []
        for _ in range(20_000):
            clock.seconds += 0.00002
            own.append(ids.make())
        made.extend([*own, *ids.make_many(5_000)])

    threads = [Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == len(made) == 100_000


def test_a_coroutine_makes_ids(alias, nodes):
    async def make():
        return Snowflakes().make()

    assert asyncio.run(make()) != asyncio.run(make())


@pytest.mark.parametrize("datacentre", [8, -1, "1"])
def test_no_datacentre(alias, nodes, settings, datacentre):
    settings.OUTBOX = {**settings.OUTBOX, "DATACENTRE": datacentre}
    with pytest.raises(ImproperlyConfigured, match="DATACENTRE"):
        Snowflakes().make()
