"""Settings of the test suite: one alias for each supported database.

``default`` is SQLite; ``postgres`` and ``mariadb`` exist when POSTGRES_URL and MARIADB_URL are
set, as ``python -m tests.servers run`` does. If MYSQL_URL is set, ``mysql`` takes the place of
``mariadb`` (see ``tests.on_mysql``). Each test run works in databases of its own, named
after its process, so that runs may go on side by side. A process that a test starts finds the
databases of the test through the same variables (see the fixture ``environment``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.servers import sets
from tests.servers.mysql import MARIADB
from tests.servers.ports import folder_of_servers

sets.take()
TEST_NAME = f"test_outbox_{os.getpid()}"

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

INSTALLED_APPS = [
    "outbox_app",
    "outbox_app.events",
    "outbox_app.entities",
    "outbox_app.prepared",
    "outbox_app.door",
    "outbox_app.fleet",
    "outbox_app.ids",
    "outbox_app.django_tasks",
    "outbox_app.shadow",
    "outbox_app.pipeline",
    "tests",
    "tests.mixin",
    "tests.events.log.own_log",
    "tests.entities",
    "tests.events.projections",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    }
]

OUTBOX: dict[str, Any] = {"DATABASE": os.environ.get("OUTBOX_ALIAS", "default")}
# The models of the tests are written to "default"; a test names the alias that it stages on.
SILENCED_SYSTEM_CHECKS = ["outbox.E023", "outbox.E040"]
if seconds := os.environ.get("OUTBOX_LEASE_SECONDS"):
    OUTBOX["LEASE_SECONDS"], OUTBOX["PUBLISH_TIMEOUT"] = float(seconds), float(seconds) / 2


def _sqlite(name: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": name,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 30,
            "init_command": "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;",
        },
        # A file, as threads and other processes have to see the same rows.
        "TEST": {"NAME": str(Path(folder_of_servers(), f"{TEST_NAME}.sqlite3"))},
    }


def _server(engine: str, url: str, **settings: Any) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        # No dependency on "default": a run may need this database alone.
        "TEST": {"NAME": TEST_NAME, "DEPENDENCIES": [], **settings.pop("TEST", {})},
        **settings,
    }


DATABASES = {"default": _sqlite(os.environ.get("SQLITE_FILE", ":memory:"))}
if url := os.environ.get("POSTGRES_URL"):
    DATABASES["postgres"] = _server("postgresql", url)
if url := os.environ.get("MYSQL_URL") or os.environ.get("MARIADB_URL"):
    # MySQL's own default is strict, and ONLY_FULL_GROUP_BY.
    mode = "DEFAULT" if MARIADB == "mysql" else "'STRICT_TRANS_TABLES'"
    DATABASES[MARIADB] = _server(
        "mysql",
        url,
        OPTIONS={"charset": "utf8mb4", "init_command": f"SET sql_mode = {mode}"},
        TEST={"CHARSET": "utf8mb4", "COLLATION": "utf8mb4_general_ci"},
    )
