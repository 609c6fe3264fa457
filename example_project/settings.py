"""Settings of the example, read from the environment by django-environ.

DATABASE_URL   sqlite file in the data folder by default, or postgres://…, mysql://…
BROKER_URL     embedded:// by default (files in the data folder), or redis://…, amqp://…
DATA_DIR       the data folder: .demo/ beside manage.py by default
SECRET_KEY, DEBUG, ALLOWED_HOSTS, LEASE_SECONDS, RECEIPT_LIMIT   as their names say

The defaults are for trying things out on one machine, not for serving the public.
"""

from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent.parent
env = environ.Env()

DATA_DIR = Path(env.str("DATA_DIR", default=str(BASE_DIR / ".demo"))).resolve()
SECRET_KEY = env.str("SECRET_KEY", default="only-for-the-demo-on-your-own-machine")
DEBUG = env.bool("DEBUG", default=True)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
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
    "example_project.shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
    },
]
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Database

DATABASES = {"default": env.db("DATABASE_URL", default=f"sqlite:///{DATA_DIR / 'shop.sqlite3'}")}
DATABASES["default"].setdefault("CONN_MAX_AGE", 60)
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # SQLite has one writer at a time. With these options writers wait for one another; without them
    # several writers fail with "database is locked".
    DATABASES["default"]["OPTIONS"] = {
        "timeout": 30,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
    }
    DATA_DIR.mkdir(parents=True, exist_ok=True)

# Celery

CELERY_BROKER_URL = env.str("BROKER_URL", default="embedded://")
if CELERY_BROKER_URL.startswith("embedded:"):
    CELERY_BROKER_TRANSPORT_OPTIONS = {"folder": str(DATA_DIR / "broker")}
elif CELERY_BROKER_URL.startswith("redis"):
    # A timeout for tasks that are sent at once, and for workers; the drainer sets its own timeouts.
    CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 30}
elif CELERY_BROKER_URL.startswith(("amqp", "pyamqp")):
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "read_timeout": 30,
        "write_timeout": 30,
        "confirm_publish": True,
    }
CELERY_TASK_IGNORE_RESULT = True
# The outbox delivers a job to the broker at least once; these two keep it there until it has run.
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 16
# A worker keeps a database connection for so many tasks. Celery's default: a new one for each task.
CELERY_DB_REUSE_MAX = 500
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

# Outbox

LEASE_SECONDS = env.float("LEASE_SECONDS", default=10.0)
OUTBOX = {
    "INTERVAL": 0.2,
    "LEASE_SECONDS": LEASE_SECONDS,
    "PUBLISH_TIMEOUT": 0.4 * LEASE_SECONDS,
    # A job stays until a worker has executed it: what the broker loses is sent again.
    "RECEIPTS": {
        "example_project.shop.tasks.*": {"limit": env.int("RECEIPT_LIMIT", default=60)},
    },
}
