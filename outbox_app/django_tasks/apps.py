"""The Django app of the backend of ``django.tasks``."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _

from .. import capability


class DjangoTasksConfig(capability.Capability):
    name = "outbox_app.django_tasks"
    label = "outbox_django_tasks"
    verbose_name = _("Outbox: tasks")

    def start(self) -> None:
        from . import tasks  # noqa: F401  # registers a Celery task
