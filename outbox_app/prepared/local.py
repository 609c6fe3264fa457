"""Keeper and sender in one project, on two database aliases: function calls without HTTP.

When a call returns, the keeper has committed its rows. They stay, even if a transaction of the
caller that is open on the keeper's alias rolls back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from uuid import UUID

from django.db import connections

from ..aliases import outbox_alias
from ..database.transaction_guard import LOST
from ..database.transactions import is_atomic, is_in_test, lacks_autocommit, own_connection
from . import keeper
from .exceptions import InvalidPrepared, KeeperUnavailable
from .keeper import Answer
from .models import PreparedEvent

#: The prefix of senders that are database aliases. The name of a peer has no colon.
PREFIX = "alias:"


class LocalKeeper:
    def __init__(self, alias: str) -> None:
        self.sender = PREFIX + alias
        self.using = outbox_alias()
        if alias == self.using:
            raise InvalidPrepared(
                f"The keeper is on {alias!r} as well, so the event need not be prepared. Call "
                "publish() or stage() in the same transaction."
            )

    def prepare(self, rows: Sequence[PreparedEvent]) -> list[Answer]:
        with self._outside():
            return keeper.prepare(self.sender, rows, using=self.using)

    def decide(self, wanted: Mapping[UUID, str]) -> list[Answer]:
        with self._outside():
            return keeper.decide(self.sender, wanted, by=keeper.CALL, using=self.using)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Leave a transaction of the caller, whose rollback would undo the work; not a test's."""
        opened = is_atomic(self.using) or lacks_autocommit(connections[self.using])
        apart = opened and not is_in_test(self.using)
        own = own_connection(self.using, seconds=keeper.LOCK_SECONDS) if apart else nullcontext()
        try:
            with own:
                yield
        except LOST as error:
            if not connections[self.using].in_atomic_block:
                connections[self.using].close_if_unusable_or_obsolete()
            raise KeeperUnavailable(
                f"The keeper on {self.using!r} gave no answer: {error}"
            ) from error
