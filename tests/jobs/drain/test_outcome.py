"""The outcome of each message of a batch, from the broker's replies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from amqp.exceptions import MessageNacked
from redis.exceptions import OutOfMemoryError, ResponseError

from outbox_app.jobs.drain.outcome import PublishResult

NACK, FULL, LOADING = MessageNacked(), OutOfMemoryError("OOM"), ResponseError("LOADING")


@pytest.mark.parametrize(
    ("answers", "is_unknown"),
    [
        ([NACK], False),
        ([FULL, FULL], False),
        ([None, NACK], True),
        ([1, FULL], True),
        ([FULL, LOADING], True),
        ([LOADING], True),
    ],
)
def test_of_several_queues_one_may_have_taken_a_message(answers, is_unknown):
    """Then it is sent again, and the extra publish needs its incident (P5)."""
    item, result = SimpleNamespace(row=object()), PublishResult()

    error = result.sort([item], [answers], lambda *_: False)

    assert error in answers
    assert (result.unknown, result.accepted, result.refused) == ([item.row] * is_unknown, [], [])
