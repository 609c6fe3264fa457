"""Settings: INSTALLED_APPS has Django's own, and the apps of the package that SHOP_APPS names."""

from __future__ import annotations

import os

from tests.settings import MIDDLEWARE, PASSWORD_HASHERS, TEMPLATES, _sqlite

__all__ = ["MIDDLEWARE", "PASSWORD_HASHERS", "TEMPLATES"]

APPS = os.environ["SHOP_APPS"].split()
SECRET_KEY = "shop"
USE_TZ = True
ROOT_URLCONF = "tests.apps.shop.urls" if "outbox_app" in APPS else "tests.urls"
WSGI_APPLICATION = "tests.apps.shop.wsgi.application"
STATIC_URL = "static/"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [
    *("django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"),
    *("django.contrib.messages", "django.contrib.sessions", "django.contrib.staticfiles"),
    *APPS,
    *(["tests.apps.shop"] if "outbox_app" in APPS else []),
]
if {"outbox_app.events", "outbox_app.entities"} <= set(APPS):
    INSTALLED_APPS.append("tests.entities")
if "SHOP_REVERSED" in os.environ:
    INSTALLED_APPS.reverse()
DATABASES = {"default": _sqlite(os.environ["SQLITE_FILE"])}
OUTBOX: dict[str, object] = {}
if "outbox_app.prepared" in APPS:
    DATABASES["business"] = _sqlite(f"{os.environ['SQLITE_FILE']}-business")
if "outbox_app.shadow" in APPS or "SHOP_MODE" in os.environ:
    OUTBOX["TASK_MODES"] = {"shop.shadowed": "shadow"}
if "SHOP_SINK" in os.environ:
    OUTBOX["SINK"] = {"outbox_event": ("/nowhere", 1)}
if {"outbox_app", "outbox_app.django_tasks"} <= set(APPS):
    TASKS = {"default": {"BACKEND": "outbox_app.django_tasks.OutboxBackend"}}
if "SHOP_JOBS_ELSEWHERE" in os.environ:
    DATABASES["jobs"] = _sqlite(f"{os.environ['SQLITE_FILE']}-jobs")
    DATABASE_ROUTERS = ["tests.apps.shop.routers.JobsAlone"]
    OUTBOX["ADMIN_DATABASES"] = ("jobs",)
