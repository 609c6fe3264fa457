"""How messages of checks are written: long lists are cut, and each message names a page.

A hint ends with the page of the documentation that lists the checks of the app. Its rows link to
the pages of their subjects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from django.core.checks import CheckMessage

from ..capability import NEEDED, checks_page
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


def linked(
    check: Callable[..., Iterable[CheckMessage]], room: str = "checks"
) -> Callable[..., list[CheckMessage]]:
    """Let a check report nothing while settings are unreadable, and its hints name the page.

    Args:
        check: A check of Django, which may yield its messages.
        room: The package of the check's app, as ``events``; for the core ``checks``.
    """

    @wraps(check)
    def with_pages(*, databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
        usable = [alias for alias in databases or () if alias in usable_aliases()]
        try:
            messages = list(check(databases=usable, **kwargs))
        except Exception:  # such as TypeError, if a setting has another type
            if UNREADABLE.isdisjoint(each.id for each in check_settings()):
                raise
            messages = []
        for message in messages:
            message.msg = escaped(without_passwords(message.msg))
            page = checks_page("checks" if message.id == NEEDED else room)
            message.hint = f"{escaped(message.hint)}\n\tSee {page}."
        return messages

    return with_pages
