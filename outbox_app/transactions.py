"""What counts as the caller's transaction: an ``atomic()`` of the code under way.

``TestCase`` and pytest-django's ``db`` wrap a test in atomics of their own, which Django marks
(``durable=True`` relies on it): production has no such transaction. With autocommit off, one is
open outside ``atomic()``, too. Nothing here opens a connection.
"""

from __future__ import annotations

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from .conf import settings
from .exceptions import NotAtomic


def is_atomic(using: str) -> bool:
    """Say whether an ``atomic()`` of the code is open on an alias; one of a test does not count."""
    connection = connections[using]
    return connection.in_atomic_block and not all(
        block._from_testcase  # type: ignore[attr-defined]
        for block in connection.atomic_blocks
    )


def lacks_autocommit(connection: BaseDatabaseWrapper) -> bool:
    """Say whether a connection is, or will be opened, in a transaction that is no ``atomic()``."""
    if connection.in_atomic_block:
        return False
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def open_transactions() -> list[str]:
    """Return the aliases on which the code of this thread has a transaction open."""
    return [
        c.alias
        for c in connections.all(initialized_only=True)
        if is_atomic(c.alias) or (c.connection is not None and lacks_autocommit(c))
    ]


def require_atomic(call: str, *, using: str) -> None:
    """Raise ``NotAtomic`` unless ``atomic()`` is open on ``using`` (or the settings open it)."""
    if settings().OUTSIDE == "stage" or is_atomic(using):
        return
    where = "outside a transaction"
    if lacks_autocommit(connections[using]):
        where = "with autocommit off and outside atomic()"
    raise NotAtomic(
        f"{call} was called {where} on {using!r}. Wrap the work and the call in "
        f"transaction.atomic(using={using!r})."
    )
