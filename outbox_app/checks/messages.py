"""How messages of checks are written: long lists are cut, and each message names a page.

A hint ends with the page of the documentation that says more: its address, if it is published.
Every id has a page: the page of its subject, or the list of all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from django.core.checks import CheckMessage

from .. import URLS
from ..process.preflight import usable_aliases
from ..text import escaped, without_passwords
from .values import check_settings

#: How many names a message lists.
LISTED = 5
#: Pages by the ids that they explain, without "outbox.".
PAGES = {
    "docs/reference/settings.md": ("E001", "E002", "E003", "E004", "E043", "E044", "E046", "E047"),
    "docs/reference/staging.md": ("E048", "W039"),
    "docs/howto/models.md": ("E005", "E006", "W005"),
    "docs/howto/several-databases.md": ("E007", "E011", "E023", "E024"),
    "docs/howto/restore.md": ("E012",),
    "docs/howto/own-log.md": ("E019", "E020", "E021", "E022"),
    "docs/howto/gaps.md": ("W013", "W014"),
    "docs/howto/hot-entity.md": ("W034",),
    "docs/howto/rotate-keys.md": ("W035",),
    "docs/reference/door.md": ("E045", "W036"),
    "docs/howto/fleet.md": ("W037", "W040", "W041"),
    "docs/howto/unique-entities.md": ("E042", "W033"),
    "docs/howto/redis.md": ("E030", "W016", "W017", "W018", "W020"),
    "docs/howto/rabbitmq.md": ("E029", "W019"),
    "docs/howto/poolers.md": ("W022",),
    "docs/howto/preflight.md": ("E028", "W015", "W023", "W024"),
}
#: Errors in settings that may make another check raise: it reports nothing until they are gone.
UNREADABLE = {"outbox.E001", "outbox.E002", "outbox.E003"}
#: The page that lists every id.
EVERYWHERE = "docs/reference/checks.md"


def listed(names: Sequence[str]) -> str:
    """Return the names with commas, the first few of many."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def page_of(id: str) -> str:
    number = id.removeprefix("outbox.")
    page = next((page for page, numbers in PAGES.items() if number in numbers), EVERYWHERE)
    site = URLS["Documentation"]
    return f"{site}{page.removeprefix('docs/').removesuffix('.md')}.html" if site else page


def linked(check: Callable[..., Iterable[CheckMessage]]) -> Callable[..., list[CheckMessage]]:
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
            message.hint = f"{escaped(message.hint)}\n\tSee {page_of(str(message.id))}."
        return messages

    return with_pages
