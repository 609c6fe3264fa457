"""How messages of checks are written: long lists are cut, and passwords are hidden.

A hint says what to do by itself, and names no page: the wheel has none. The id leads to the row of
the reference that says more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from django.core.checks import CheckMessage

from ..process.preflight import usable_aliases
from ..text import escaped, without_passwords
from .values import check_settings

#: How many names a message lists.
LISTED = 5
#: Errors in settings that may make another check raise: it reports nothing until they are gone.
UNREADABLE = {"outbox.E001", "outbox.E002", "outbox.E003"}


def listed(names: Sequence[str]) -> str:
    """Return the names with commas, the first few of many."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def guarded(check: Callable[..., Iterable[CheckMessage]]) -> Callable[..., list[CheckMessage]]:
    """Let a check, which may yield its messages, report nothing while settings are unreadable."""

    @wraps(check)
    def guard(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
        usable = [alias for alias in databases or () if alias in usable_aliases()]
        try:
            messages = list(check(databases=usable, **kwargs))
        except Exception:  # such as TypeError, if a setting has another type
            if UNREADABLE.isdisjoint(each.id for each in check_settings()):
                raise
            messages = []
        for message in messages:
            message.msg = escaped(without_passwords(message.msg))
            message.hint = escaped(message.hint)
        return messages

    return guard
