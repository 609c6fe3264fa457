"""Fences are kept for longer than any keeper may ask about them."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.prepared.checks import check_retention


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"FENCE_RETENTION_DAYS": 21}, []),
        ({"FENCE_RETENTION_DAYS": 20}, ["outbox.E043"]),
        ({"PREPARED_MAX_DECIDE_BY": 23.5 * 86400}, ["outbox.E043"]),
        ({"PREPARED_MAX_DECIDE_BY": 22.5 * 86400}, []),
    ],
)
def test_fences_are_kept_for_longer_than_a_keeper_may_ask(
    settings: Any, value: Any, found: list[str]
) -> None:
    settings.OUTBOX = value
    assert [each.id for each in check_retention()] == found


def test_the_error_says_why(settings: Any) -> None:
    settings.OUTBOX = {"FENCE_RETENTION_DAYS": 20}
    [message] = check_retention()
    assert message.msg.startswith(
        "OUTBOX['FENCE_RETENTION_DAYS'] is 20, but a keeper may ask about an event for 14 days "
    )
