"""Settings of the benchmarks: the database of POSTGRES_URL, nothing but the app."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_url = urlsplit(os.environ["POSTGRES_URL"])

SECRET_KEY = "benchmarks"
USE_TZ = True
INSTALLED_APPS = ["outbox_app"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _url.hostname,
        "PORT": _url.port,
        "USER": _url.username,
        "PASSWORD": _url.password or "",
        "NAME": _url.path.strip("/"),
    }
}
