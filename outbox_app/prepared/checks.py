"""Senders of prepared events: their fences.

The alias of a sender is known only for keepers of the setting ``PEERS``. ``migrate`` checks before
it makes tables: what cannot be read is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import django.db
from django.core.checks import CheckMessage, Warning
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder

from ..conf import outbox_settings
from ..door.models import Peer
from ..door.peers import peer_faults
from ..exceptions import NotMigrated
from ..process.preflight import require_migrated
from .models import Fence


def check_fences(databases: Sequence[str] | None = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report aliases that prepare events for a keeper of the setting, and have no fences."""
    for name, fields in outbox_settings().PEERS.items():
        peer = Peer() if peer_faults(name, fields) else Peer(name=name, **fields)
        is_keeper = peer.direction in (Peer.Direction.KEEPER, Peer.Direction.BOTH)
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


DATABASE = (check_fences,)
