"""An app whose tables are not there: its figures are missing, and nothing else is."""

from __future__ import annotations

import pytest
from django.db import transaction

from outbox_app.events.models import Gap
from outbox_app.models import StagedJob
from outbox_app.monitoring import outbox_status

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_transaction_of_a_request_stays_usable(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gap._meta, "db_table", "outbox_not_yet")
    with transaction.atomic(using=alias):
        facts = outbox_status()
        assert StagedJob.objects.using(alias).count() == 0
    assert facts.unmigrated == {
        "outbox_events": f"Run: manage.py migrate outbox_events --database {alias}"
    }
    assert "events" not in facts.sections
    assert "entities" in facts.sections
