"""Commands whose database is unreachable print one line about it, as for any other error."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize(
    "command",
    [
        ("outbox_dead", "list"),
        ("outbox_entities", "verify"),
        ("outbox_prune", "--inbox"),
        ("outbox_rebase",),
        ("outbox_subscriptions", "list"),
    ],
    ids=" ".join,
)
def test_a_database_that_is_away_is_one_line(alias: str, command: tuple[str, ...]) -> None:
    def refuse(*_: Any) -> None:
        raise OperationalError("connection failed:\nConnection refused")

    with connections[alias].execute_wrapper(refuse), pytest.raises(CommandError) as raised:
        call_command(*command)
    assert str(raised.value) == "OperationalError: connection failed: Connection refused"
