"""The log lines of a backoff about an error."""

from __future__ import annotations

from outbox_app.exceptions import BrokerUnavailable
from outbox_app.process.backoff import MAX_BACKOFF, Backoff


def test_an_unexpected_error_has_its_traceback(caplog):
    """It is noted after the except clause that caught it."""
    for error in (ValueError("odd"), BrokerUnavailable("away")):
        Backoff("it").failed(error)
    odd, away = caplog.records
    assert odd.exc_info[1].args == ("odd",)
    assert not away.exc_info


def test_an_error_whose_text_cannot_be_had(caplog):
    """It must not end the process that waits."""

    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("no words")

        __repr__ = __str__

    backoff = Backoff("it")
    backoff.failed(Unspeakable())
    assert (backoff.failures, "Unspeakable" in backoff.text) == (1, True)
    assert "text cannot be had" in caplog.text


def test_pauses_grow_up_to_a_limit():
    backoff, pauses = Backoff("it"), []
    for _ in range(40):
        backoff.failed(ValueError("away"))
        pauses.append(backoff.remaining)
    assert 0 < pauses[0] <= 0.2
    assert MAX_BACKOFF / 3 < pauses[-1] <= MAX_BACKOFF == 5
    backoff.succeeded()
    assert backoff.remaining == 0
