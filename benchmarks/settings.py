"""Settings of the benchmarks: the database of BENCHMARK_URL, else of POSTGRES_URL."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit

_URLS = {"default": os.environ.get("BENCHMARK_URL") or os.environ["POSTGRES_URL"]}
_SERVERS = {
    name: os.environ[f"{name.upper()}_URL"]
    for name in ("postgres", "mariadb", "mysql", "sqlite")
    if f"{name.upper()}_URL" in os.environ
}
if len(_SERVERS) > 1:
    _URLS |= _SERVERS
if "BENCHMARK_BILLING_URL" in os.environ:
    _URLS["billing"] = os.environ["BENCHMARK_BILLING_URL"]

SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "outbox_app",
    *(f"outbox_app.{name}" for name in ("events", "entities", "prepared", "door", "fleet", "ids")),
    *(f"outbox_app.{name}" for name in ("django_tasks", "shadow", "pipeline")),
    "benchmarks",
    *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages")),
    "django.contrib.sessions",
    "django.contrib.staticfiles",
]
# The pages of the admin need these settings; the door needs ROOT_URLCONF, too.
ROOT_URLCONF = "benchmarks.urls"
STATIC_URL = "static/"
ALLOWED_HOSTS = ["testserver", "127.0.0.1"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
_PROCESSORS = ["auth.context_processors.auth", "messages.context_processors.messages"]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                *(f"django.contrib.{name}" for name in _PROCESSORS),
            ]
        },
    }
]


def _database(name: str, url: str) -> dict[str, object]:
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": parts.path,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 30,
                "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;",
            },
            "TEST": {"NAME": f"{parts.path}.test", "DEPENDENCIES": []},
        }
    return {
        "ENGINE": f"django.db.backends.{'mysql' if parts.scheme == 'mysql' else 'postgresql'}",
        "HOST": parts.hostname,
        "PORT": parts.port,
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "NAME": parts.path.strip("/"),
        "CONN_MAX_AGE": 60,
        "TEST": {"NAME": f"outbox_benchmark_{name}_{os.getpid()}", "DEPENDENCIES": []},
    }


# ``prepared`` sets BENCHMARK_PEERS, for its own process and for the keeper's.
OUTBOX = {"PEERS": json.loads(os.environ.get("BENCHMARK_PEERS", "{}"))}
DATABASES = {name: _database(name, url) for name, url in _URLS.items()}
