"""A project for real drainers: settings with Celery apps, which the environment describes.

``DJANGO_SETTINGS_MODULE=tests.faults.project``. A test makes the same apps from the same arguments,
to stage their tasks and to read the broker's messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from outbox_app.celery import OutboxCelery
from outbox_app.process import backoff
from tests import tasks
from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, OUTBOX


def make(name: str, broker: str) -> OutboxCelery:
    """Return an app with the task ``note``. Its default queue has the app's name."""
    app = OutboxCelery(name, broker=broker, set_as_current=False)
    app.conf.task_default_queue = name
    app.task(name="note", shared=False)(tasks.note)
    return app


def variables(brokers: Mapping[str, str], **outbox: Any) -> dict[str, str]:
    """Return the environment of a drainer: the apps with their brokers, and ``OUTBOX``."""
    return {
        "DJANGO_SETTINGS_MODULE": __name__,
        "FAULTS_BROKERS": json.dumps(dict(brokers)),
        "FAULTS_OUTBOX": json.dumps(outbox),
    }


OUTBOX.update(json.loads(os.environ.get("FAULTS_OUTBOX", "{}")))
backoff.MAX_BACKOFF = float(os.environ.get("FAULTS_BACKOFF", backoff.MAX_BACKOFF))
if "FAULTS_POOL" in os.environ:
    DATABASES["postgres"]["OPTIONS"] = {"pool": True}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"outbox_app": {"handlers": ["console"], "level": "INFO"}},
}
apps = [make(*pair) for pair in json.loads(os.environ.get("FAULTS_BROKERS", "{}")).items()]
