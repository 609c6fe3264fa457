"""Senders of prepared events: their fences.

The alias of a sender is known only for keepers of the setting ``PEERS``. ``migrate`` checks before
it makes tables: what cannot be read is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import django.db
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from ..door.conf import door_settings
from ..exceptions import NotMigrated
from ..process.preflight import require_migrated
from .conf import prepared_settings
from .models import Fence

#: Days for which a sender keeps a fence after the last time that a keeper may ask about it.
FENCE_MARGIN = 7


def check_fences(databases: Sequence[str] | None = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report aliases that prepare events for a keeper of the setting, and have no fences."""
    if not (registered := door_settings().PEERS):
        return
    from ..door.peers import BOTH, KEEPER, Peer, peer_faults

    for name, fields in registered.items():
        peer = Peer() if peer_faults(name, fields) else Peer(name=name, **fields)
        is_keeper = peer.direction in (KEEPER, BOTH)
        if not is_keeper or peer.database not in (databases or ()):
            continue
        try:
            with suppress(django.db.Error):
                if MigrationRecorder(connections[peer.database]).has_table():
                    require_migrated(peer.database, Fence)
        except NotMigrated as error:
            yield Warning(
                f"Nothing can be prepared for the keeper {name!r}: {error}",
                hint="Let the database routers allow the model Fence there, and migrate.",
                id="outbox.W047",
            )


def check_retention(**kwargs: Any) -> Iterator[CheckMessage]:
    conf = prepared_settings()
    longest = conf.PREPARED_MAX_DECIDE_BY
    least = math.ceil(longest / 86400) + FENCE_MARGIN
    if (kept := conf.FENCE_RETENTION_DAYS) < least:
        yield Error(
            f"OUTBOX['FENCE_RETENTION_DAYS'] is {kept}, but a keeper may ask about an event "
            f"for {longest / 86400:g} days (PREPARED_MAX_DECIDE_BY): the event stays undecided if "
            "its fence is removed before.",
            hint=f"Set it to at least {least}: a week more than any keeper's longest decide_by.",
            id="outbox.E043",
        )


ALWAYS = (check_retention,)
DATABASE = (check_fences,)
