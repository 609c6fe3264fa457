"""A registry in the database of the outbox: a row for each process, judged by the database's clock.

Every statement is a transaction of its own, on the connection of a thread that only does this. On
PostgreSQL a change to the servers sends a NOTIFY. Reading the list removes silent processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, fields, replace
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet

from ...aliases import outbox_alias
from ...conf import outbox_settings
from ...database.clock import DatabaseNow
from ...database.transactions import own_connection
from ...database.watchdog import Watchdog
from ...process.foreground import set_timeouts
from ...process.lease import Seen, remove_silent
from ...process.waiting import PollWaiter, StopFlag, waiter
from ...process.wakeup import wake
from ..models import Server
from ..registry import SERVER, Member, Registry

#: The channel of NOTIFY on PostgreSQL.
FLEET = "outbox_fleet"


def change(rows: QuerySet[Server], **values: Any) -> int:
    """Change the rows of servers, and wake their callers; return how many rows there were."""
    count = rows.filter(kind=Server.Kind.SERVER).update(**values)
    wake(rows.db, FLEET)
    return count


class DatabaseRegistry(Registry):
    """The table ``outbox_server``, for services that share a database. It needs no other server."""

    def __init__(self) -> None:
        self.using = outbox_alias()
        self._rows: QuerySet[Server] = Server.objects.using(self.using)
        self._seen: dict[UUID, Seen] = {}

    def register(self, member: Member) -> None:
        remove_silent(self._rows, self._seen)
        self._rows.create(**asdict(member))
        self._wake_for(member)

    def beat(self, member: Member) -> Member | None:
        row = self._rows.filter(id=member.id)
        if not row.update(heartbeat_at=DatabaseNow()):
            return None
        return replace(member, **row.values("weight", "draining").get())

    def leave(self, member: Member) -> None:
        self._rows.filter(id=member.id).delete()
        self._wake_for(member)

    def members(self, service: str) -> list[Member]:
        live = remove_silent(self._rows.filter(service=service), self._seen)
        names = [field.name for field in fields(Member)]
        return [Member(**{name: getattr(row, name) for name in names}) for row in live]

    def change(self, name: str, *, weight: int | None = None, draining: bool) -> int:
        values = {"draining": draining} | ({} if weight is None else {"weight": weight})
        named = Q(node=name) | Q(address=name)
        with suppress(ValueError):
            named |= Q(id=UUID(name))
        return change(self._rows.filter(named), **values)

    @contextmanager
    def session(self, stop: StopFlag) -> Iterator[PollWaiter]:
        seconds = outbox_settings().LEASE_SECONDS
        watchdog = Watchdog(using=self.using, limit=seconds)
        waiting = waiter(stop, using=self.using, watchdog=watchdog, channel=FLEET)
        with own_connection(self.using, seconds=seconds), closing(waiting):
            set_timeouts(self.using)  # on this connection only
            with watchdog.watching():
                yield waiting

    def _wake_for(self, member: Member) -> None:
        """Wake callers only for a server: clients are not called, and many may start together."""
        if member.kind == SERVER:
            wake(self.using, FLEET)
