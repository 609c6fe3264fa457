"""Entities in tests: assert executed and rejected commands, and call them simultaneously.

``execute()`` and ``execute_many()`` work in a plain ``TestCase``: its transaction counts as the
caller's. So does ``aexecute()`` inside ``in_one_thread()``, which the fixture ``outbox`` opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any
from unittest.mock import patch

from django.db import connections

from ..aliases import outbox_alias
from ..database.transactions import leave_pool
from ..testing.job import LISTED
from . import Entity, queue
from .models import EntityVersion

__all__ = ["assert_executed", "assert_rejected", "at_once", "commands", "in_one_thread"]


def commands(entity: type[Entity], id: str, *, using: str | None = None) -> list[EntityVersion]:
    """Return the commands of an entity with their responses, oldest first: its versions."""
    return list(entity.history(id, using=using))


def assert_executed(
    entity: type[Entity],
    id: str,
    command: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    count: int = 1,
    using: str | None = None,
) -> list[EntityVersion]:
    """Assert that an entity has executed (not rejected) a command exactly ``count`` times.

    Args:
        arguments: All arguments, as JSON holds them. Default: any.
        count: The expected number; 0: none.
        using: Database alias. Default: the one of the type's versions.

    Returns:
        The versions: ``response``, ``state``, ``version``, ``command_id``; ``data``, the arguments.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    asked = commands(entity, id, using=using)
    found = [v for v in asked if not v.rejected and arguments in (None, v.data)]
    return _counted(found, asked, command, count, f"executed {command}")


def assert_rejected(
    entity: type[Entity],
    id: str,
    command: str,
    *,
    code: str | None = None,
    count: int = 1,
    using: str | None = None,
) -> list[EntityVersion]:
    """Like ``assert_executed``, for a command rejected with this ``code``. Default: any code."""
    __tracebackhide__ = True
    asked = commands(entity, id, using=using)
    found = [v for v in asked if v.rejected and code in (None, (v.response or {}).get("code"))]
    return _counted(found, asked, command, count, f"rejected {command} {code or ''}")


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Let ``aexecute()`` run in the thread of Django's asynchronous ORM, without batches.

    In an asynchronous test of ``TestCase`` that thread has the transaction of the test.
    """
    with patch.object(queue, "in_one_thread", True):
        yield


def at_once(*callers: Callable[[], Any], using: str | None = None) -> list[Any]:
    """Call functions at the same moment, each in a thread with a connection of its own.

    They only see committed rows: use a ``TransactionTestCase``, on a server or an SQLite file.
    ``using`` is the alias that each thread connects to first. Default: the outbox's.

    Returns:
        The result of each function, or the exception that it raised, in order.
    """
    using = using or outbox_alias()
    assert not connections[using].in_atomic_block, "Its callers cannot see this transaction."
    barrier = Barrier(len(callers), timeout=60)

    def run(caller: Callable[[], Any]) -> Any:
        try:
            leave_pool(connections[using])
            connections[using].ensure_connection()
            barrier.wait()
            return caller()
        except Exception as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(callers)) as pool:
        return list(pool.map(run, callers))


def _counted(
    found: list[EntityVersion], asked: list[EntityVersion], command: str, count: int, what: str
) -> list[EntityVersion]:
    __tracebackhide__ = True
    found = [version for version in found if version.command == command]
    if len(found) != count:
        listed = "".join(f"\n  {v} {v.data!r} {v.response!r}"[:200] for v in asked[:LISTED])
        raise AssertionError(
            f"Expected {count} {what}; found {len(found)}. It was asked:{listed or ' nothing'}"
        )
    return found
