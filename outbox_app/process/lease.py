"""Which drainer owns which shards: leases by heartbeat, by the database's clock and the observer's.

One drainer owns a shard at a time. A live drainer updates only its own row. A drainer without a
heartbeat for the time of its lease is removed by the first drainer that notices, which frees its
shards; it learns of this from its own next heartbeat, which finds no row. A new heartbeat is as old
as the database's clock says, but not older than the observer's last look; then the observer's clock
counts. So no step of the database's clock (by a fail-over; in spring, without USE_TZ) removes a
live drainer that was watched, or keeps a dead one. A drainer itself trusts its lease only until
some time *before* it could have expired, on a clock that counts suspended time. Two cases remain. A
process that is suspended between its check and its publish sends one batch when it resumes. If its
clock was suspended, too, in a frozen virtual machine, it sends all until its next heartbeat.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from django.db import transaction
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast

from ..conf import BEATS, SHARDS
from ..database.clock import DatabaseNow
from ..database.encoding import replaced
from ..exceptions import LeaseLost
from ..models import Lease, Process

#: The part of its lease for which a drainer trusts it.
TRUST = 0.9
#: A heartbeat; on our clock, when it was sent, and when we last looked.
Seen = tuple[datetime, float, float]


def elapsed() -> float:
    """Return seconds of a monotonic clock that, on Linux, counts suspended time."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)  # Linux
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def remove_silent(
    rows: QuerySet[Any],
    seen: dict[UUID, Seen],
    *,
    clock: Callable[[], float] = elapsed,
    but: UUID | None = None,
    removed: list[Any] | None = None,
) -> list[Any]:
    """Remove rows whose lease has run out; return the others, each with the database's ``now``.

    Args:
        seen: What earlier looks have seen, by id: the same dict in each call.
        but: The id of the caller's own row, which is not removed.
        removed: A list that gets the rows that were removed.
    """
    live, before_all = [], dict(seen)
    seen.clear()
    asked = clock()
    # Read the heartbeat as text, too: on PostgreSQL the text has the offset from UTC. Without
    # USE_TZ the time itself is ambiguous in the hour that occurs twice.
    found: QuerySet[Any] = rows.annotate(now=DatabaseNow(), beat=Cast("heartbeat_at", TextField()))
    processes = list(found)
    answered = clock()
    for row in processes:
        before, since, at_last_look = before_all.get(row.id, (None, 0.0, 0.0))
        if before != row.heartbeat_at:
            since = min(answered, answered - (row.now - row.heartbeat_at).total_seconds())
            if before and before < row.heartbeat_at:  # else one of these clocks was set back
                since = max(since, at_last_look)
        if row.id != but and asked - since > row.lease_seconds:
            # Remove the row only if its heartbeat is still the same: a new heartbeat wins, also one
            # on a clock that was set back.
            silent = found.filter(id=row.id, beat=row.beat)
            if silent.delete()[0]:
                if removed is not None:
                    removed.append(row)
                continue
        live.append(row)
        seen[row.id] = row.heartbeat_at, since, asked
    return live


def alive(rows: QuerySet[Any]) -> list[Any]:
    """Return the processes whose lease has not run out. Changes nothing."""
    found = rows.annotate(now=DatabaseNow())
    return [p for p in found if (p.now - p.heartbeat_at).total_seconds() <= p.lease_seconds]


