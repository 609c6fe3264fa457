"""The common part of the pages of staged and dead jobs: the message, for users who may see it.

The message is decoded if that is safe (see ``payload``), and sensitive values are masked for every
user (see ``masking``). To a user without the permission, the page names the permission.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import counting
from ..models.job import JobMessage
from ..text import one_line
from .actions import ConfirmedActionsAdmin
from .base import OutboxAdmin, column, few
from .payload import Payload, TextBlock, in_messages, payload

#: The parts of a message, as fields of a page. A field named as a column would show the column.
MESSAGE_FIELDS = ("due", "expires", "trace", "headers", "options", "content")


def carried_column(description: Any, part: Callable[[Any], TextBlock]) -> Callable[[Any, Any], Any]:
    """Return a field that shows a part of a row's payload, to users who may see it."""
    return admin.display(description=description)(
        lambda model_admin, row: carried(model_admin, row, part(row))
    )


class JobAdmin(ConfirmedActionsAdmin):
    search_fields = ["task_id"]
    search_help_text = _(
        "A whole task id. Or, among the rows that the list reads: the start of a task id, a part "
        "of the task's name, a whole ordering key or, with the permission to see messages, a part "
        "of the arguments as Celery shows them. Messages that may be sensitive are not searched."
    )

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for a whole task id by an index, and for anything else in the list's range."""
        term = search_term.strip()
        if not term:
            return queryset, False
        ids = self.ids_of_task(request, term, queryset.db)
        # If the question was about a task id, its answer must not reach other rows with the term.
        if ids or "by_id" in request.POST:
            request.outbox_by_id = True  # type: ignore[attr-defined]
            return few(request, queryset, ids), False
        asked = Q(task__contains=term) | Q(ordering_key=term) | Q(task_id__startswith=term)
        if request.user.has_perm(self.payload_permission):
            queryset, in_message = in_messages(queryset, term)
            asked |= in_message
        return queryset.filter(asked), False

    def ids_of_task(self, request: HttpRequest, task_id: str, using: str) -> list[int]:
        rows = self.model._default_manager.using(using).filter(task_id=task_id)
        return list(rows.values_list("id", flat=True)[: counting.LISTED])

    @admin.display(description=_("call"))
    def called(self, job: Any) -> str:
        """Return the call that the job is, for whom may see its arguments."""
        arguments = _payload(job).arguments
        if arguments is None:
            return gettext(
                "The stored message is damaged, so no worker can execute it. "
                "Below is what is left of it."
            )
        name = one_line(job.task.rpartition(".")[2], 100)
        return f"{name}({arguments if getattr(job, 'may_be_seen', False) else '…'})"

    due = column(_("due"), lambda job: _payload(job).due or "-")
    expires = column(_("expires"), lambda job: _payload(job).expires or "-")
    trace = column(_("trace"), lambda job: _payload(job).trace or "-")
    headers = carried_column(_("headers"), lambda job: _payload(job).headers)
    options = carried_column(_("route and properties"), lambda job: _payload(job).options)
    content = carried_column(_("body"), lambda job: _payload(job).body)


def carried(model_admin: OutboxAdmin, row: Any, part: TextBlock) -> SafeString:
    """Return a part of a row's payload as HTML, or for other users the permission it needs."""
    if not getattr(row, "may_be_seen", False):
        words = gettext("Hidden: this needs the permission %(permission)s.")
        return format_html("<p>{}</p>", words % {"permission": model_admin.payload_permission})
    note = format_html("<p>{}</p>", part.note) if part.note else SafeString()
    if part.text is None:
        return note
    return format_html('<div>{}<pre class="outbox-message">{}</pre></div>', note, part.text)


def _payload(job: JobMessage) -> Payload:
    # Kept with the job, as six fields of its page show parts of it.
    if not hasattr(job, "_payload"):
        job._payload = payload(job)  # type: ignore[attr-defined]
    return job._payload  # type: ignore[attr-defined, no-any-return]
