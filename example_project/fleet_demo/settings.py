"""Settings of the servers and of their callers. Only servers have ``SERVER`` and ``PORT``."""

import os

from example_project.settings import *  # noqa: F403
from example_project.settings import OUTBOX

INSTALLED_APPS = ["outbox_app"]
INSTALLED_APPS += [f"outbox_app.{name}" for name in ("events", "entities", "door", "fleet")]
INSTALLED_APPS += [
    "example_project.fleet_demo",
    "django.contrib.auth",
    "django.contrib.contenttypes",
]
MIDDLEWARE = []
ROOT_URLCONF = "example_project.prepared_demo.urls"
WSGI_APPLICATION = "example_project.fleet_demo.wsgi.application"
# In production each side has a key of its own; see docs/reference/door.md.
WEBSITE = [{"id": "website", "secret": "env:DEMO_SECRET"}]
FELLOWS = [{"id": "fellows", "secret": "env:FLEET_SECRET"}]
OUTBOX |= {"LEASE_SECONDS": 3.0, "PUBLISH_TIMEOUT": 1.0}
if port := os.environ.get("PORT"):
    OUTBOX |= {
        "FLEET": {
            "SERVICE": "tickets",
            "ADDRESS": f"http://127.0.0.1:{port}/outbox/",
            "WEIGHT": int(os.environ["WEIGHT"]),
        },
        "PEERS": {
            "website": {
                "direction": "sender",
                "address": "http://127.0.0.1:1/",  # never called: it prepares no events
                "keys": WEBSITE,
                "commands": ["fleet_demo.*"],
            },
            "tickets": {"direction": "both", "address": "service:tickets", "keys": FELLOWS},
        },
    }
else:
    OUTBOX |= {
        "FLEET": {"DEADLINE": float(os.environ.get("DEADLINE", "4"))},
        "PEERS": {
            "tickets": {"direction": "keeper", "address": "service:tickets", "keys": WEBSITE}
        },
    }
