"""The settings of the worker processes."""

from tests.settings import *  # noqa: F403

TASKS = {
    "default": {"BACKEND": "outbox_app.django_tasks.OutboxBackend", "QUEUES": ["default", "mails"]}
}
