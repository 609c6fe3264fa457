"""What a connection is known to carry: when a message is given up, and how batches are cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outbox_app.jobs.drain.batch import SMALL_BYTES
from outbox_app.jobs.drain.wire import ATTEMPTS, Wire


def message(task_id, size, key=""):
    return SimpleNamespace(row=SimpleNamespace(task_id=task_id, ordering_key=key), size=size)


@pytest.fixture
def wire():
    return Wire(timeout=10)


def test_a_message_that_fails_while_nothing_is_taken_is_kept(wire):
    large = message("large", SMALL_BYTES + 1)
    for _ in range(2 * ATTEMPTS):
        wire.has_failed([large])
    wire.has_probed()
    assert not wire.gives_up(large), "it was one attempt: the broker took nothing in between"


def test_a_message_that_fails_while_others_are_taken_is_given_up(wire):
    large, other = message("large", SMALL_BYTES + 1), message("other", 10)
    for _ in range(ATTEMPTS):
        wire.has_taken([other], seconds=0.1)
        assert not wire.gives_up(large)
        wire.has_failed([large])
    assert not wire.gives_up(large), "nothing was taken since the last attempt"
    wire.has_taken([other], seconds=0.1)
    assert wire.gives_up(large)
    assert not wire.gives_up(large), "requeued, it has all attempts again"


def test_an_answer_that_nobody_knows_is_the_message_s_fault_in_the_end(wire):
    small, other, answer = message("small", 10), message("other", 10), RuntimeError("no")
    for _ in range(ATTEMPTS):
        wire.has_taken([other], seconds=0.1)
        assert wire.gives_up(small) is None
        wire.has_failed([small], answer)
    wire.has_taken([other], seconds=0.1)
    assert wire.gives_up(small) is answer


def test_a_small_message_is_never_given_up(wire):
    small = message("small", SMALL_BYTES)
    for _ in range(ATTEMPTS + 1):
        wire.has_probed()
        wire.has_failed([small])
    wire.has_probed()
    assert not wire.gives_up(small)


def test_what_failed_alone_goes_last_with_the_rest_of_its_key(wire):
    batch = [message("1", 10, "k"), message("2", 10), message("3", 10, "k"), message("4", 10)]
    wire.has_failed([batch[0]])
    assert [m.row.task_id for m in wire.in_turn(batch)] == ["2", "4", "1", "3"]
    cut = wire.batches(wire.in_turn(batch))
    assert [[m.row.task_id for m in part] for part in cut] == [["2", "4"], ["1"], ["3"]]


def test_a_batch_that_was_cut_off_makes_the_next_ones_smaller(wire):
    batch = [message(str(number), 100_000) for number in range(8)]
    assert [len(part) for part in wire.batches(batch)] == [8]
    wire.has_failed(batch)
    assert [len(part) for part in wire.batches(batch)] == [2, 2, 2, 2]
    wire.has_failed(batch[:2])
    assert [len(part) for part in wire.batches(batch)] == [1] * 8
