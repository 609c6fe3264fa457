"""How far a reader by time has handled each stream: what its cursor cannot tell.

A row that commits late lies behind the cursor though nobody has read it. So the highest version
handled is noted, a row a stream, in the transaction of the effects. Rows of another run, from
before the subscription was reset or replayed, do not count. Other readers note nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..eventlog.state import WindowState
from ..eventlog.windows.time import TimeState
from ..models import DeliveredVersion
from ..models.upsert import upsert


def noted(
    subscription: str, log: str, state: WindowState, streams: Collection[str], *, using: str
) -> dict[str, int]:
    """Return the highest version handled, of those streams of which it was noted."""
    if not isinstance(state, TimeState) or not streams:
        return {}
    rows = DeliveredVersion.objects.using(using).filter(
        subscription=subscription, log=log, stream__in=streams, run=state.run
    )
    return dict(rows.values_list("stream", "version"))


def note(
    subscription: str, log: str, state: WindowState, versions: Mapping[str, int], *, using: str
) -> None:
    """Write how far streams were handled, in the open transaction of the effects."""
    if not isinstance(state, TimeState) or not versions:
        return
    # In one order, so that two transactions never wait for one another.
    rows = [
        DeliveredVersion(
            subscription=subscription, log=log, stream=stream, version=version, run=state.run
        )
        for stream, version in sorted(versions.items())
    ]
    upsert(
        DeliveredVersion.objects.using(using),
        rows,
        update=["version", "run"],
        unique=["subscription", "log", "stream"],
    )
