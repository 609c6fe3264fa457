"""A projection of versions, for ``tests.events.projections.declared.declare``."""

from __future__ import annotations

import json

from outbox_app.events import Projection
from tests.entities.models import AccountVersion
from tests.events.projections.models import Status


class StateOf(Projection):
    """The newest command of each entity, its answer, and the state after it."""

    model = Status
    logs = (AccountVersion,)

    def apply(self, event, row):
        row = row or Status()
        answer = f"refused: {event.response['code']}" if event.rejected else event.response
        row.status = f"{event.command_id} {answer}"
        row.path = json.dumps(event.state, sort_keys=True, ensure_ascii=False)
        return row