@dataclass(eq=False, kw_only=True)
class LeaseHolder:
    """A drainer's place among the others, and the parts of a resource (the shards) that it owns.

    ``on_takeover`` is called with the id of a dead drainer and the parts that it owned, inside the
    transaction that takes them over: there is no takeover without its record.
    """

    using: str
    lease_seconds: float
    resource: str = "jobs"
    parts: int = SHARDS
    clock: Callable[[], float] = elapsed
    on_takeover: Callable[[UUID, list[int]], None] = lambda owner, parts: None

    def __post_init__(self) -> None:
        #: Seconds between two heartbeats, and between two looks at the other drainers.
        self.beat_seconds = self.lease_seconds / BEATS
        self.id = uuid4()
        self.joined = False
        self.owned: frozenset[int] = frozenset()
        self._beaten_at = self._shared_at = float("-inf")
        #: The same moment on the database's clock and on ours.
        self._same_moment: tuple[datetime, float] | None = None
        self._seen: dict[UUID, Seen] = {}
        #: Host and process id of the processes that the last look has found, and of those before.
        self._found: dict[UUID, str] = {}
        self._names: dict[UUID, str] = {}

    def share(self) -> None:
        """Share the parts with the other drainers; join them first if that is not done."""
        started = self.clock()
        if self.joined:
            self.rebalance()
        else:
            self.join()
        self._shared_at = started  # if it fails, it is due again

    def join(self) -> None:
        """Insert the row that makes this drainer visible, and take a share of the parts."""
        started = self.clock()
        self.id = uuid4()
        Process.objects.using(self.using).create(
            id=self.id,
            resource=self.resource,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            lease_seconds=self.lease_seconds,
        )
        self._beaten_at = started
        self.joined = True
        self.rebalance()

    def leave(self) -> bool:
        """Hand the parts back and delete the row. Return whether they were ours until now."""
        self.owned = frozenset()
        self._leases().filter(owner=self.id).update(owner=None)
        removed, _ = Process.objects.using(self.using).filter(id=self.id).delete()
        self.joined = False
        return bool(removed)

    def beat_is_due(self) -> bool:
        return self.clock() - self._beaten_at >= self.beat_seconds

    def sharing_is_due(self) -> bool:
        """Return whether to look at the other drainers. Within batches only heartbeats are sent."""
        return not self.joined or self.clock() - self._shared_at >= self.beat_seconds

    def beat(self, **columns: object) -> None:
        """Renew the lease, and write ``columns`` of the drainer's row with it.

        Raises ``LeaseLost`` if the row is gone: other drainers take the parts.
        """
        started = self.clock()
        row = Process.objects.using(self.using).filter(id=self.id)
        if text := columns.get("trouble"):
            columns["trouble"] = replaced(str(text), using=self.using)
        if not row.update(heartbeat_at=DatabaseNow(), **columns):
            raise self._removed()
        self._beaten_at = started

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is certain to hold."""
        return self._beaten_at + self.lease_seconds * TRUST - self.clock()

    def now(self) -> datetime | None:
        """Return the database's time without a query; None before the first look at the others."""
        if self._same_moment is None:
            return None
        then, at = self._same_moment
        return then + timedelta(seconds=self.clock() - at)

    def rebalance(self) -> None:
        """Give up parts beyond a fair share, or take free ones. Call it only between batches."""
        # The leases are read before the drainers. The other way round, a drainer that joins and
        # claims between the two reads would look like an owner without a row, and lose its shards.
        owners = dict(self._leases().values_list("part", "owner"))
        if len(owners) < self.parts:
            owners |= self._enter_missing(owners)
        live = self._remove_silent()
        if self.id not in live:
            raise self._removed()
        mine = sorted(part for part, owner in owners.items() if owner == self.id)
        share, rest = divmod(self.parts, len(live))
        share += sorted(live).index(self.id) < rest
        if len(mine) > share:
            # Stop using the other parts before the statement, even if it fails.
            self.owned = frozenset(mine[:share])
            self._leases().filter(owner=self.id, part__in=mine[share:]).update(owner=None)
            return
        free = sorted(p for p, o in owners.items() if o is None or o not in live)
        if free and len(mine) < share:
            self._claim({part: owners[part] for part in free[: share - len(mine)]})
            mine = list(self._leases().filter(owner=self.id).values_list("part", flat=True))
        self.owned = frozenset(mine)

    def name_of(self, owner: UUID) -> str:
        """Return ``host:pid (id)`` of a process that owned parts, or its id if no more is known.

        Known are the processes of the last two looks: another process may have removed the row.
        """
        name = self._names.get(owner)
        return f"{name} ({owner})" if name else str(owner)

    def _removed(self) -> LeaseLost:
        self.owned = frozenset()
        self.joined = False
        return LeaseLost(
            f"Process {self.id} sent no heartbeat for {self.lease_seconds:g} s, so other processes "
            "removed it and take over its leases."
        )

    def _enter_missing(self, owners: Container[int]) -> dict[int, UUID | None]:
        missing = [part for part in range(self.parts) if part not in owners]
        rows = [Lease(resource=self.resource, part=part) for part in missing]
        Lease.objects.using(self.using).bulk_create(rows, ignore_conflicts=True)
        return dict.fromkeys(missing)

    def _remove_silent(self) -> set[UUID]:
        asked = self.clock()
        rows = Process.objects.using(self.using).filter(resource=self.resource)
        removed: list[Process] = []
        live = remove_silent(rows, self._seen, clock=self.clock, but=self.id, removed=removed)
        found = {row.id: str(row) for row in (*live, *removed)}
        self._names, self._found = self._found | found, found
        if live:
            self._same_moment = live[0].now, asked
        return {row.id for row in live}

    def _claim(self, free: dict[int, UUID | None]) -> None:
        # The condition on the owner settles every race: of two claims for a part the second finds
        # it taken, and a part that its owner has handed back meanwhile is not taken over from it.
        for owner in set(free.values()):
            parts = [part for part in free if free[part] == owner]
            leases = self._leases().filter(owner=owner, part__in=parts)
            if owner is None:
                leases.update(owner=self.id)
                continue
            with transaction.atomic(using=self.using):
                if leases.update(owner=self.id):
                    self.on_takeover(owner, parts)

    def _leases(self) -> QuerySet[Lease]:
        leases = Lease.objects.using(self.using)
        return leases.filter(resource=self.resource, part__lt=self.parts)
