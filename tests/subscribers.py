"""Subscriptions for tests that start processes: declared only where a test asks for them.

``OUTBOX_TEST_SUBSCRIBER`` holds the arguments of ``@subscriber`` as JSON. Each event leaves a row
in ``Incident``, a table that would show it twice.
"""

from __future__ import annotations

import json
import os

from outbox_app.events import subscriber
from outbox_app.models import Incident


def note(events):
    """Write down every event."""
    alias = os.environ["OUTBOX_ALIAS"]
    rows = [
        Incident(kind="unknown", detail=event.stream, first_id=event.version, last_id=event.id)
        for event in events
    ]
    Incident.objects.using(alias).bulk_create(rows)


if "OUTBOX_TEST_SUBSCRIBER" in os.environ:
    subscriber(**json.loads(os.environ["OUTBOX_TEST_SUBSCRIBER"]))(note)
