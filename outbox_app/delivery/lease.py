"""Which drainer owns which shards: leases by heartbeat, judged by the database's clock.

One drainer owns a shard at a time. A live drainer rewrites only its own row. One that is silent for
its lease is removed by whoever notices first, and its shards are free from then on; it learns that
from its own next heartbeat, which finds no row. Locally a drainer trusts its lease only until some
time *before* it could have expired, on the monotonic clock. What this cannot prevent: a process
stopped between its check and its publish sends the batch in hand when it goes on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import datetime
from uuid import UUID, uuid4

from django.db.models import Q, QuerySet

from ..conf import SHARDS
from ..exceptions import LeaseLost
from ..models import DatabaseNow, Drainer, Lease

#: Heartbeats in one lease.
BEATS = 5
#: Part of the lease for which a drainer trusts itself.
TRUST = 0.9


class Membership:
    """A drainer's place among the others, and the shards it owns.

    Args:
        using: Database alias.
        lease_seconds: Silence after which others may take the shards.
        resource: What is shared.
        parts: Number of parts of the resource.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        using: str,
        lease_seconds: float,
        resource: str = "jobs",
        parts: int = SHARDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.using = using
        self.lease_seconds = lease_seconds
        self.resource = resource
        self.parts = parts
        self.clock = clock
        self.id = uuid4()
        self.joined = False
        self.owned: frozenset[int] = frozenset()
        #: Shards taken from drainers that died, since the last call of ``taken_over``.
        self._taken: dict[UUID, list[int]] = {}
        self._beaten_at = float("-inf")

    def join(self) -> None:
        """Enter the row that makes this drainer visible, and take a share of the parts."""
        leases = Lease.objects.using(self.using)
        if leases.filter(resource=self.resource).count() < self.parts:
            rows = [Lease(resource=self.resource, part=part) for part in range(self.parts)]
            leases.bulk_create(rows, ignore_conflicts=True)
        started = self.clock()
        self.id = uuid4()
        Drainer.objects.using(self.using).create(
            id=self.id,
            host=socket.gethostname()[:255],
            pid=os.getpid(),
            lease_seconds=self.lease_seconds,
        )
        self._beaten_at = started
        self.joined = True
        self.rebalance()

    def leave(self) -> None:
        """Hand the parts back and go."""
        self.owned = frozenset()
        self.joined = False
        self._leases().filter(owner=self.id).update(owner=None)
        Drainer.objects.using(self.using).filter(id=self.id).delete()

    def beat_is_due(self) -> bool:
        """Say whether it is time for a heartbeat."""
        return self.clock() - self._beaten_at >= self.lease_seconds / BEATS

    def beat(self, **columns: object) -> None:
        """Renew the lease, and write ``columns`` of the drainer's row with it.

        Raises:
            LeaseLost: The row is gone: others have taken the parts.
        """
        started = self.clock()
        row = Drainer.objects.using(self.using).filter(id=self.id)
        if not row.update(heartbeat_at=DatabaseNow(), **columns):
            self.owned = frozenset()
            raise LeaseLost(
                f"Drainer {self.id} was silent for {self.lease_seconds} s; its shards are taken."
            )
        self._beaten_at = started

    def holds(self, seconds: float) -> bool:
        """Say whether the lease is certain to hold for so many seconds more."""
        return self.clock() + seconds <= self._beaten_at + self.lease_seconds * TRUST

    def rebalance(self) -> None:
        """Give up what is more than a fair share, and take what is free. Only between batches."""
        # The leases are read before the drainers. The other way round, a drainer that joins and
        # claims between the two reads would look like an owner without a row, and be robbed.
        owners = dict(self._leases().values_list("part", "owner"))
        live = self._bury_the_silent()
        if self.id not in live:
            self.owned = frozenset()
            raise LeaseLost(f"Drainer {self.id} was removed by another one.")
        mine = {part for part, owner in owners.items() if owner == self.id}
        share = self._fair_share(live)
        if len(mine) > share:
            surplus = sorted(mine)[share:]
            self._leases().filter(owner=self.id, part__in=surplus).update(owner=None)
            mine -= set(surplus)
        elif len(mine) < share:
            free = {p: o for p, o in owners.items() if o is None or o not in live}
            mine |= self._claim(dict(sorted(free.items())[: share - len(mine)]))
        self.owned = frozenset(mine)

    def taken_over(self) -> dict[UUID, list[int]]:
        """Return the parts taken from dead drainers since the last call, by their former owner."""
        taken, self._taken = self._taken, {}
        return taken

    def _bury_the_silent(self) -> set[UUID]:
        live = set()
        seen = Drainer.objects.using(self.using).annotate(now=DatabaseNow())
        for id, heartbeat_at, lease_seconds, now in seen.values_list(
            "id", "heartbeat_at", "lease_seconds", "now"
        ):
            if id != self.id and _age(heartbeat_at, now) > lease_seconds:
                # Only if it has not come back since: then its own heartbeat wins.
                silent = Drainer.objects.using(self.using).filter(
                    id=id, heartbeat_at__lte=heartbeat_at
                )
                if silent.delete()[0]:
                    continue
            live.add(id)
        return live

    def _fair_share(self, live: set[UUID]) -> int:
        share, rest = divmod(self.parts, len(live))
        return share + (sorted(live).index(self.id) < rest)

    def _claim(self, free: dict[int, UUID | None]) -> set[int]:
        # The condition on the owner settles the race: of two claims for a part the second finds it
        # taken.
        unowned = Q(owner=None) | Q(owner__in={owner for owner in free.values() if owner})
        self._leases().filter(unowned, part__in=free).update(owner=self.id)
        claimed = set(
            self._leases().filter(owner=self.id, part__in=free).values_list("part", flat=True)
        )
        for part in claimed:
            owner = free[part]
            if owner is not None:
                self._taken.setdefault(owner, []).append(part)
        return claimed

    def _leases(self) -> QuerySet[Lease]:
        return Lease.objects.using(self.using).filter(resource=self.resource)


def _age(then: datetime, now: datetime) -> float:
    return (now - then).total_seconds()
