"""Staged jobs: a list, a page for each with its message, and cancelling one by deleting it.

Whoever may delete a staged job cancels it: it never leaves, unless a drainer had it in hand at that
moment. There is no deleting of many at once.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..models.job import JobMessage
from .base import ModelAdmin, OutboxAdmin
from .filters import StateFilter, column_filter
from .payload import Part, Payload, payload

#: The parts of a message, as fields of a page. Not named as columns: Django would take those.
MESSAGE_FIELDS = ("due", "expires", "headers", "options", "content")


class MessageFields(OutboxAdmin):
    """A page that shows a job's message, decoded where that is safe."""

    searched_column = "task_id"
    search_help_text = _("The whole task id.")

    @admin.display(description=_("due"))
    def due(self, job: JobMessage) -> str:
        """When a worker may run it."""
        return _payload(job).due or "-"

    @admin.display(description=_("expires"))
    def expires(self, job: JobMessage) -> str:
        """When it is worth nothing any more."""
        return _payload(job).expires or "-"

    @admin.display(description=_("headers"))
    def headers(self, job: JobMessage) -> SafeString:
        """Headers of the message."""
        return block(_payload(job).headers)

    @admin.display(description=_("route and properties"))
    def options(self, job: JobMessage) -> SafeString:
        """All that the message holds besides headers and body."""
        return block(_payload(job).options)

    @admin.display(description=_("body"))
    def content(self, job: JobMessage) -> SafeString:
        """Arguments of the task."""
        return block(_payload(job).body)


class StagedJobAdmin(MessageFields):
    """Jobs on their way to the broker."""

    list_display = ["id", "task", "task_id", "queue", "ordering_key", "available_at", "staged_at"]
    list_filter = [
        StateFilter,
        column_filter("task", _("task")),
        column_filter("queue", _("queue")),
    ]
    sortable_by = ["id"]
    actions = None
    fieldsets = [
        (
            None,
            {
                "fields": [
                    "task",
                    "task_id",
                    "queue",
                    "ordering_key",
                    "app",
                    "shard",
                    "staged_at",
                    "available_at",
                ]
            },
        ),
        (_("Message"), {"fields": MESSAGE_FIELDS}),
    ]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Cancelling takes the permission to delete."""
        return ModelAdmin.has_delete_permission(self, request, obj)


def _payload(job: JobMessage) -> Payload:
    # Five fields of one page show parts of it.
    if not hasattr(job, "_payload"):
        job._payload = payload(job)  # type: ignore[attr-defined]
    return job._payload  # type: ignore[attr-defined, no-any-return]


def block(part: Part) -> SafeString:
    """Return a part of a message as HTML."""
    if part.text is None:
        return format_html("<p>{}</p>", part.note)
    note = format_html("<p>{}</p>", part.note) if part.note else ""
    return format_html('<div>{}<pre class="outbox-message">{}</pre></div>', note, part.text)
