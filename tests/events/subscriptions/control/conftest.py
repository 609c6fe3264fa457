"""What the tests of control share: positions, cursors, and the command."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from outbox_app.events.models import Cursor, Event


@pytest.fixture
def ids(alias: str) -> Callable[[], list[int]]:
    """``ids()``: the positions of the log."""
    return lambda: list(Event.objects.using(alias).order_by("id").values_list("id", flat=True))


@pytest.fixture
def cursors(alias: str) -> Callable[[], list[dict[str, Any]]]:
    """``cursors()``: the rows of all cursors."""
    return lambda: list(Cursor.objects.using(alias).order_by("pk").values())


@pytest.fixture
def command() -> Callable[..., tuple[Any, str]]:
    """``command(*arguments)``: the exit code and the output of outbox_subscriptions."""

    def call(*arguments: str) -> tuple[Any, str]:
        out = StringIO()
        try:
            call_command("outbox_subscriptions", *arguments, stdout=out)
        except CommandError as error:
            return error.returncode, f"{out.getvalue()}{error}"
        except SystemExit as error:
            return error.code, out.getvalue()
        return 0, out.getvalue()

    return call
