"""What a connection is known to carry: when a message is given up, and how batches are cut."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outbox_app.jobs.drain.batch import SMALL_BYTES
from outbox_app.jobs.drain.send_budget import ATTEMPTS, SendBudget


def message(task_id, size, key=""):
    return SimpleNamespace(row=SimpleNamespace(task_id=task_id, ordering_key=key), size=size)


@pytest.fixture
def budget():
    return SendBudget(timeout=10)


def test_a_message_that_fails_while_nothing_is_taken_is_kept(budget):
    large = message("large", SMALL_BYTES + 1)
    for _ in range(2 * ATTEMPTS):
        budget.has_failed([large])
    budget.has_probed()
    assert not budget.gives_up(large), "it was one attempt: the broker took nothing in between"


def test_a_message_that_fails_while_others_are_taken_is_given_up(budget):
    large, other = message("large", SMALL_BYTES + 1), message("other", 10)
    for _ in range(ATTEMPTS):
        budget.has_taken([other], seconds=0.1)
        assert not budget.gives_up(large)
        budget.has_failed([large])
    assert not budget.gives_up(large), "nothing was taken since the last attempt"
    budget.has_taken([other], seconds=0.1)
    assert budget.gives_up(large)
    assert not budget.gives_up(large), "requeued, it has all attempts again"


def test_an_answer_that_nobody_knows_is_the_message_s_fault_in_the_end(budget):
    small, other, answer = message("small", 10), message("other", 10), RuntimeError("no")
    for _ in range(ATTEMPTS):
        budget.has_taken([other], seconds=0.1)
        assert budget.gives_up(small) is None
        budget.has_failed([small], answer)
    budget.has_taken([other], seconds=0.1)
    assert budget.gives_up(small) is answer


def test_a_small_message_is_never_given_up(budget):
    small = message("small", SMALL_BYTES)
    for _ in range(ATTEMPTS + 1):
        budget.has_probed()
        budget.has_failed([small])
    budget.has_probed()
    assert not budget.gives_up(small)


def test_what_failed_alone_goes_last_with_the_rest_of_its_key(budget):
    batch = [message("1", 10, "k"), message("2", 10), message("3", 10, "k"), message("4", 10)]
    budget.has_failed([batch[0]])
    assert [m.row.task_id for m in budget.in_turn(batch)] == ["2", "4", "1", "3"]
    cut = budget.batches(budget.in_turn(batch))
    assert [[m.row.task_id for m in part] for part in cut] == [["2", "4"], ["1"], ["3"]]


def test_a_batch_that_was_cut_off_makes_the_next_ones_smaller(budget):
    batch = [message(str(number), 100_000) for number in range(8)]
    assert [len(part) for part in budget.batches(batch)] == [8]
    budget.has_failed(batch)
    assert [len(part) for part in budget.batches(batch)] == [2, 2, 2, 2]
    budget.has_failed(batch[:2])
    assert [len(part) for part in budget.batches(batch)] == [1] * 8
