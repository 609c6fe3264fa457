"""Settings of the benchmarks: the database of BENCHMARK_URL, else of POSTGRES_URL."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

_url = urlsplit(os.environ.get("BENCHMARK_URL") or os.environ["POSTGRES_URL"])

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["outbox_app", "benchmarks"]
DATABASES = {
    "default": {
        "ENGINE": f"django.db.backends.{'mysql' if _url.scheme == 'mysql' else 'postgresql'}",
        "HOST": _url.hostname,
        "PORT": _url.port,
        "USER": _url.username,
        "PASSWORD": _url.password or "",
        "NAME": _url.path.strip("/"),
        "TEST": {"NAME": f"outbox_benchmark_{os.getpid()}"},
    }
}
