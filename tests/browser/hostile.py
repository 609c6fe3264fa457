"""What strangers write into rows: markup, scripts, and more than anybody reads.

As in ``data``, each function runs in the process that ``Project.ask`` has for it.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.timezone import now

from outbox_app.django_tasks.models import TaskResult
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.fleet.models import Server
from outbox_app.models import DeadJob, Incident, Process, StagedJob, Statistic
from outbox_app.prepared.models import PreparedEvent
from tests.jobs.dead.rows import message

#: What strangers write: markup, a script, an address that is one, terminal codes, text that runs
#: backwards, and more than anybody reads.
MARKUP = "\"'><script>window.hacked='script'</script><img src=x onerror=\"window.hacked='img'\">"
LINK = "javascript:window.hacked='link'"
CODES = "\x1b[31mred\x07\u202egnp.exe"
LONG = "L" * 1_000_000


def plant() -> dict[str, str]:
    """Plant it in every column that a stranger can fill. Return the pages of the rows, by name."""
    short, text = f"{MARKUP} {LINK}", f"{MARKUP} {LINK} {CODES} {LONG}"
    everything = {MARKUP: [MARKUP, LINK, CODES, LONG[:1000]]}
    headers = {"task": MARKUP, MARKUP: LINK, "eta": MARKUP}
    job = {
        "task": short, "task_id": short, "queue": short, "ordering_key": short, "app": short,
        "shard": 127, "body": json.dumps([[MARKUP], everything, {}]).encode(),
        "envelope": message(headers=headers, routing_key=LINK),
    }  # fmt: skip
    name = f"{MARKUP[:60]}{CODES}"
    rows: list[Any] = [
        StagedJob(**job, available_at=now() + timedelta(days=9)),
        DeadJob(**job, staged_id=1, died_at=now(), error=short, reason=text),
        # Not one of the drainers that share the shards.
        Process(id=uuid4(), resource=f"subscription:{short}"[:100], host=short, pid=1,
                lease_seconds=9999, trouble=text),
        Incident(kind="unknown", first_id=1, last_id=2, drainer=short, detail=text,
                 shards=[MARKUP]),
        Event(stream=short, version=1, type=short, topic=short, slice=1, data=everything,
              metadata={LINK: LONG}),
        Subscription(name=name),
        Cursor(subscription=name, partition=0, log="outbox_event", state="{}", error=text),
        ParkedStream(subscription=name, partition=0, log="outbox_event", stream=short, version=1,
                     position=1, error=text),
        Gap(kind="version", subscription=name, log="outbox_event", stream=short, first=1, last=1,
            settled_by=short, reason=text),
        Statistic(source=short[:128], minute=now(), name=LINK[:40], value=1, dimension="<b>",
                  label=short),
        Server(service=short[:80], node=short, address=short, version=short[:40],
               lease_seconds=9999),
        PreparedEvent(sender=short[:100], event_id=uuid4(), type=short, stream=short,
                      state="undecided", last_answer=text, reason=text, decide_by=now()),
        TaskResult(task_id=short[:36], task=short, call=json.dumps(everything), status="FAILED",
                   errors=json.dumps([{"exception_class_path": short, "traceback": text}]),
                   worker_ids=json.dumps([text]), enqueued_at=now(),
                   kept_from=now()),
    ]  # fmt: skip
    pages = {}
    for row in rows:
        row.save(force_insert=True)
        if row._meta.model_name != "cursor":
            address = f"admin:{row._meta.app_label}_{row._meta.model_name}_change"
            pages[row._meta.model_name] = reverse(address, args=[quote(row.pk)])
    return pages


def clean() -> None:
    """Remove what ``plant`` has planted."""
    for model, column in (
        (StagedJob, "task"), (DeadJob, "task"), (Process, "host"), (Incident, "drainer"),
        (Event, "stream"), (Subscription, "name"), (Cursor, "subscription"),
        (ParkedStream, "subscription"), (Gap, "subscription"), (Statistic, "source"),
        (TaskResult, "task"), (Server, "node"), (PreparedEvent, "sender"),
    ):  # fmt: skip
        model.objects.filter(**{f"{column}__startswith": MARKUP[:20]}).delete()
