"""Random commits and faults: in the end each event is handled once, in the order of its stream."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from outbox_app.failpoints import set_failpoint

from .conftest import WAYS
from .test_kills import POINTS, Killed

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("way", WAYS),
]

STREAMS = ["a", "b", "c", "d"]
SEEDS = range(6)


class World:
    """Writers, hands that take events away and put them back, and one reader that is killed."""

    def __init__(self, alias, reader, log, dice):
        self.alias, self.reader, self.log, self.dice = alias, reader, log, dice
        self.versions = defaultdict(int)
        self.taken = []
        self.kills = 0

    def write(self):
        stream = self.dice.choice(STREAMS)
        first = self.versions[stream] + 1
        self.versions[stream] += self.dice.choice([1, 1, 2, 5])
        versions = list(range(first, self.versions[stream] + 1))
        missing = []
        if versions[-1] > 1 and self.dice.random() < 0.4:  # never the first of all: that is pruned
            missing = self.dice.sample(versions, self.dice.randint(1, len(versions)))
            missing = [version for version in missing if version > 1]
        self.taken += [(stream, version) for version in missing]
        there = [version for version in versions if version not in missing]
        self.dice.shuffle(there) if self.dice.random() < 0.2 else None
        self.log.add(stream, *there)
        if there and self.dice.random() < 0.3:  # as if it had committed late
            self.log.age(stream, *there, seconds=self.dice.choice([5, 50]))

    def put_back(self):
        if self.taken:
            stream, version = self.taken.pop(self.dice.randrange(len(self.taken)))
            self.log.add(stream, version)

    def read(self):
        if self.dice.random() < 0.4:
            point, left = self.dice.choice(POINTS), self.dice.randint(1, 4)

            def kill():
                nonlocal left
                left -= 1
                if not left:
                    raise Killed

            set_failpoint(point, kill)
        try:
            self.reader.later(self.dice.choice([0, 0.1, 1, 40]))
        except Killed:
            self.kills += 1
            self.reader.partition.close()
            self.reader.start()
        finally:
            for point in POINTS:
                set_failpoint(point, None)

    def run(self, steps):
        for _ in range(steps):
            self.dice.choice([self.write, self.write, self.put_back, self.read])()
        while self.taken:
            self.put_back()
        for stream in STREAMS:  # so that no event is the last of its stream
            self.versions[stream] += 1
            self.log.add(stream, self.versions[stream])
        self.reader.later(120)


@pytest.mark.parametrize("seed", SEEDS)
def test_once_and_in_order(alias, reading, log, way, seed):
    dice = random.Random(seed)
    reader = reading(batch_size=dice.choice([1, 2, 3, 500]), **way)
    world = World(alias, reader, log, dice)
    world.run(40)
    for stream in STREAMS:
        mine = [int(text[2:]) for text in reader.handled if text[0] == stream]
        assert mine == list(range(1, world.versions[stream] + 1)), (stream, world.kills)
    assert reader.parked == []
    assert "open" not in {state for *_, state in reader.gaps}
