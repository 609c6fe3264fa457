"""Settings of one contender of ``benchmarks.peers``: only its applications, in its own database."""

from __future__ import annotations

import os

from .settings import DATABASES, DEFAULT_AUTO_FIELD, SECRET_KEY, USE_TZ

__all__ = ["DEFAULT_AUTO_FIELD", "SECRET_KEY", "USE_TZ"]
INSTALLED_APPS = os.environ["BENCHMARK_APPS"].split(",")
DATABASES = {
    "default": {**DATABASES["default"], "NAME": f"peer_{INSTALLED_APPS[-1].replace('.', '_')}"}
}
MONITORING_METRICS_ENABLED = False
JAIMINHO_CONFIG = {"PERSIST_ALL_EVENTS": True, "DELETE_AFTER_SEND": True}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
