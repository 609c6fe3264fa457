"""The project's Celery app, and its tasks."""

from __future__ import annotations

import os
import sys

from django.db import transaction

from outbox_app import idempotent
from outbox_app.celery import OutboxCelery

app = OutboxCelery("shop", broker=os.environ.get("SHOP_BROKER", "memory://"))
if folder := os.environ.get("SHOP_FOLDER"):
    places = ("data_folder_in", "data_folder_out", "control_folder")
    app.conf.broker_transport_options = dict.fromkeys(places, folder)
app.conf.worker_hijack_root_logger = False


@app.task(name="shop.note")
@idempotent
def note(text: str) -> str:
    return text


@app.task(name="shop.shadowed")
def shadowed() -> None: ...


@app.task(name="shop.report")
def report(path: str) -> None:
    """Stage a job, and write which modules of the package this worker has."""
    with transaction.atomic():
        note.delay("from a worker")
    with open(path, "w") as file:
        names = [name for name in sys.modules if name.startswith("outbox_app.")]
        file.write("\n".join([*names, ""]))
