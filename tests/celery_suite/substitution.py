"""A pytest plugin that puts ``OutboxCelery`` in the place of ``Celery``, before tests are imported.

Django is set up, so that each call asks whether a transaction is open. None is: calls are sent.
``DJANGO_SETTINGS_MODULE`` stays unset, as it is where Celery's own tests run.
"""

from __future__ import annotations

import celery
import celery.app
import celery.app.base
import django
import pytest
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "outbox_app"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=True,
)
django.setup()

from outbox_app.celery import OutboxCelery  # noqa: E402  (models need settings)

for module in (celery, celery.app, celery.app.base):
    module.Celery = OutboxCelery


def pytest_sessionstart() -> None:
    """End the run if Celery's tests would make apps of another class."""
    from celery.contrib.testing.app import TestApp

    if not isinstance(TestApp(), OutboxCelery):
        raise pytest.UsageError("celery.contrib.testing was imported before this plugin.")
