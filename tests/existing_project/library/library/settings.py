import json
from pathlib import Path

import environ
import sentry_sdk
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.transport import Transport

env = environ.Env()
DATA = Path(env("DATA_DIR"))

SECRET_KEY = "a library"
USE_TZ = True
TIME_ZONE = "Europe/Vienna"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "library.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_USER_MODEL = "members.Member"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_celery_results",
    "django_celery_beat",
    "members",
    "loans",
]
DATABASES = {
    "default": {**env.db("DATABASE_URL"), "ATOMIC_REQUESTS": True},
    "reports": {"ENGINE": "django.db.backends.sqlite3", "NAME": DATA / "reports.sqlite3"},
}
DATABASE_ROUTERS = ["library.routers.Reports"]

CELERY_BROKER_URL = env("BROKER_URL")
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": env("KEY_PREFIX")}
CELERY_RESULT_BACKEND = "django-db"
CELERY_RESULT_EXTENDED = True
CELERY_TASK_TRACK_STARTED = True
CELERY_TASK_ROUTES = {
    "loans.tasks.remind": {"queue": "mail"},
    "loans.tasks.report_*": {"queue": "reports", "priority": 3},
}
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_BEAT_SCHEDULE = {
    "overdue": {"task": "loans.tasks.look_for_overdue", "schedule": 1.0, "args": ["beat"]},
}


class FileTransport(Transport):
    """Writes what would be sent to Sentry into a file."""

    def capture_envelope(self, envelope):
        if event := envelope.get_event():
            error = event["exception"]["values"][-1]["type"]
            with (DATA / "sentry.jsonl").open("a") as file:
                print(json.dumps([event.get("transaction"), error]), file=file)


sentry_sdk.init(
    dsn="https://key@sentry.invalid/1",
    transport=FileTransport,
    integrations=[DjangoIntegration(), CeleryIntegration(monitor_beat_tasks=True)],
    traces_sample_rate=1.0,
)
