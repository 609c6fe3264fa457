"""Settings of the payments' project: the shop is its peer, and its database has the fences."""

import os

from example_project.settings import *  # noqa: F403
from example_project.settings import DATA_DIR, DATABASES, OUTBOX

INSTALLED_APPS = ["outbox_app", "outbox_app.events", "outbox_app.prepared", "outbox_app.door"]
INSTALLED_APPS += ["example_project.payments", "django.contrib.auth", "django.contrib.contenttypes"]
MIDDLEWARE = []
ROOT_URLCONF = "example_project.prepared_demo.urls"
DATABASES["default"]["NAME"] = str(DATA_DIR / "payments.sqlite3")
OUTBOX |= {
    "PEERS": {
        "shop": {
            "direction": "keeper",
            "address": f"http://127.0.0.1:{os.environ['SHOP_PORT']}/outbox/",
            "keys": [{"id": "demo", "secret": "env:DEMO_SECRET"}],
        }
    },
}
