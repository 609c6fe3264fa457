"""A sender to be killed: prepares an event with the keeper "shop", pays, and confirms.

``python -m tests.door.payer ALIAS EVENT_ID DIES …`` under ``tests.door.project`` forks a process
for each event. It is killed where ``DIES`` says: "prepared", "fenced", "committed" or "never".
"""

from __future__ import annotations

import os
import signal
import sys
from uuid import UUID

import django
from django.db import transaction


def main(using: str, *events: str) -> None:
    django.setup()
    for id, dies in zip(events[::2], events[1::2], strict=True):
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != (0 if dies == "never" else -signal.SIGKILL):
                sys.exit(f"{dies}: {code}")
        else:
            pay(using, id, dies)
            sys.exit()


def pay(using: str, id: str, dies: str) -> None:
    from django.contrib.auth.models import Group

    from outbox_app.prepared import confirm, fence, prepare

    def reached(place: str) -> None:
        if place == dies:
            os.kill(os.getpid(), signal.SIGKILL)

    event = prepare(
        "order-17", "order.paid", {"total": 30}, using=using, to="shop", event_id=UUID(id), immune=0
    )
    reached("prepared")
    with transaction.atomic(using=using):
        fence(event)
        Group.objects.using(using).create(name=f"paid {id}")
        reached("fenced")
    reached("committed")
    confirm(event)


if __name__ == "__main__":
    main(*sys.argv[1:])
