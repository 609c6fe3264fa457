"""The how-to page, with its own settings: on, an emptied broker, what is seen meanwhile, off."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging.receipt import Receipt, receipt_of
from outbox_app.models import Incident, StagedJob
from tests.celery_worker import received
from tests.patience import eventually

PAGE = (Path(__file__).resolve().parents[2] / "docs/howto/receipts.md").read_text()

pytestmark = pytest.mark.django_db(transaction=True)


def status() -> str:
    out = io.StringIO()
    with suppress(SystemExit):
        call_command("outbox_status", stdout=out)
    return out.getvalue()


def sent_line(**counts: int) -> str:
    """The line of the page, with other numbers."""
    [line] = re.findall(r"^ *(sent  .*limit)$", PAGE, re.MULTILINE)
    numbers = iter(counts.values())
    return re.sub(r"\d+", lambda _: str(next(numbers)), line)


def test_the_page_from_on_to_off(
    alias: str,
    settings: Any,
    make_jobs_app: Callable[[str], Any],
    start_worker: Any,
    redis_url: str,
    client: Any,
    left: Any,
) -> None:
    [setting] = re.findall(r"^ *OUTBOX = (\{.*\})$", PAGE, re.MULTILINE)
    [pattern] = eval(setting)["RECEIPTS"].items()
    assert pattern == ("billing.*", {"limit": 3600, "attempts": 5})
    before = settings.OUTBOX
    settings.OUTBOX = {**before, "RECEIPTS": {"plain": pattern[1]}}
    app = make_jobs_app(redis_url)
    assert receipt_of(app.tasks["plain"], "plain") == Receipt(3600, 5)
    with transaction.atomic(using=alias):
        app.tasks["plain"].delay("page")
    Drain(using=alias).run(once=True)
    assert sent_line(waiting=1, running=0, again=0, not_started=0) in status()

    assert len(received(app)) == 1  # the broker is emptied
    hours_ago = DatabaseNow() - timedelta(hours=2)
    StagedJob.objects.using(alias).update(sent_at=hours_ago, available_at=hours_ago)
    assert "! No worker has started 1 sent job within its limit." in status()
    Drain(using=alias).run(once=True)
    assert Incident.objects.using(alias).get().kind == "no_receipt"
    assert sent_line(waiting=1, running=0, again=1, not_started=1) in status()

    start_worker(app)
    eventually(lambda: left() == {"Incident": 1})
    assert client.get("ran:page") == "1"
    assert "\nsent  " not in status()

    settings.OUTBOX = before
    with transaction.atomic(using=alias):
        app.tasks["plain"].delay("off")
    assert StagedJob.objects.using(alias).get().receipt is None
