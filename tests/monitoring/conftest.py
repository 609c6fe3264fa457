"""What tests of the exported facts share: a secret, and a database that is away."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections

#: What nobody may see who only has the address of a view.
SECRET = "password=hunter2"


@pytest.fixture
def away(settings: Any, django_db_blocker: Any) -> Iterator[str]:
    """An alias with the outbox, whose database is unreachable. Not for the mark ``django_db``."""
    alias = f"away_{uuid4().hex[:8]}"
    connections.settings[alias] = {
        **deepcopy(connections.settings["default"]),
        "NAME": "/nowhere/at/all.sqlite3",
    }
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    try:
        with django_db_blocker.unblock():
            yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]
