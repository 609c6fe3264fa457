"""A project with a door: settings, told its peers by the environment.

``DJANGO_SETTINGS_MODULE=tests.door.project``. ``application`` is what gunicorn serves.
"""

from __future__ import annotations

import json
import os
from typing import Any

from outbox_app.process import backoff
from tests.settings import *  # noqa: F403
from tests.settings import OUTBOX

ROOT_URLCONF = "tests.door.urls"
ALLOWED_HOSTS = ["127.0.0.1"]
OUTBOX["PEERS"] = json.loads(os.environ["DOOR_PEERS"])
backoff.MAX_BACKOFF = float(os.environ.get("DOOR_BACKOFF", backoff.MAX_BACKOFF))
OUTBOX |= json.loads(os.environ.get("DOOR_OUTBOX", "{}"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"outbox_app": {"handlers": ["console"], "level": "INFO"}},
}


def __getattr__(name: str) -> Any:
    if name == "application":
        from django.core.wsgi import get_wsgi_application

        return get_wsgi_application()
    raise AttributeError(name)
