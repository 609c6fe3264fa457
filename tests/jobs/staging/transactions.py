"""Transactions that end as a test wants them to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction


@contextmanager
def rolled_back(using: str) -> Iterator[None]:
    """``atomic()`` on an alias, rolled back by an exception that is caught outside of it."""
    try:
        with transaction.atomic(using=using):
            yield
            raise _RollBack
    except _RollBack:
        pass


class _RollBack(Exception):
    pass
