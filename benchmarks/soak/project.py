"""Settings of the soak's processes: the database of BENCHMARK_URL, ``OUTBOX`` from SOAK_OUTBOX.

Leases, timeouts and pauses are short, so that a takeover needs only seconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

from benchmarks.settings import DATABASES, DEFAULT_AUTO_FIELD, SECRET_KEY, USE_TZ
from outbox_app.process import backoff

__all__ = ["DATABASES", "DEFAULT_AUTO_FIELD", "SECRET_KEY", "USE_TZ"]

INSTALLED_APPS = ["outbox_app", "outbox_app.events", "benchmarks.soak"]
DATABASES = {"default": {**DATABASES["default"], "OPTIONS": {"connect_timeout": 5}}}
if DATABASES["default"]["ENGINE"].endswith("mysql"):
    level = os.environ.get("SOAK_ISOLATION", "read committed")
    DATABASES["default"]["OPTIONS"] |= {"charset": "utf8mb4", "isolation_level": level}
OUTBOX: dict[str, Any] = {
    "LEASE_SECONDS": 4,
    "PUBLISH_TIMEOUT": 1.5,
    "INTERVAL": 0.2,
    "MAX_RETRY_DELAY": 2,
    "HOLD_HORIZON": 1,
    **json.loads(os.environ.get("SOAK_OUTBOX", "{}")),
}
backoff.MAX_BACKOFF = 1.0
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"timed": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "timed"}},
    "loggers": {"outbox_app": {"handlers": ["console"], "level": "INFO"}},
}
